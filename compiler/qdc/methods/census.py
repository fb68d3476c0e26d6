"""Which modules of a target are quantized and which are left: by module kind and the recipe's ignore patterns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats.qwen35 import whole_name
from qdc.methods.packing import split_modules


def census(
    model: torch.nn.Module, ignore: Sequence[str], left_out: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """(quantized, ignored) names of the model's Linear and convolution modules, sorted.

    `left_out`: modules of the whole model that this one was taken from; patterns then name modules as the whole has
    them, and may name those. Raises QdcError for a pattern that names no module, for a convolution that no pattern
    names (it cannot be quantized), and when nothing is left to quantize.
    """
    kinds = {
        name if left_out is None else whole_name(name): (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv1d)
    }
    quantized, ignored = (
        [kinds[name] for name in names if name in kinds] for names in split_modules({*kinds, *(left_out or ())}, ignore)
    )
    wrong = [name for name, kind in quantized if kind != "Linear"]
    if wrong or not quantized:
        message = f"convolutions cannot be quantized: {wrong[:3]}" if wrong else "every module is ignored"
        raise QdcError("methods.census.modules", message, exit_code=COULD_NOT)
    return sorted(name for name, _ in quantized), sorted(name for name, _ in ignored)
