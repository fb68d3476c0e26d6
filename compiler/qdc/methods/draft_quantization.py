"""Quantizing a drafter: calibration blocks, Hessians of its Linears, packed tensors and their proof.

Blocks and their weight follow the published calibration: anchors spread evenly over an answer, each block
drafted from the taps strictly below its anchor, so that a context row counts once for every anchor above it.
Here all blocks of a conversation run in one pass and context rows are weighted by that count: the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qdc.core.errors import COULD_NOT, QdcError
from qdc.methods import grid, packing
from qdc.methods.dflash import Drafter, block_tokens
from qdc.methods.draft_data import Conversation
from qdc.methods.draft_taps import pad
from qdc.methods.draft_training import Frozen
from qdc.methods.gptq import Hessian, gptq_quantize, output_error


@dataclass(frozen=True)
class CalibrationRow:
    """One conversation and the anchors of its blocks (positions in `input_ids`)."""

    input_ids: tuple[int, ...]
    anchors: tuple[int, ...]


def linears(drafter: Drafter) -> dict[str, nn.Linear]:
    """Every Linear by name, sorted."""
    return {name: m for name, m in sorted(drafter.named_modules()) if isinstance(m, nn.Linear)}


class _Gatherer:
    """Forward pre-hooks that add every Linear's input rows, weighted, to its Hessian."""

    def __init__(self, drafter: Drafter) -> None:
        self.hessians = {name: Hessian(m.in_features) for name, m in linears(drafter).items()}
        self.context: Tensor | None = None
        self.context_weight = torch.empty(0)
        self.block_weight = torch.empty(0)
        self.handles = [drafter.hidden_norm.register_forward_hook(self._context)]
        for name, module in linears(drafter).items():
            self.handles.append(module.register_forward_pre_hook(self._rows(name)))

    def _context(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.context = output

    def _rows(self, name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            of_context = name == "fc" or inputs[0] is self.context
            weight = self.context_weight if of_context else self.block_weight
            counted = weight > 0
            self.hessians[name].add(inputs[0][counted] * weight[counted].sqrt().unsqueeze(-1))

        return hook

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def hessians(
    drafter: Drafter, frozen: Frozen, rows: Sequence[CalibrationRow], taps: Sequence[Tensor], batch: int = 16
) -> dict[str, Tensor]:
    """Sum of x x' over all blocks, [in, in] FP32 by Linear name, all from the drafter as it is."""
    gatherer = _Gatherer(drafter)
    block = drafter.shape.draft_block_size
    try:
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            ids, _ = pad([row.input_ids for row in some])
            anchors, valid = pad([row.anchors for row in some])
            stacked = torch.nn.utils.rnn.pad_sequence(list(taps[start : start + batch]), batch_first=True)
            below = torch.arange(ids.shape[1]) < anchors.unsqueeze(-1)
            device = stacked.device
            gatherer.context_weight = (below & (valid.unsqueeze(-1) > 0)).sum(1).float().to(device)
            gatherer.block_weight = valid.repeat_interleave(block, dim=1).float().to(device)
            tokens = block_tokens(ids.gather(1, anchors), block, drafter.shape.mask_token_id).to(device)
            with torch.no_grad():
                drafter(stacked, F.embedding(tokens, frozen.embedding), anchors.to(device), block)
    finally:
        gatherer.close()
    return {name: h.total for name, h in gatherer.hessians.items()}


@dataclass(frozen=True)
class Quantized:
    """`packed`: tensors of the served file; `dense`: BF16 twin by plain names; `modules`: a line each."""

    packed: dict[str, Tensor]
    dense: dict[str, Tensor]
    modules: list[dict[str, Any]]


def quantize(
    drafter: Drafter,
    found: Mapping[str, Tensor],
    modules: Sequence[str],
    method: str,
    scheme: dict[str, Any],
    damp: float,
) -> Quantized:
    """Quantize `modules` by "rtn" or "gptq"; everything else stays BF16.

    Raises QdcError when a code leaves the grid, a scale is no BF16 number, or packing does not invert.
    """
    dense = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in drafter.state_dict().items()}
    packed = dict(dense)
    lines = []
    for name in modules:
        weight = dense[f"{name}.weight"].float()
        if method == "gptq":
            codes, scale = gptq_quantize(weight, found[name], scheme, damp)
        else:
            codes, scale = grid.rtn_quantize(weight, scheme)
        served = grid.decode(codes, scale)
        tensors = packing.packed_tensors(name, codes, scale)
        low, high = grid.limits(int(scheme["bits"]))
        checks = {
            "codes_in_range": bool(((codes >= low) & (codes <= high)).all()),
            "scales_bf16": scale.dtype == torch.bfloat16 and bool(torch.isfinite(scale.float()).all()),
            "unpack_of_pack_is_same": torch.equal(packing.unpack_codes(tensors[f"{name}.weight_packed"]), codes),
        }
        if not all(checks.values()):
            raise QdcError("methods.draft_quantization.proof", f"{name}: {checks}", exit_code=COULD_NOT)
        del packed[f"{name}.weight"]
        packed |= tensors
        dense[f"{name}.weight"] = served
        relative = float((weight - served.float()).norm() / weight.norm())
        lines.append(
            {
                "module": name,
                "shape": list(codes.shape),
                "weight_error": relative,
                "output_error": output_error(weight, served, found[name]),
                **checks,
            }
        )
    return Quantized(packed, dense, lines)


def rows_of(conversations: Sequence[Conversation], anchors: Sequence[Sequence[int]]) -> list[CalibrationRow]:
    """Pair conversations with their anchors."""
    return [CalibrationRow(c.input_ids, tuple(a)) for c, a in zip(conversations, anchors, strict=True)]
