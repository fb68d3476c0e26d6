"""Micro, built and then really served by vLLM on this machine, as its image would: same files, same launcher.

The engine's interpreter is QDC_SERVE_PYTHON, or an environment made here from the locks of every drafter's packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stage_harness import run_stage

from qdc.core.files import sha256_file
from qdc.formats import oci
from qdc.gate import checks, host, texts
from qdc.gate.checks import Asked
from qdc.gate.contracts import Subject
from qdc.gate.served import Served

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
LOCKS = [ROOT / "compiler" / "qdc" / "environments" / name for name in ("serve.lock", "serve-ngram.lock")]
# micro's own teacher is hardly trained: its logits tie at every tenth token, and ties hide differences
SETTINGS = ("image.base={scratch: true}", "target.base.scratch.training.steps=120")
READY_S = 400.0


def silent(*_: Any) -> None:
    pass


def run(*words: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler")},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the packages of the locks."""
    given = os.environ.get("QDC_SERVE_PYTHON")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("serve")
    venv.create(folder, with_pip=True)
    made = folder / "bin" / "python"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    run(made, *install, *(word for lock in LOCKS for word in ("-r", lock)))
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("micro") / "artifacts"


@pytest.fixture(scope="module")
def image(store: Path) -> Path:
    root = laid_out(store, store.parent / "root")
    with (root / "opt/models/target/chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking is defined and enable_thinking %}Thinking it over{% endif %}")
    return root


def laid_out(store: Path, root: Path, *settings: str) -> Path:
    """The files of micro's image but base and packages, from its exported archive."""
    archive, options = root.with_suffix(".tar"), ["--store", store, "--quiet"]
    command = [sys.executable, "-m", "qdc"]
    sets = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    run(*command, "build", ROOT / "recipes" / "micro.yaml", *sets, *options)
    run(*command, "export", "@1", f"archive:{archive}", *options)
    read = oci.open_image(archive)
    for path in read.files():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(read.read(path))
    return root


@dataclass
class Pair:
    """The image served as it is, and without its drafter; what the manifest says of it."""

    served: Served
    plain: Served
    subject: Subject
    manifest: bytes


@pytest.fixture(scope="module")
def pair(python: Path, image: Path) -> Iterator[Pair]:
    manifest = (image / "opt/qdc/manifest.json").read_bytes()
    with contextlib.ExitStack() as stack:
        injected = {**os.environ, "VLLM_PORT": "tcp://10.0.0.1:80"}
        served = stack.enter_context(host.serve(python, image))
        plain = stack.enter_context(host.serve(python, image, ["--without-drafter"], injected))
        for server in (served, plain):
            server.wait_ready("/ping", READY_S, silent)
        yield Pair(served, plain, Subject.of(json.loads(manifest)), manifest)


@pytest.fixture(scope="module")
def asked(pair: Pair) -> Asked:
    return checks.ask_greedy(pair.served, pair.subject, texts.built_in(80), 40, silent)


def test_it_answers_and_shows_its_manifest(pair: Pair) -> None:
    assert checks.check_manifest(pair.served, pair.manifest).outcome == "pass"
    assert checks.check_answers(pair.served, pair.subject).outcome == "pass"


def test_every_route_answers_and_thinking_reaches_the_template(pair: Pair) -> None:
    assert pair.served.get("/v1/models").json()["data"][0]["id"] == pair.subject.model
    assert b"vllm:" in pair.served.get("/metrics").body
    messages = [{"role": "user", "content": "Ann has 3 apples."}]
    completion = pair.served.post("/invocations", {"prompt": "Ann has 3 apples", "max_tokens": 4})
    assert completion.json()["object"] == "text_completion"
    prompts = []
    for thinking in (True, False):
        answer = pair.served.post("/invocations", {"messages": messages, "max_tokens": 4, "thinking": thinking}).json()
        assert answer["object"] == "chat.completion"
        prompts.append(answer["usage"]["prompt_tokens"])
    assert prompts[0] > prompts[1], "the template was told"
    assert pair.served.post("/invocations", {"messages": messages, "thinking": "yes"}).status == 400


PARSE = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import torchvision_ops
torchvision_ops.apply()
del sys.path[0]
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for arguments in json.load(sys.stdin):
    given = [word.replace("/opt/models/target", sys.argv[2]) for word in arguments]
    AsyncEngineArgs.from_cli_args(parser.parse_args(given))
    print("taken")
