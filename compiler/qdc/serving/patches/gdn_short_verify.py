"""Engine patch `gdn-short-verify`: verify steps shorter than 1 + K tokens keep the right convolution history.

In vLLM 0.32.0 the CPU code of the Gated-DeltaNet layer rolls its convolution window by `state_len - step length`
columns. Near `max_model_len` a verify step holds fewer than 1 + K tokens; the engine then either dies or, worse,
goes on with a misplaced history and answers other text than without speculation. The next step looks for its
history at columns `accepted - 1 .. accepted + width - 3`, so exactly `width - 2` columns must stay, whatever
the step's length, and only the leading columns may be written. The compiled convolution, which processors with AMX
use, has the same fault; it is kept for whole steps only. Loaded by the engine as a general plugin in every
process; any surprise is an exception, which stops the engine. Knows only `_spec_forward` of that version.
"""

from __future__ import annotations

import hashlib
import inspect
from types import ModuleType

NAME = "gdn-short-verify"
MODULE = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
FUNCTION = "_spec_forward"
SOURCE_SHA256 = "ce07e6524ea1635b866b0871bdfe996773e47b7a122621748738e3f44db80208"  # vLLM 0.32.0
CHANGES = (
    ("offset + 1 : offset + 1 + (state_len - q_i)]", "offset + 1 : offset + 1 + (width - 2)]"),
    ("int(seq_lens[0].item()) > 0", "int(seq_lens[0].item()) == state_len - (width - 2)"),
    ("B.copy_(new_B)", "B[:, : new_B.size(-1)].copy_(new_B)"),
)


def patched(source: str) -> str:
    """The function's source with the changes. Raises RuntimeError unless it is the one that was examined."""
    found = hashlib.sha256(source.encode()).hexdigest()
    if found != SOURCE_SHA256:
        raise RuntimeError(f"{NAME}: {MODULE}.{FUNCTION} is not the examined source (SHA-256 {found})")
    for old, new in CHANGES:
        if source.count(old) != 1:
            raise RuntimeError(f"{NAME}: expected `{old}` once in {FUNCTION}")
        source = source.replace(old, new)
    return source


def apply() -> None:
    """Put the changed function in place of the engine's; a second call does nothing."""
    module = _module()
    if is_in_place():
        return
    original = getattr(module, FUNCTION)
    code = compile(patched(inspect.getsource(original)), f"<{NAME}>", "exec")
    names: dict[str, object] = {}
    exec(code, module.__dict__, names)
    function = names[FUNCTION]
    function.__qdc_patch__ = NAME  # type: ignore[attr-defined]
    setattr(module, FUNCTION, function)
    if not is_in_place():
        raise RuntimeError(f"{NAME}: {FUNCTION} could not be replaced")


def is_in_place() -> bool:
    """Whether this process runs the changed function."""
    return getattr(getattr(_module(), FUNCTION), "__qdc_patch__", None) == NAME


def _module() -> ModuleType:
    import importlib

    return importlib.import_module(MODULE)
