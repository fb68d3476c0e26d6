"""Engine patch `expand-sampling`: sampled requests keep their temperature, top-k and top-p under speculation.

To check draft tokens of a sampled request, vLLM 0.32.0 repeats each request's sampling parameters once a token. Its
CPU code writes them into a 64-bit integer copy that is thrown away, so that temperature and top-p are whatever lay in
memory and a top-k ends the engine ("index ... is out of bounds"). This puts the same in torch operations. Greedy
requests do not pass here. Loaded by the engine as a general plugin in every process. Knows only that version's
`expand_batch_to_tokens`.
"""

from __future__ import annotations

import hashlib
import inspect
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAME = "expand-sampling"
MODULE = "vllm.v1.sample.rejection_sampler"
FUNCTION = "expand_batch_to_tokens"
SOURCE_SHA256 = "ef896c2fe058ae7033bbb8916d1917c91e5f3724a66adf5a7e168e544449384d"  # vLLM 0.32.0


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each value of `x` [requests] as often as its request has tokens: [num_tokens], of x's dtype.

    `cu_num_tokens` [requests]: tokens up to and with each request. Values equal to `replace_from` become `replace_to`.
    """
    repeats = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(repeats, output_size=num_tokens)


def apply() -> None:
    """Put this module's function in place of the engine's; a second call does nothing."""
    module = _module()
    if is_in_place():
        return
    found = hashlib.sha256(inspect.getsource(getattr(module, FUNCTION)).encode()).hexdigest()
    if found != SOURCE_SHA256:
        raise RuntimeError(f"{NAME}: {MODULE}.{FUNCTION} is not the examined source (SHA-256 {found})")
    setattr(module, FUNCTION, expand_batch_to_tokens)


def is_in_place() -> bool:
    """Whether this process uses this module's function."""
    return getattr(getattr(_module(), FUNCTION), "__module__", None) == __name__


def _module() -> ModuleType:
    import importlib

    return importlib.import_module(MODULE)
