"""The packed target, its dense twin, and the proof that both are exactly what was trained.

Tensors in, tensors and findings out; the eight checks (a) to (h) are those that a packed QAD target must pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qdc.methods import grid, packing
from qdc.methods.student import Grid, Student, heldout_kl

KL_NOISE = 1e-9
PROBE_SHAPE = (4, 96)


@dataclass(frozen=True)
class Target:
    """`codes`: the shipped grid; `packed` and `dense`: tensors of the two checkpoints, by name."""

    codes: Grid
    packed: dict[str, torch.Tensor]
    dense: dict[str, torch.Tensor]


def build_target(weights: dict[str, torch.Tensor], given: Grid, latents: dict[str, torch.Tensor]) -> Target:
    """Code the latents against the given scales; other tensors come from `latents` if trained, else `weights`.

    Without latents the given grid is shipped as it is. All other tensors are BF16.
    """
    codes: Grid = {}
    plain = {name: latents[name].to(torch.bfloat16) if name in latents else t for name, t in weights.items()}
    for module, (before, scale) in given.items():
        name = f"{module}.weight"
        codes[module] = (grid.encode(latents[name], scale) if name in latents else before, scale)
        del plain[name]
    packed, dense = dict(plain), dict(plain)
    for module, pair in codes.items():
        packed.update(packing.packed_tensors(module, *pair))
        dense[f"{module}.weight"] = grid.decode(*pair)
    return Target(codes, dict(sorted(packed.items())), dict(sorted(dense.items())))


def unpacked_modules(tensors: dict[str, torch.Tensor]) -> Grid:
    """module -> (codes, scale), read back from a packed checkpoint's tensors."""
    ends = ".weight_packed"
    modules = sorted(name.removesuffix(ends) for name in tensors if name.endswith(ends))
    return {m: (packing.unpack_codes(tensors[m + ends]), tensors[f"{m}.weight_scale"]) for m in modules}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.dtype == other.dtype and torch.equal(one, other))


def _check(figure: Any, passed: bool, text: str) -> dict[str, Any]:
    return {"figure": figure, "pass": bool(passed), "what": text}


def prove(
    read: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    built: Target,
    given: Grid,
    modules: list[str],
    trained: set[str],
    weights: dict[str, torch.Tensor],
) -> dict[str, dict[str, Any]]:
    """Checks a to f and h on `read`: the tensors of the packed and of the dense file, as read back from disk.

    `modules`: the census of the recipe; `trained`: names of trained tensors; `weights`: the teacher's.
    """
    packed, dense = read
    found = unpacked_modules(packed)
    shared = sorted(set(found) & set(given))
    scales = sum(not _same(found[m][1], given[m][1]) for m in shared) + len(set(found) ^ set(given))
    shapes = sum(
        packed[f"{m}.weight_shape"].tolist() != list(weights[f"{m}.weight"].shape)
        or list(found[m][0].shape) != list(weights[f"{m}.weight"].shape)
        for m in found
    )
    beyond = sum(int(((codes < -8) | (codes > 7)).sum()) for codes, _ in built.codes.values())
    changed = sum(int((found[m][0] != given[m][0]).sum()) for m in shared)
    total = sum(given[m][0].numel() for m in shared)
    lossy = sum(not torch.equal(found[m][0], built.codes[m][0]) for m in found)
    twins = sum(not _same(dense[f"{m}.weight"], grid.decode(*found[m])) for m in found)
    others = sorted(set(weights) - {f"{m}.weight" for m in given})
    moved = [
        name
        for name in others
        if not _same(packed[name], dense[name]) or (name not in trained and not _same(packed[name], weights[name]))
    ]
    names = set(found) == set(modules) and set(dense) == set(weights)
    return {
        "a": _check(scales, scales == 0, "scale tensors that differ from the PTQ grid's, bit for bit"),
        "b": _check(shapes, names and shapes == 0, "module set as in the recipe; modules of wrong shape"),
        "c": _check(beyond, beyond == 0, "codes outside -8..7"),
        "d": _check(changed / total, changed > 0 or not trained, "share of codes changed against the PTQ grid"),
        "e": _check(lossy, lossy == 0, "modules whose codes do not survive packing and unpacking"),
        "f": _check(twins, twins == 0, "modules whose dense twin is not the dequantized packed one, bit for bit"),
        "h": _check(len(moved), not moved, "untrained tensors that differ from the teacher's"),
    }


def served_tensors(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The FP32 weights that a packed checkpoint stands for, under the names of the plain one."""
    grids = unpacked_modules(packed)
    tensors = {f"{module}.weight": grid.decode(*pair).float() for module, pair in grids.items()}
    ends = (".weight_packed", ".weight_scale", ".weight_shape")
    tensors.update({name: t.float() for name, t in packed.items() if not name.endswith(ends)})
    return tensors


def prove_divergence(packed: dict[str, torch.Tensor], student: Student, vocab_size: int) -> dict[str, Any]:
    """Check g: KL of the packed file's weights against the student as trained, on a seeded probe text."""
    ids = torch.randint(0, vocab_size, PROBE_SHAPE, generator=torch.Generator().manual_seed(0))
    probe = {"input_ids": ids, "length": torch.full((len(ids),), ids.shape[1])}
    with torch.no_grad():
        each = heldout_kl(student.weighted(), (student.model, served_tensors(packed)), probe, 1.0)
    kl = float(torch.cat(each).abs().max())
    return _check(kl, kl <= KL_NOISE, "largest KL a token, packed weights against the student as trained (nats)")
