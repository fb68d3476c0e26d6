"""The answers of `gpu_patches.py` as one page: python benchmarks/gpu_page.py docs/results/gpu-patches.md OUT/*.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(page: Path, files: list[Path]) -> None:
    found: dict[str, Any] = {}
    for file in files:
        found |= {part: answer for part, answer in json.loads(file.read_text()).items() if answer.get("ran", True)}
    machine = next(answer["vllm"] for answer in found.values() if "vllm" in answer)
    lines = [
        "# The engine patches for GPUs, measured",
        "",
        f"vLLM {machine}. Made by `python benchmarks/gpu_patches.py --out OUT --parts correct` (and `latency`), then",
        "`python benchmarks/gpu_page.py`. Qwen3.5-4B's shapes, random weights: W4A16 target (group 32), DFlash drafter",
        "of 537 M parameters, draft block 16, K 15, CUDA graphs on. What a part proves: `benchmarks/gpu_patches.py`.",
        "",
        "| part | holds | seconds |",
        "|---|---|---|",
    ]
    lines += [
        f"| {part} | {'yes' if answer['passes'] else 'NO'} | {answer['s']} |"
        for part, answer in found.items()
        if "passes" in answer
    ]
    lines += ["", "What the self-tests and the unpatched engine say:", ""]
    lines += [f"- {part}: `{answer['line']}`" for part, answer in found.items() if answer.get("line")]
    compare = found["compare"]
    lines += [
        "",
        "## The W4 drafter through the patch, beside its dequantized BF16 twin",
        "",
        "Relative distance of the first step's hidden states from FP32 with the same taps; ids of 600 drafted tokens.",
        "",
        "| prompt | W4 | BF16 twin | W4 from unquantized weights | draft ids equal / tied / apart | greedy text |",
        "|---|---|---|---|---|---|",
    ]
    for prompt, row in compare["drafts"].items():
        ids = row["draft_ids"]
        counts = f"{ids['equal']} / {ids['tied']} / {ids['apart']}"
        apart = (row["w4_from_exact"], row["bf16_from_exact"], row["w4_from_unquantized"])
        lines.append(f"| {prompt} | {apart[0]:.5f} | {apart[1]:.5f} | {apart[2]:.3f} | {counts} | {row['tokens']} |")
    lines += [
        "",
        "## The window above itself (1024)",
        "",
        "| prompt | first step windowed | distance from FP32 with that mask | with the other mask |",
        "|---|---|---|---|",
    ]
    for prompt, row in compare["window"].items():
        said = "yes" if row["windowed"] else "no"
        lines.append(f"| {prompt} | {said} | {row['from_exact']:.5f} | {row['from_the_wrong_window']:.3f} |")
    lines += [
        "",
        "## Milliseconds a request, as if the acceptance length were 5",
        "",
        "A what-if for kernels: never a result about a drafter. Median of 5, all of them beside it; a shared card.",
        "",
        "| part | 64/128 | 2048/256 | 8192/256 |",
        "|---|---|---|---|",
    ]
    for part, answer in found.items():
        if "ms" in answer:
            cells = [
                f"{row['median']:.0f} ({', '.join(f'{ms:.0f}' for ms in row['all'])})" for row in answer["ms"].values()
            ]
            lines.append(f"| {part.removeprefix('latency-')} | {' | '.join(cells)} |")
    page.write_text("\n".join(lines) + "\n")


def _times(row: dict[str, Any]) -> str:
    return f"{row['median']:.0f} ({', '.join(f'{ms:.0f}' for ms in row['all'])})"


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
