"""Engine patch `torchvision-ops`: lets a text model be served without torchvision.

vLLM's Qwen3.5 model file imports transformers' image and video processing, whose files import the name
`torchvision.transforms.v2.functional` at their top, also where only text is served. torchvision itself would have
to match the torch build to the letter. This puts an empty module under that name: importing works, using any image
operation raises AttributeError. transformers is asked first whether torchvision is there, so that it goes on
believing that it is not. Loaded by the engine as a general plugin in every process; does nothing (and says so by
an exception) where a real torchvision is installed. Knows transformers 5.17 and vLLM 0.32.0.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

NAME = "torchvision-ops"
CHAIN = ("torchvision", "transforms", "v2", "functional")


def apply() -> None:
    """Register the empty modules; a second call does nothing."""
    if is_in_place():
        return
    if "torchvision" in sys.modules or find_spec("torchvision") is not None:
        raise RuntimeError(f"{NAME}: torchvision is installed; leave this patch out or the package")
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # the answer is cached: it stays "no"
    parent: ModuleType | None = None
    for depth in range(1, len(CHAIN) + 1):
        module = ModuleType(".".join(CHAIN[:depth]))
        module.__qdc_patch__ = NAME  # type: ignore[attr-defined]
        module.__path__ = []
        sys.modules[module.__name__] = module
        if parent is not None:
            setattr(parent, CHAIN[depth - 1], module)
        parent = module


def is_in_place() -> bool:
    """Whether this process has the empty modules."""
    return getattr(sys.modules.get(".".join(CHAIN)), "__qdc_patch__", None) == NAME
