"""Is what a CUDA image holds served rightly on a card? The gate's questions to the image's own launcher and files.

    python benchmarks/gpu_image.py prepare IMAGE.tar --store STORE --to FOLDER     where the image was built
    python benchmarks/gpu_image.py serve FOLDER --out OUT                          where the card and the engine are
    python benchmarks/gpu_image.py page docs/results/gpu-image.md OUT/gpu_image.json ...

`prepare` lays the image's /opt out in FOLDER, with the prompts of its build's replay (what each drafted and accepted,
on CPU in FP32). `serve` needs Python with the image's engine, and no container engine: the image's launcher is started
from that folder (`--root`) with its own serve.json, patches and weights, twice: as it is and `--without-drafter`
(that one with a variable as Kubernetes injects it). It starts when the first is ready: an engine that measures the
card's memory while another takes some is wrong about its own.
What stays untested is what needs a container: that the base's libraries fit the machine. OUT/gpu_image.json has every
check, OUT/*.log what the servers said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "compiler"))

from qdc.gate import contracts, host  # noqa: E402
from qdc.gate.contracts import Subject  # noqa: E402
from qdc.gate.image_gate import replayed  # noqa: E402
from qdc.gate.running import Running  # noqa: E402
from qdc.gate.steps import Steps, Stop  # noqa: E402

PAGE = """\
Made by `benchmarks/gpu_image.py`: tiny, built for vLLM 0.25.1 on CUDA, its files laid out as in the image, served by
the image's own launcher, and asked what `qdc gate` asks. The engine came with the machine, not with a base image: what
a container adds (the base's libraries against the driver) is not shown. The replay that acceptance is compared with is
FP32 on a CPU. In these runs both servers started at once.

`lossless` fails on both: the 200 conversations with head-room are equal, and of the 5 that fill the context one gets
another text, with the W4 drafter and its patch and with the BF16 one without any patch alike. It is what `ENG02` warns
of before the build: this engine loses a hybrid target's state where drafts are trimmed. 0.32.0 has a correction, which
was not run on a card here."""
OPT = ("opt/models", "opt/qdc/serve.json", "opt/qdc/manifest.json", "opt/qdc/packages.json", "opt/qdc/serving",
       "opt/qdc/patches")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve what a CUDA image holds, and gate it.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare")
    prepare.add_argument("image", type=Path)
    prepare.add_argument("--store", type=Path, required=True)
    prepare.add_argument("--to", type=Path, required=True)
    serve = verbs.add_parser("serve")
    serve.add_argument("folder", type=Path)
    serve.add_argument("--out", type=Path, required=True)
    serve.add_argument("--start-limit", type=float, default=330.0, metavar="S")
    page = verbs.add_parser("page")
    page.add_argument("page", type=Path)
    page.add_argument("answers", type=Path, nargs="+")
    options = parser.parse_args()
    {"prepare": lay_out, "serve": gate, "page": write_page}[options.verb](options)


def lay_out(options: argparse.Namespace) -> None:
    """The image's files below /opt, and the prompts that a gate asks of its build."""
    from qdc.cli.progress import Quiet
    from qdc.formats import oci
    from qdc.run.replay import replay_served
    from qdc.run.settings import settings
    from qdc.store.store import Store

    image, store = oci.open_image(options.image), Store(options.store.resolve())
    for path in image.files():
        if path.startswith(OPT):
            place = options.to / "root" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(image.read(path))
    record = next(
        build
        for name in store.builds()
        if (build := store.build(name)) and build["image"]["id"].removeprefix("sha256:") in image.image_id
    )
    evaluation, prompts = replay_served(store, settings(), record, Quiet()) or ({}, [])
    said = {"image": record["image"], "replay": evaluation.get("rows"), "prompts": prompts}
    (options.to / "prompts.json").write_text(json.dumps(said))


def gate(options: argparse.Namespace) -> None:
    root, began = options.folder / "root", time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    said = json.loads((options.folder / "prompts.json").read_text())
    manifest = (root / "opt/qdc/manifest.json").read_bytes()
    contract = contracts.of_manifest(json.loads(manifest)).limited(options.start_limit)
    seconds: dict[str, float] = {}

    def report(done: int, total: int, words: str) -> None:
        id, colon, _ = words.partition(": ")
        if colon and id.isalpha():
            seconds[id] = round(time.monotonic() - began, 1)
            print(words, flush=True)

    steps = Steps(report)
    with contextlib.ExitStack() as stack, contextlib.suppress(Stop):
        logs = [options.out / f"{name}.log" for name in ("served", "plain")]
        environment = {**os.environ, "VLLM_PORT": "tcp://10.0.0.1:80"}
        served = stack.enter_context(host.serve(sys.executable, root, ["--verify"], None, logs[0]))
        prompts = said["prompts"]
        replay = [replayed(row) for row in prompts] or None
        run = Running(
            steps,
            served,
            contract,
            Subject.of(json.loads(manifest)),
            True,
            [row["messages"] for row in prompts],
            replay,
        )
        with steps.step("ping"):
            seconds["start"] = round(run.ready(served), 1)
        plain = stack.enter_context(host.serve(sys.executable, root, ["--without-drafter"], environment, logs[1]))
        run.answers(manifest)
        run.speculation()
        with steps.step("lossless", stop=False):
            run.ready(plain)
        run.use()
        run.compare(plain)
    answer: dict[str, Any] = {
        "image": said["image"],
        "replay": said["replay"],
        "machine": machine(),
        "seconds": seconds,
        "checks": [check.as_json() for check in steps.checks],
    }
    (options.out / "gpu_image.json").write_text(json.dumps(answer, indent=1))
    for check in steps.checks:
        print(check.id, check.outcome, check.figure, check.why[:300])


def write_page(options: argparse.Namespace) -> None:
    """What every run found, a table each."""
    lines = ["# CUDA images on a card, measured", "", PAGE]
    for place in options.answers:
        found = json.loads(place.read_text())
        machine, image = found["machine"], found["image"]
        lines += [
            "",
            f"## {image['name']}",
            "",
            f"`{image['id']}`; vLLM {machine['vllm']}, torch {machine['torch']}, {machine['card']}. Ready after "
            f"{found['seconds']['start']} s.",
            "",
            "| check | outcome | figure | why |",
            "|---|---|---|---|",
        ]
        for check in found["checks"]:
            figure = "" if check["figure"] is None else json.dumps(check["figure"], ensure_ascii=False)
            lines.append(f"| {check['id']} | {check['outcome']} | {figure} | {check['why'].splitlines()[0]} |")
    options.page.write_text("\n".join(lines) + "\n")


def machine() -> dict[str, str]:
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


if __name__ == "__main__":
    main()
