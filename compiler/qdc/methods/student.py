"""The target under QAD: latent weights, frozen scales, and the weights that would be served right now.

A latent of a quantized module is served as its point on the grid; any other trainable tensor is served rounded
to BF16; both with a straight-through gradient. So the student in training is the packed target, exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.func import functional_call

from qdc.core.errors import COULD_NOT, QdcError
from qdc.methods import divergence, grid
from qdc.methods.qwen import device_of
from qdc.methods.qwen_model import Qwen

TRAINABLE = ("quantized-weights", "all")
Grid = dict[str, tuple[torch.Tensor, torch.Tensor]]
Weighted = tuple[Qwen, dict[str, torch.Tensor]]  # a model, and tensors to use instead of its own


class _RoundToBf16(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_context: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.bfloat16).to(weight.dtype)

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def read_grid(folder: Path) -> Grid:
    """module -> (codes int8 [out, in], scale BF16 [out, in / group]) of a `quantize` folder."""
    tensors = load_file(folder / "grid.safetensors")
    modules = sorted(name.removesuffix(".codes") for name in tensors if name.endswith(".codes"))
    return {m: (tensors[f"{m}.codes"], tensors[f"{m}.scale"]) for m in modules}


def initial_latents(weights: dict[str, torch.Tensor], given: Grid, trainable: str) -> dict[str, torch.Tensor]:
    """FP32 latents of every trainable tensor, by tensor name, such that each code equals the grid's.

    The teacher's own weight where it has the grid's code (its residue is worth keeping), else the grid point.
    """
    if trainable not in TRAINABLE:
        raise QdcError("methods.student.trainable", f"no trainable set {trainable}", exit_code=COULD_NOT)
    latents = {}
    if trainable == "all":
        latents = {name: tensor.float().clone() for name, tensor in weights.items()}
    for module, (codes, scale) in given.items():
        own = weights[f"{module}.weight"].float()
        point = grid.decode(codes, scale).float()
        latents[f"{module}.weight"] = torch.where(grid.encode(own, scale) == codes, own, point)
    return dict(sorted(latents.items()))


class Student:
    """A model run with the served form of its latents. `latents`: FP32 parameters by tensor name."""

    def __init__(self, model: Qwen, latents: dict[str, torch.Tensor], given: Grid) -> None:
        self.model = model
        device = device_of(model)
        self.scales = {f"{module}.weight": scale.to(device) for module, (_, scale) in given.items()}
        self.latents = {name: torch.nn.Parameter(tensor.to(device)) for name, tensor in sorted(latents.items())}

    def served(self) -> dict[str, torch.Tensor]:
        """What would be served for each latent, FP32, differentiable."""
        return {
            name: grid.fake_quantize(latent, self.scales[name]) if name in self.scales else _RoundToBf16.apply(latent)
            for name, latent in self.latents.items()
        }

    def weighted(self) -> Weighted:
        """The model with what would be served."""
        return self.model, self.served()


def hidden(weighted: Weighted, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Final hidden states [B, T, H] and the head [V, H]."""
    model, instead = weighted
    device = device_of(model)
    instead = {name: value.to(device) for name, value in instead.items()}
    inner = {name.removeprefix("model."): value for name, value in instead.items() if name != "lm_head.weight"}
    states: torch.Tensor = functional_call(model.model, inner, args=(input_ids.to(device),))
    name = "model.embed_tokens.weight" if model.config["tie_word_embeddings"] else "lm_head.weight"
    return states, instead.get(name, model.lm_head.weight)


def text_kl(
    teacher: Weighted,
    student: Weighted,
    input_ids: torch.Tensor,
    counted: torch.Tensor,
    temperature: float,
    chunk_tokens: int = divergence.CHUNK_TOKENS,
) -> torch.Tensor:
    """KL teacher || student [N] at the N positions where `counted` [B, T] is true, in reading order.

    `chunk_tokens`: positions whose logits exist at once.
    """
    with torch.no_grad():
        seen, head = hidden(teacher, input_ids)
    ours, own_head = hidden(student, input_ids)
    counted = counted.to(ours.device)
    return divergence.token_kl(seen[counted], ours[counted], head, own_head, temperature, chunk_tokens)


def counted_tokens(length: torch.Tensor, width: int) -> torch.Tensor:
    """True [N, width] where a position comes before the padding; decided by length, never by token id."""
    return torch.arange(width)[None, :] < length[:, None]


def heldout_kl(
    teacher: Weighted,
    student: Weighted,
    packed: dict[str, torch.Tensor],
    temperature: float,
    batch: int = 32,
) -> list[torch.Tensor]:
    """KL a token of every packed sequence: one tensor [tokens] each, without gradients."""
    ids, length = packed["input_ids"].long(), packed["length"]
    counted = counted_tokens(length, ids.shape[1])
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for start in range(0, len(ids), batch):
            rows = slice(start, start + batch)
            flat = text_kl(teacher, student, ids[rows], counted[rows], temperature)
            found.extend(flat.cpu().split(length[rows].tolist()))
    return found
