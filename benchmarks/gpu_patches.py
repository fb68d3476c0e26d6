"""Do the engine patches for GPUs do what they say? Measured with vLLM 0.25.1 on one card, at Qwen3.5-4B's shapes.

Needs torch, transformers, safetensors and vLLM on PYTHONPATH, and `compiler/`; no network, no weights of anybody.
Usage:  python benchmarks/gpu_patches.py --out OUT [--work DIR] [--parts a,b] [--budget-s 570]
Each part is a process of its own with a time limit and a log of its own; OUT/gpu_patches.json has every answer,
OUT/gpu_patches.log the end of every log. The parts, and what each shows:
  make             the checkpoints (made where they are missing whatever the parts)
  w4, bf16         the W4 drafter through the patch, its dequantized BF16 twin without; the same prompts
  above            W4 and window with both patches, prompts shorter and longer than the window
  compare          judges w4, bf16 and above against the drafter as it is trained here, in FP32 with a dense mask
  version, class, backend   a wrong version, a changed class, a changed backend: the self-tests stop the start
  unpatched        without the patch the engine dies at loading, of `weight`
  latency-...      ms of a request *as if* the acceptance length were 5: a what-if, never a result about a drafter
Tolerance: all three compute the same function of the same taps, and the engine rounds to BF16 along the way. How far
the BF16 twin is from FP32 says what that rounding does; the W4 kernel may be twice as far. That the yardstick can
fail is shown beside it: FP32 with the weights before quantization, and with the wrong window, is much farther.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMPILER = HERE.parent / "compiler"
CORRECT = ("w4", "bf16", "above", "compare", "version", "class", "backend", "unpatched")
LATENCY = ("latency-w4", "latency-bf16", "latency-w4-above", "latency-w4-window", "latency-bf16-window")
BOTH = ("w4-drafter", "swa-above-window")
LENGTHS = (64, 700, 3000)
WINDOW_LENGTHS = (700, 1000, 3000)  # 1000 crosses the window of 1024 while it generates
PATCHES: dict[str, tuple[str, ...]] = {
    "version": BOTH,
    "class": ("w4-drafter",),
    "backend": ("swa-above-window",),
    "w4": ("w4-drafter",),
    "above": BOTH,
    "latency-w4": ("w4-drafter",),
    "latency-w4-window": ("w4-drafter",),
    "latency-w4-above": BOTH,
}
STOPS = {  # part -> (exit status, what its log says)
    "version": (1, "vLLM 0.26.0 was not examined"),
    "class": (1, "_build_fused_kv_buffers is not the examined source"),
    "backend": (1, "FlashAttentionImpl.forward is not the examined source"),
    "unpatched": (1, "has no attribute 'weight'"),
}
LIMIT_S = {"make": 120, "version": 90, "class": 90, "backend": 90, "unpatched": 150, "compare": 90}
KEPT_LOG = 400_000  # characters of a part's log, from its end
TAKEN, WRONG = 2.0, 3.0
STEP = 0.03125  # between BF16 numbers from 4 to 8, where the best logits are; their deviation over the words is 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine patches on a GPU.")
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "gpu-patches", help="checkpoints, caches, whole logs"
    )
    parser.add_argument("--parts", default=",".join(CORRECT), help="comma-separated, or `correct`, `latency`")
    parser.add_argument("--budget-s", type=float, default=570, help="no part runs beyond this")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one, options.work)
        return
    if options.out is None:
        parser.error("--out is missing")
    groups = {"correct": CORRECT, "latency": LATENCY}
    parts = [part for name in options.parts.split(",") for part in groups.get(name, (name,))]
    unknown = set(parts) - {"make", *CORRECT, *LATENCY}
    if unknown:
        parser.error("unknown parts: " + ", ".join(sorted(unknown)))
    drive(parts, options)


def drive(parts: list[str], options: argparse.Namespace) -> None:
    """Run the parts one after another; write what is known after each."""
    deadline = time.monotonic() + options.budget_s
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    lay_out_patches(options.work)
    if "make" not in parts and not (options.work / "target/config.json").exists():
        parts.insert(0, "make")
    results: dict[str, Any] = {}
    log = options.out / "gpu_patches.log"
    log.write_text("")
    for part in parts:
        left = deadline - time.monotonic()
        if left < 20:
            results[part] = {"ran": False, "why": "no time was left"}
        else:
            results[part] = child(part, options.work, min(left, LIMIT_S.get(part, 200)))
        text = (options.work / f"{part}.log").read_text(errors="replace") if results[part].get("ran", True) else ""
        with log.open("a") as stream:
            stream.write(f"\n===== {part}: {json.dumps(results[part])[:2000]}\n{text[-KEPT_LOG:]}\n")
        (options.out / "gpu_patches.json").write_text(json.dumps(results, indent=1))
        print(part, json.dumps(results[part]), flush=True)


def lay_out_patches(work: Path) -> None:
    sys.path.insert(0, str(COMPILER))
    from qdc.serving.patches import patch_files

    for name in BOTH:
        for path, data in patch_files(name).items():
            place = work / "patches" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)


def child(part: str, work: Path, limit: float) -> dict[str, Any]:
    """One part in its own process; its verdict, or why there is none."""
    names = PATCHES.get(part, ())
    paths = [HERE, COMPILER, *(work / "patches" / name for name in names)]
    outside = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *outside]),
        "PYTHONUNBUFFERED": "1",
        "VLLM_PLUGINS": ",".join(names),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(work / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    answer = work / f"{part}.json"
    answer.unlink(missing_ok=True)
    began = time.monotonic()
    with (work / f"{part}.log").open("w") as stream:
        command = [sys.executable, str(HERE / "gpu_patches.py"), "--one", part, "--work", str(work)]
        process = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, 9)
            process.wait()
    found: dict[str, Any] = {"status": status, "s": round(time.monotonic() - began, 1)}
    if part in STOPS:
        return found | stopped(part, status, (work / f"{part}.log").read_text(errors="replace"))
    if answer.exists():
        return found | json.loads(answer.read_text())
    lines = [line for line in (work / f"{part}.log").read_text(errors="replace").splitlines() if line.strip()]
    return found | {"passes": False, "last_lines": lines[-6:]}


def stopped(part: str, status: int | None, text: str) -> dict[str, Any]:
    wanted, words = STOPS[part]
    lines = [line.strip() for line in text.splitlines() if words in line]
    own = not lines or part == "unpatched" or lines[-1].startswith("qdc: the engine patch")
    ended = status == wanted or (part == "unpatched" and status is None)  # it may hang after its traceback
    return {"passes": ended and bool(lines) and own, "line": lines[-1] if lines else None}


def run_one(part: str, work: Path) -> None:
    """What a child does."""
    import gpu_engine
    import gpu_models

    if part == "make":
        found = gpu_models.make(work)
    elif part in ("version", "class", "backend"):
        gpu_engine.alter(part)
        gpu_engine.start(work, "w4")
        found = {"passes": False}
    elif part == "unpatched":
        gpu_engine.start(work, "w4")
        found = {"passes": False}
    elif part == "above":
        found = gpu_engine.drafts(work, "w4-window", list(WINDOW_LENGTHS), part)
        found["passes"] = windows_are_right(found, gpu_models.WINDOW) and in_graphs(found)
    elif part in ("w4", "bf16"):
        found = gpu_engine.drafts(work, part, list(LENGTHS), part)
        found["passes"] = in_graphs(found) and found.get("context_weight_is_the_dequantized", part == "bf16")
    elif part == "compare":
        found = compare(work)
    else:
        drafter = part.removeprefix("latency-").replace("w4-above", "w4-window")
        found = gpu_engine.latency(work, drafter)
    (work / f"{part}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # an engine takes its time to end


def in_graphs(found: dict[str, Any]) -> bool:
    """Every step of the drafter was replayed from piecewise CUDA graphs."""
    return all(set(run["graph_modes"]) == {"PIECEWISE"} for run in found["runs"].values())


def windows_are_right(found: dict[str, Any], window: int) -> bool:
    """Every call of the drafter's attention had the window exactly if the batch was longer than it; both occurred."""
    seen = set()
    for run in found["runs"].values():
        for call in run["attention"]:
            who, longest, size = call.split(" ", 2)
            if who == "drafter":
                windowed = size == str((window - 1, window - 1))
                if windowed != (int(longest) > window) or not (windowed or size == "(-1, -1)"):
                    return False
                seen.add(windowed)
    return seen == {True, False} and found["kv_specs"] == ["FullAttentionSpec"]


