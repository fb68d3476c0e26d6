"""Which modules of a target are quantized and which are left: by module kind and the recipe's ignore patterns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qdc.core.errors import COULD_NOT, QdcError
from qdc.methods.packing import split_modules


def census(model: torch.nn.Module, ignore: Sequence[str]) -> tuple[list[str], list[str]]:
    """(quantized, ignored) names of the model's Linear and convolution modules, sorted.

    Raises QdcError for a pattern that names none of them, for a convolution that no pattern names (it cannot be
    quantized), and when nothing is left to quantize.
    """
    kinds = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv1d)
    }
    quantized, ignored = split_modules(kinds, ignore)
    wrong = [name for name in quantized if kinds[name] != "Linear"]
    if wrong or not quantized:
        message = f"convolutions cannot be quantized: {wrong[:3]}" if wrong else "every module is ignored"
        raise QdcError("methods.census.modules", message, exit_code=COULD_NOT)
    return quantized, ignored
