"""Two documents side by side, which of their leaves differ, and the rules that say a difference in domain words.

A rule yields changes and marks the leaves that they tell; what no rule told is said leaf by leaf afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdc.formats.qwen35 import text_form
from qdc.manifest.diff.words import Change, below, change, describe, drafter_kind, recipe_path, said, short
from qdc.manifest.flat import get


@dataclass
class Pair:
    """Both documents, and the paths that differ and are not told yet. `templates`: texts of the chat templates;

    `same_tensors`: the models that hold the same tensors in other files, and how.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    flat: tuple[dict[str, Any], dict[str, Any]]
    differing: set[str]
    templates: tuple[str | None, str | None] = (None, None)
    same_tensors: Mapping[str, str] = field(default_factory=dict)

    def values(self, path: str) -> tuple[Any, Any]:
        return get(self.a, path), get(self.b, path)

    def differ(self, path: str) -> bool:
        """Whether anything at or below `path` is still untold."""
        return any(below(other, path) for other in self.differing)

    def tell(self, *paths: str) -> None:
        """Everything at or below `paths` has been said."""
        self.differing -= {other for other in self.differing for path in paths if below(other, path)}

    def tell_mirror(self, path: str, was: Any, now: Any) -> None:
        """`path` repeats a field: it has been said if it repeats just this change."""
        mirrored = self.values(path)
        if (str(mirrored[0]), str(mirrored[1])) == (str(was), str(now)):
            self.tell(path)


Rule = Callable[[Pair], Iterator[Change]]


def leaf(subject: str, path: str, words: str, *mirrors: str, as_said: Callable[[Any], str] = said) -> Rule:
    """`words FROM -> TO` for one recipe field; `mirrors` are manifest paths that repeat it."""

    def rule(pair: Pair) -> Iterator[Change]:
        if not pair.differ(f"recipe.{path}"):
            return
        was, now = pair.values(f"recipe.{path}")
        if isinstance(was, Mapping) or isinstance(now, Mapping):
            return
        pair.tell(f"recipe.{path}")
        for mirror in mirrors:
            pair.tell_mirror(mirror, was, now)
        yield change(subject, path, was, now, f"{words} {as_said(was)} -> {as_said(now)}")

    return rule


def section(subject: str, path: str, words: str, as_said: Callable[[Any], str] = said, *mirrors: str) -> Rule:
    """`words none -> KEY` when a whole section appears or goes; its fields are not listed one by one, nor those of

    `mirrors`, sections of a manifest that come and go with it.
    """

    def rule(pair: Pair) -> Iterator[Change]:
        was, now = pair.values(f"recipe.{path}")
        if (was is None) == (now is None) or not pair.differ(f"recipe.{path}"):
            return
        pair.tell(f"recipe.{path}")
        for mirror in mirrors:
            if [side is None for side in pair.values(mirror)] == [was is None, now is None]:
                pair.tell(mirror)
        sides = [as_said(_brief(side)) for side in (was, now)]
        yield change(subject, path, was, now, f"{words} {sides[0]} -> {sides[1]}")

    return rule


def names(subject: str, path: str, words: str) -> Rule:
    """`words: +added -removed` for a list of names."""

    def rule(pair: Pair) -> Iterator[Change]:
        was, now = pair.values(f"recipe.{path}")
        lists = isinstance(was, list) and isinstance(now, list)
        if not pair.differ(f"recipe.{path}") or not lists or not all(isinstance(item, str) for item in was + now):
            return
        pair.tell(f"recipe.{path}")
        signs = [f"-{item}" for item in was if item not in now] + [f"+{item}" for item in now if item not in was]
        yield change(subject, path, was, now, f"{words}: {' '.join(signs) or 'another order'}")

    return rule


def weights(subject: str) -> Rule:
    """Whether the weight files of one model are the same bytes."""

    def rule(pair: Pair) -> Iterator[Change]:
        was, now = (_weight_digests(document, subject) for document in (pair.a, pair.b))
        if was is None or now is None or (not was and not now):
            return
        if was == now:
            yield change(subject, "serving.weights", was, now, f"{subject} unchanged, same weights digest")
            return
        for path in list(pair.differing):
            if path.startswith("serving.weights[") and (f"/{subject}/" in path or path.endswith("[]")):
                pair.differing.discard(path)
        parts = [" ".join(short(item["sha256"]) for item in side) or "none" for side in (was, now)]
        if subject in pair.same_tensors:
            _tell_names(pair, subject)
            text = f"{subject}: {pair.same_tensors[subject]} (file {parts[0]} -> {parts[1]})"
            yield change(subject, "serving.weights", was, now, text)
            return
        yield change(subject, "serving.weights", was, now, f"{subject} weights {parts[0]} -> {parts[1]}")

    return rule


def drafter(pair: Pair) -> Iterator[Change]:
    """Another kind of drafter: both as a whole, with K; their fields are not compared one by one."""
    sides = [(get(document, "recipe.drafter"), get(document, "recipe.serve.k")) for document in (pair.a, pair.b)]
    kinds = [drafter_kind(section) for section, _ in sides]
    if kinds[0] == kinds[1] or not pair.differ("recipe.drafter"):
        return
    was, now = ({"drafter": section, "k": k} for section, k in sides)
    pair.tell("recipe.drafter", "recipe.serve.k")
    text = f"drafter: {describe(*sides[0])} -> {describe(*sides[1])}"
    yield change("drafter", "drafter", was, now, text)


def template(pair: Pair) -> Iterator[Change]:
    """The chat template: in words where both texts are at hand, else by digest."""
    paths = ("serving.template", "recipe.serve.chat_template")
    found = [path for path in paths if pair.differ(path)]
    if not found:
        return
    was, now = pair.values(found[0])
    pair.tell(*paths)
    text = f"chat template changed ({short(was)} -> {short(now)})"
    if pair.templates[0] is not None and pair.templates[1] is not None:
        from qdc.manifest.diff.templates import template_words

        text = f"chat template: {template_words(pair.templates[0], pair.templates[1])} ({short(was)} -> {short(now)})"
    yield change("serving", recipe_path(found[0]), was, now, text)


def digests(subject: str, words: str, *paths: str) -> Rule:
    """`words changed (from -> to)`; the first path that differs names the digests, all are told."""

    def rule(pair: Pair) -> Iterator[Change]:
        found = [path for path in paths if pair.differ(path)]
        if found:
            was, now = pair.values(found[0])
            pair.tell(*paths)
            text = f"{words} changed ({short(was)} -> {short(now)})"
            yield change(subject, recipe_path(found[0]), was, now, text)

    return rule


def _tell_names(pair: Pair, subject: str) -> None:
    """A census that differs in the form of its names alone has been said."""
    for path in (f"{subject}.census.quantized", f"{subject}.census.plain"):
        sides = [side if isinstance(side, list) else [] for side in pair.values(path)]
        if sorted(text_form(str(name)) for name in sides[0]) == sorted(text_form(str(name)) for name in sides[1]):
            pair.tell(path)


def _weight_digests(document: Mapping[str, Any], subject: str) -> list[dict[str, Any]] | None:
    listed = get(document, "serving.weights")
    if not isinstance(listed, list):
        return None
    return sorted(
        (item for item in listed if isinstance(item, dict) and f"/{subject}/" in str(item.get("path"))),
        key=lambda item: str(item["path"]),
    )


def _brief(value: Any) -> Any:
    if value is None:
        return "none"
    for path in ("method", "grid.method", "window", "trainable"):
        if (found := get(value, path)) is not None:
            return found
    bits = get(value, "scheme.bits")
    return "some" if bits is None else f"{bits} bits"
