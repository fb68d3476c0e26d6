"""The nearest known spelling of a word, for the help of an error."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that `word` was most likely meant to be; None if nothing is near."""
    import difflib

    names = [name for name in known if name != word]
    by_form = {name.lower().replace("_", "-"): name for name in reversed(names)}
    form = word.lower().replace("_", "-")
    found = difflib.get_close_matches(form, by_form, 1, 0.6)
    return by_form[found[0]] if found else None


def suggestion(word: str, known: Iterable[str], what: str) -> str:
    """Help for an unknown name: the nearest one, or all that there are. `what`: their plural, for the list."""
    names = list(known)
    near = nearest(word, names)
    listed = f"{what}: {', '.join(names)}" if names else f"there are no {what}"
    if near is None:
        return listed
    return f"did you mean `{near}`?" if len(names) > 8 else f"did you mean `{near}`? {listed}"
