"""The modules of a checkpoint as its headers show them: which are Linear, which are packed, and what a list ignores.

A module is named by its tensors. Knows the tensor names of compressed-tensors and no recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from qdc.formats.checkpoint import ModelFacts

HEAD = "lm_head"
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Modules of one parent that vLLM loads as one matrix (0.32, Qwen3.5)."""


@dataclass(frozen=True)
class Linear:
    """`shape`: (out, in) of a plain weight, or of a packed one as it is stored, (out, words a row).

    `groups`: scales a row where it is packed, else None; `zeros`: zero points are stored.
    """

    name: str
    shape: tuple[int, int]
    groups: int | None = None
    zeros: bool = False

    @property
    def packed(self) -> bool:
        return self.groups is not None


def linears(facts: ModelFacts) -> dict[str, Linear]:
    """Every Linear that is stored, by name: matrices but embeddings, and what has a `weight_packed`."""
    found: dict[str, Linear] = {}
    for tensor, stored in facts.tensors.items():
        name, _, part = tensor.rpartition(".")
        if len(stored.shape) != 2 or "embed" in name.rpartition(".")[2]:
            continue
        shape = stored.shape[0], stored.shape[1]
        if part == "weight_packed":
            scale = facts.tensors.get(f"{name}.weight_scale")
            groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
            found[name] = Linear(name, shape, groups, f"{name}.weight_zero_point" in facts.tensors)
        elif part == "weight" and name not in found:
            found[name] = Linear(name, shape)
    return found


def modules(facts: ModelFacts) -> set[str]:
    """The names of all modules that hold a tensor, and the output head, which a tied checkpoint does not store."""
    return {name.rpartition(".")[0] for name in facts.tensors} | {HEAD}


def matches(name: str, entry: str) -> bool:
    """Whether an entry of an ignore list names the module: as it is, or by `re:` from the start."""
    if not entry.startswith("re:"):
        return name == entry
    expression = _compiled(entry)
    return expression is not None and expression.match(name) is not None


def readable(entry: str) -> bool:
    """Whether an entry of an ignore list is a name or a well-formed expression (else TGT16 fires)."""
    return not entry.startswith("re:") or _compiled(entry) is not None


@cache
def _compiled(entry: str) -> re.Pattern[str] | None:
    """The expression of an entry; None for a name, and where it is malformed."""
    try:
        return re.compile(entry[3:]) if entry.startswith("re:") else None
    except re.error:
        return None


def ignored(name: str, entries: Iterable[str]) -> bool:
    """Whether one of the entries names the module."""
    return any(matches(name, entry) for entry in entries)


def fused(names: Iterable[str]) -> Iterator[list[str]]:
    """The modules among `names` that an engine loads as one matrix, a group of at least two at a time."""
    known = set(names)
    for parent in sorted({name.rpartition(".")[0] for name in known}):
        for group in _GROUPS:
            members = [f"{parent}.{member}" for member in group if f"{parent}.{member}" in known]
            if len(members) > 1:
                yield members


def kind(name: str) -> str:
    """The last two parts of a module's name: the same module of all layers."""
    return ".".join(name.split(".")[-2:])


def pattern(name: str) -> str:
    """An entry of an ignore list for this module of all layers."""
    parts = kind(name)
    return f"re:.*{re.escape(parts)}$" if "." in parts else name


def listed(names: Iterable[str]) -> str:
    """The names in few words: the first kinds with their count."""
    counts: dict[str, int] = {}
    for name in names:
        counts[kind(name)] = counts.get(kind(name), 0) + 1
    shown = [f"{what} ({count}x)" if count > 1 else what for what, count in list(counts.items())[:4]]
    return ", ".join(shown) + (", …" if len(counts) > 4 else "")


def written(entries: Iterable[str]) -> str:
    """An ignore list as YAML in one line."""
    quoted = [entry if re.fullmatch(r"[\w.]+", entry) else '"' + entry.replace("\\", "\\\\") + '"' for entry in entries]
    return f"ignore: [{', '.join(quoted)}]"
