"""How values, kinds of drafter, digests and sizes are said; and the form of one change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.manifest.flat import ABSENT, get

Change = dict[str, Any]
KINDS = {"dflash": "DFlash", "ngram": "n-gram", "suffix": "suffix decoding", "mtp": "MTP", "eagle3": "EAGLE-3",
         "draft-model": "draft model", "none": "none", "checkpoint": "published checkpoint"}  # fmt: skip
METHODS = {"gptq": "GPTQ", "rtn": "RTN", "awq": "AWQ"}


def change(subject: str, path: str, was: Any, now: Any, text: str | None = None) -> Change:
    """One row of an answer. Without `text` the path and both values say it."""
    if text is None:
        text = f"{path} {said(was)} -> {said(now)}"
    return {
        "subject": subject,
        "path": path,
        "from": None if was is ABSENT else was,
        "to": None if now is ABSENT else now,
        "text": text,
    }


def said(value: Any) -> str:
    """A value in a line of text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return short(value)
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def short(digest: Any) -> str:
    """The first 12 digits of a digest."""
    text = str(digest).removeprefix("sha256:")
    return text[:12] if digest else "none"


def method(value: Any) -> str:
    """A quantization method by its usual name."""
    return METHODS.get(value, said(value)) if isinstance(value, str) else said(value)


def size(count: int) -> str:
    """Bytes in the unit that leaves up to four digits: `812 B`, `12.3 kB`, `1.20 GB`."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count} B"


def drafter_kind(drafter: Any) -> str:
    """`dflash`, `ngram`, ..; `checkpoint` for a published one; `none` without a drafter."""
    if not isinstance(drafter, Mapping):
        return "none"
    kind = get(drafter, "architecture.kind") or drafter.get("kind")
    return str(kind) if kind else "checkpoint" if "checkpoint" in drafter else "none"


def describe(drafter: Any, k: Any) -> str:
    """A whole drafter: `n-gram 20`, `DFlash K=15, draft block 16, window 1024`."""
    kind = drafter_kind(drafter)
    words = KINDS.get(kind, kind)
    if k is not None and kind != "none":
        words += f" {k}" if kind == "ngram" else f" K={k}"
    if kind in ("ngram", "suffix", "none"):
        return words
    for path, name in (("architecture.draft_block_size", "draft block"), ("swa.window", "window")):
        if (value := get(drafter, path)) is not None:
            words += f", {name} {value}"
    return words


def below(path: str, root: str) -> bool:
    """Whether `path` is `root` or lies below it."""
    return path == root or path.startswith((f"{root}.", f"{root}["))


def recipe_path(path: str) -> str:
    """A path as the recipe spells it, where the field is one of the recipe's."""
    return path.removeprefix("recipe.").removeprefix("rest.")


def subject_of(path: str) -> str:
    """The part of the product that a path belongs to."""
    first = recipe_path(path).split(".")[0].split("[")[0]
    return {"serve": "serving"}.get(first, first)
