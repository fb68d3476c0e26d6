"""Engine patch `amx-permission`: asks the kernel for the AMX tile registers before the engine uses them.

Linux lets a process use AMX only after it asked (arch_prctl ARCH_REQ_XCOMP_PERM; kept over fork, lost on exec).
In vLLM 0.32.0 the INT4 matrix product of the CPU platform uses AMX wherever the processor has it and asks nobody;
it works only if oneDNN happened to ask before. Where every linear layer is INT4 nothing does, and the engine dies at
its first request of an illegal instruction. Loaded by the engine as a general plugin in every process. Does nothing
on a processor without AMX.
"""

from __future__ import annotations

NAME = "amx-permission"


def apply() -> None:
    """Ask for the permission; asking again is harmless. Raises RuntimeError if the kernel refuses."""
    if not is_in_place():
        raise RuntimeError(f"{NAME}: the processor has AMX, but the kernel does not let this process use it")


def is_in_place() -> bool:
    """Whether this process may use AMX, or the processor has none."""
    import torch

    return not torch.cpu._is_amx_tile_supported() or bool(torch.cpu._init_amx())
