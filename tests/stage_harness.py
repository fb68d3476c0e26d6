"""Run a stage's `run` in this process: `run_stage(kind, inputs, params, folder) -> output folder`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from qdc.core.stage import Context, Report, silent

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def run_stage(
    kind: str,
    inputs: dict[str, Path],
    params: dict[str, Any],
    tmp_path: Path,
    threads: int = 1,
    report: Report = silent,
) -> Path:
    """Run stage `kind` (as in the stage table, `evaluate:target` included) with `tmp_path` as its work folder.

    The output folder is `tmp_path / "output"`; `tmp_path / "partial"` outlives a failed run.
    """
    module = importlib.import_module("qdc.stages." + kind.replace("-", "_").replace(":", "_"))
    output, partial = tmp_path / "output", tmp_path / "partial"
    for folder in (output, partial):
        folder.mkdir(parents=True, exist_ok=True)
    if "torch" in dir(module):
        module.torch.set_num_threads(threads)
    context = Context(
        inputs=inputs,
        digests=dict.fromkeys(inputs, "0" * 64),
        params=params,
        output=output,
        partial=partial,
        threads=threads,
        report=report,
    )
    module.run(context)
    return output
