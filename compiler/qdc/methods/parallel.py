"""Several processes that train one model: each takes a share of every batch, and their gradients are added.

The loss of a share is divided by what the whole batch counts, so that the sum is the gradient of one process with the
whole batch, but for the order of additions. Knows torch.distributed, not who starts processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from qdc.core.errors import COULD_NOT, QdcError


@dataclass(frozen=True)
class Group:
    """Process `rank` of `size`. With one process nothing is sent."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, rows: Sequence[Any]) -> Sequence[Any]:
        """This process's part of a batch's rows, which may be none."""
        return rows[self.rank :: self.size]

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Each parameter's gradient becomes the sum of all processes'."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def total(self, value: float, device: torch.device) -> float:
        """The sum of all processes' `value`."""
        if self.size == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(held)
        return float(held)


ALONE = Group()


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """Inside, this process is one of those that torchrun's variables name; each ends when all are done.

    One that fails does not wait for the others: torchrun ends them.
    """
    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def card(kind: str, number: int) -> str:
    """The name of device `number` of `kind` ("cuda"), which becomes this process's own.

    Kernels that give the same bits each time are preferred; the backward pass of attention has none for FP32, so that
    the last bits of a training on a card may differ from run to run. Raises QdcError `stage.device` where torch sees no
    such card.
    """
    there = torch.cuda.device_count()
    if number >= there:
        seen = f"{there} card{'s' if there > 1 else ''}" if there else "no card"
        raise QdcError(
            "stage.device",
            f"the setting `device` is {kind}, and torch {torch.__version__} sees {seen} of that kind; "
            f"process {number + 1} of a training wants one of its own",
            hint="set QDC_DEVICE=cpu, fewer `processes`, or QDC_TRAIN_PYTHON to an interpreter with a CUDA torch",
            exit_code=COULD_NOT,
        )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(number)
    return f"{kind}:{number}"