def compare(work: Path) -> dict[str, Any]:
    """The verdict about w4, bf16 and above; needs their files."""
    import gpu_models
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: tensor.to(device) for name, tensor in gpu_models.read(work / "bf16/model.safetensors").items()}
    twin = gpu_models.reference(weights)
    for name, tensor in gpu_models.read(work / "original.safetensors").items():
        weights[name.replace(".original", ".weight")] = tensor.to(device)
    before = gpu_models.reference(weights)
    runs = {name: torch.load(work / f"{name}.pt") for name in ("w4", "bf16", "above") if (work / f"{name}.pt").exists()}

    def exact(run: dict[str, Any], drafter: Any, window: int | None) -> Any:
        step = run["steps"][0]
        taps, embedded = (step[name].float().to(device) for name in ("taps", "embedded"))
        return gpu_models.drafted(drafter, taps, embedded, window)

    found: dict[str, Any] = {"drafts": {}, "window": {}}
    if {"w4", "bf16"} <= runs.keys():
        for length in runs["w4"]:
            found["drafts"][length] = judge_drafts(runs["w4"][length], runs["bf16"][length], exact, twin, before)
    if {"above", "bf16"} <= runs.keys():
        for length, run in runs["above"].items():
            longer = length + gpu_models.K + 1 > gpu_models.WINDOW
            right, wrong = (gpu_models.WINDOW, None) if longer else (None, 64)
            first = run["steps"][0]["hidden"]
            error, other = distance(first, exact(run, twin, right)), distance(first, exact(run, twin, wrong))
            floor = max(each["bf16_from_exact"] for each in found["drafts"].values()) if found["drafts"] else None
            passes = floor is not None and error <= TAKEN * floor and other >= WRONG * error
            found["window"][length] = {
                "windowed": longer,
                "from_exact": error,
                "from_the_wrong_window": other,
                "passes": passes,
            }
    judged = [each["passes"] for group in found.values() for each in group.values()]
    return {"passes": len(judged) == len(LENGTHS) + len(WINDOW_LENGTHS) and all(judged), **found}


