"""compressed-tensors `pack-quantized`: codes in int32 words, the config that says so, module names.

Nibble i of word j holds column 8 j + i as code + 8. Written out here, and not imported, because the import of
compressed_tensors costs seconds a process; tests hold both directions to that library. Knows nothing of folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from qdc.core.errors import COULD_NOT, QdcError


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int32 [out, in / 8] from int8 codes [out, in] in [-8, 7]."""
    stored = (codes.to(torch.int32) + 8).unflatten(-1, (-1, 8))
    words = (stored << torch.arange(0, 32, 4, dtype=torch.int32)).sum(dim=-1, dtype=torch.int64)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """int8 codes [out, in] from int32 [out, in / 8]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 15
    return (nibbles.flatten(-2) - 8).to(torch.int8)


def packed_tensors(module: str, codes: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three tensors that stand for `<module>.weight` in a packed checkpoint."""
    return {
        f"{module}.weight_packed": pack_codes(codes),
        f"{module}.weight_scale": scale.contiguous(),
        f"{module}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }


def matches(module: str, pattern: str) -> bool:
    """Whether an ignore pattern names a module: a plain name, or `re:` and an expression from the start."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern


def split_modules(modules: Iterable[str], ignore: Sequence[str]) -> tuple[list[str], list[str]]:
    """(quantized, ignored) module names, sorted. Raises QdcError for a pattern that names no module."""
    names = sorted(modules)
    for pattern in ignore:
        if not any(matches(name, pattern) for name in names):
            raise QdcError(
                "methods.packing.ignore", f"the ignore pattern {pattern} names no module", exit_code=COULD_NOT
            )
    ignored = [name for name in names if any(matches(name, pattern) for pattern in ignore)]
    return [name for name in names if name not in set(ignored)], ignored
