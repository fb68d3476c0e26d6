"""GPTQ of one Linear (Frantar et al. 2022, algorithm 1): codes chosen column by column, errors passed on.

No activation order, scales by group from the weights as already corrected, each rounded to BF16 before the
group is coded. Which modules are quantized, and how the Hessian is gathered, is the caller's business.
"""

from __future__ import annotations

from typing import Any

import torch

from qdc.core.errors import COULD_NOT, QdcError
from qdc.methods import grid


class Hessian:
    """Sum of x x' over the inputs of one Linear: `total` [in, in] FP32, `rows` seen."""

    def __init__(self, columns: int) -> None:
        self.total = torch.zeros(columns, columns)
        self.rows = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Add inputs [..., in]; rows that must not count (padding) are left out by the caller."""
        flat = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        self.total = self.total.to(flat.device)
        self.total += flat.T @ flat
        self.rows += flat.shape[0]


def _inverse_factor(hessian: torch.Tensor, damp: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper Cholesky factor of the damped inverse, and which columns were never fed."""
    damped = hessian.double().clone()
    diagonal = damped.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    diagonal += damp * diagonal.mean()
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True).float(), dead
    except torch.linalg.LinAlgError as error:
        raise QdcError(
            "methods.gptq.hessian",
            "the Hessian is not positive definite",
            hint="raise damp, or calibrate on more text",
            exit_code=COULD_NOT,
        ) from error


def gptq_quantize(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: dict[str, Any], damp: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [out, in], scale BF16 [out, in / group_size]) of `weight` [out, in].

    `hessian` [in, in]: sum (or mean) of x x' over the calibration inputs; `damp`: share of its mean diagonal
    added to the diagonal. Computed where the Hessian is, given on the CPU. Raises QdcError if the damped Hessian is not
    positive definite.
    """
    grid.check_scheme(scheme, weight.shape[-1])
    group, bits = int(scheme["group_size"]), int(scheme["bits"])
    factor, dead = _inverse_factor(hessian, damp)
    work = weight.detach().to(hessian.device, torch.float32, copy=True)
    work[:, dead] = 0
    codes = torch.empty(work.shape, dtype=torch.int8, device=work.device)
    scales = torch.empty(work.shape[0], work.shape[1] // group, dtype=torch.bfloat16, device=work.device)
    for start in range(0, work.shape[1], group):
        stop = start + group
        scale = grid.absmax_scale(work[:, start:stop], group, bits)
        scales[:, start // group : start // group + 1] = scale
        errors = torch.empty(work.shape[0], group, device=work.device)
        for column in range(start, stop):
            now = work[:, column : column + 1]
            code = grid.encode(now, scale, bits)
            codes[:, column : column + 1] = code
            error = (now - grid.decode(code, scale).float()) / factor[column, column]
            work[:, column:stop] -= error * factor[column : column + 1, column:stop]
            errors[:, column - start : column - start + 1] = error
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    return codes.cpu(), scales.cpu()


def output_error(weight: torch.Tensor, served: torch.Tensor, hessian: torch.Tensor) -> float:
    """Relative output error tr(D H D') / tr(W H W') of `served` [out, in] in place of `weight`."""
    full = weight.detach().to(hessian.device).double()
    gap = full - served.detach().to(hessian.device).double()
    scale = float(((full @ hessian.double()) * full).sum())
    return float(((gap @ hessian.double()) * gap).sum()) / scale if scale > 0 else 0.0