def judge_drafts(w4: dict[str, Any], bf16: dict[str, Any], exact: Any, twin: Any, before: Any) -> dict[str, Any]:
    """One prompt: hidden states of the first step against FP32, draft ids and the target's tokens of both."""
    first, other = w4["steps"][0], bf16["steps"][0]
    ours, floor = distance(first["hidden"], exact(w4, twin, None)), distance(other["hidden"], exact(bf16, twin, None))
    unquantized = distance(first["hidden"], exact(w4, before, None))
    slack = 6 * (ours + floor) + 2 * STEP
    kinds: list[str] = []
    for one, two in zip(w4["steps"], bf16["steps"], strict=False):
        if one["anchor"] != two["anchor"]:
            break
        kinds += [draft_agrees(one, two, row, slack) for row in range(len(one["drafted"]))]
    tokens = tokens_agree(w4, bf16)
    inputs_apart = distance(first["taps"].float(), other["taps"].float())
    passes = inputs_apart <= 0.02 and ours <= TAKEN * floor and unquantized >= WRONG * ours
    passes = passes and "apart" not in kinds and tokens != "differ"
    return {
        "passes": passes,
        "inputs_apart": inputs_apart,
        "w4_from_exact": ours,
        "bf16_from_exact": floor,
        "w4_from_bf16": distance(first["hidden"], other["hidden"]),
        "w4_from_unquantized": unquantized,
        "draft_ids": {kind: kinds.count(kind) for kind in ("equal", "tied", "apart")},
        "tokens": tokens,
    }


def draft_agrees(one: dict[str, Any], two: dict[str, Any], row: int, slack: float) -> str:
    """Whether two drafts of one place are `equal`, `tied` (in both runs their logits are within `slack`) or `apart`."""
    mine, its = one["drafted"][row], two["drafted"][row]
    if mine == its:
        return "equal"
    left = dict(zip(one["ids"][row].tolist(), one["top"][row].tolist(), strict=True))
    right = dict(zip(two["ids"][row].tolist(), two["top"][row].tolist(), strict=True))
    if its not in left or mine not in right:
        return "apart"
    return "tied" if max(left[mine] - left[its], right[its] - right[mine]) <= slack else "apart"


def tokens_agree(one: dict[str, Any], two: dict[str, Any]) -> str:
    """The target's greedy tokens: `equal`, `tied at N` (the two best within 3 steps of BF16), or `differ`."""
    for place, (mine, its) in enumerate(zip(one["tokens"], two["tokens"], strict=True)):
        if mine != its:
            chances = one["logprobs"][place]
            near = mine in chances and its in chances and abs(chances[mine] - chances[its]) <= 3 * STEP
            return f"tied at {place}" if near else "differ"
    return "equal"


def distance(found: Any, wanted: Any) -> float:
    """|found - wanted| / |wanted|."""
    return round(float((found - wanted).norm() / wanted.norm()), 6)


if __name__ == "__main__":
    main()