"""


def test_the_engines_own_parser_takes_what_a_gpu_image_would_tell_it(python: Path, tmp_path: Path) -> None:
    """Of the version whose CPU build is here; its arguments are those of its CUDA build."""
    told = [
        group["serve"]["arguments"]
        for place in sorted((ROOT / "tests/golden/serve").glob("*.json"))
        for group in json.loads(place.read_bytes())
        if "serve" in group and "0.32.0" in group["versions"]
    ]
    command = [python, "-s", "-c", PARSE, ROOT / "compiler/qdc/serving/patches", tmp_path]
    environment = {**os.environ, "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(word) for word in command], input=json.dumps(told), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(told) >= 7 and done.stdout.splitlines().count("taken") == len(told)


def test_the_other_says_what_was_altered_and_dropped(pair: Pair) -> None:
    shown = pair.plain.get("/manifest").json()
    assert shown["altered"] == ["without-drafter"] and "VLLM_PORT" in shown["dropped"]
    assert pair.plain.counters() == {}


def test_greedy_text_is_the_same_with_and_without_speculation(pair: Pair, asked: Asked) -> None:
    cut_off = checks.ask_to_the_end(pair.served, pair.subject, asked)
    assert len(cut_off.requests) >= checks.MIN_CUT_OFF
    figure = checks.check_lossless(pair.plain, asked, cut_off, silent).figure
    # micro is hardly trained, so its logits tie more often than the gate would allow
    assert figure["different"] == 0 and figure["ties"] <= 0.1 * figure["prompts"], figure


def test_every_answer_up_to_the_end_of_the_context_is_the_same(pair: Pair, asked: Asked) -> None:
    turns = [
        (request["body"]["messages"], answer.words(), sum(answer.tokens()))
        for request, answer in zip(asked.requests, asked.answers, strict=True)
    ]
    candidates = texts.long_conversations(turns, pair.subject.max_model_len, 80)
    counts = pair.served.ask([texts.tokenize(pair.subject.model, messages) for messages in candidates])
    room = [pair.subject.max_model_len - answer.json()["count"] for answer in counts]
    requests = [
        texts.chat(pair.subject.model, messages, ignore_eos=True)
        for messages, left in zip(candidates, room, strict=True)
        if 3 <= left < 30
    ]
    assert len(requests) >= 10
    alone = pair.served.ask(requests, concurrency=1)
    plain = pair.plain.ask([texts.with_logits(request) for request in requests], concurrency=1)
    found = [checks.difference(ours, theirs) for ours, theirs in zip(alone, plain, strict=True)]
    assert all(verdict in (None, "tie") for verdict in found), found
    assert found.count(None) >= 0.7 * len(found)


def test_a_target_wrapped_as_a_whole_model_is_served_alike(
    python: Path, image: Path, asked: Asked, pair: Pair, tmp_path: Path
) -> None:
    """As engines before vLLM 0.27 are given it; this one knows both forms."""
    packed, root = tmp_path / "packed", tmp_path / "root"
    shutil.copytree(image / "opt", root / "opt")
    shutil.copytree(image / "opt/models/target", packed / "ct")
    (packed / "proof.json").write_text("{}")
    shutil.rmtree(root / "opt/models/target")
    (run_stage("wrap-target", {"target": packed}, {}, tmp_path) / "ct").rename(root / "opt/models/target")
    place = root / "opt/qdc/serve.json"
    config = json.loads(place.read_bytes())
    weights = root / "opt/models/target/model.safetensors"
    config["weights"][0] |= {"size": weights.stat().st_size, "sha256": sha256_file(weights)}
    config["arguments"].append("--language-model-only")
    place.write_text(json.dumps(config))
    with host.serve(python, root, ["--verify"]) as served:
        served.wait_ready("/ping", READY_S, silent)
        again = checks.ask_greedy(served, pair.subject, texts.built_in(80), 40, silent)
    found = [checks.difference(ours, theirs) for ours, theirs in zip(again.answers, asked.answers, strict=True)]
    assert found == [None] * len(found)
    ours, theirs = (sum(part["accepted"] for part in made.parts) for made in (again, asked))
    assert ours == pytest.approx(theirs, rel=0.05) and ours > 0


def test_the_drafter_is_accepted(pair: Pair, asked: Asked) -> None:
    check = checks.check_acceptance(asked, None)
    assert check.outcome == "pass" and check.figure["served"] > 1.2, check


NGRAM = "drafter={architecture: {kind: ngram, prompt_lookup_min: 2, prompt_lookup_max: 4}}"


def test_an_n_gram_drafter_is_served_and_loses_nothing(python: Path, pair: Pair, store: Path, tmp_path: Path) -> None:
    root = laid_out(store, tmp_path / "root", NGRAM, "serve.k=4", "evaluate.acceptance=null")
    subject = Subject.of(json.loads((root / "opt/qdc/manifest.json").read_bytes()))
    assert (subject.drafts, subject.k) == (True, 4)
    again = {"model": subject.model, "prompt": "Ann has 3 apples and gets 2 more. " * 3, "max_tokens": 24}
    with host.serve(python, root, ["--verify"]) as served:
        served.wait_ready("/ping", READY_S, silent)
        asked = checks.ask_greedy(served, subject, texts.built_in(60), 40, silent)
        before = served.counters()
        assert served.post("/v1/completions", {**again, "temperature": 0.0}).tokens()[1] > 1
        after = served.counters()
    assert after["drafts"] > before["drafts"], "a text that repeats itself is drafted"
    plain = pair.plain.ask([texts.with_logits(request) for request in asked.requests])
    found = [checks.difference(ours, theirs) for ours, theirs in zip(asked.answers, plain, strict=True)]
    assert all(verdict in (None, "tie") for verdict in found), found
    assert found.count(None) >= 0.8 * len(found)
