"""What words are put together from, and the two ways in which reading a script ends early."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from qdc.audit.shell_state import Place, Value

MAX_JOINED = 4 << 20


class Undecidable(Exception):
    """From here on nothing about the script is known: `value` says where and why."""

    def __init__(self, value: Value) -> None:
        super().__init__(value.why)
        self.value = value


class Dead(Exception):
    """This path through the script has ended; its state is kept where it went."""


@dataclass
class Piece:
    """A part of a word after expansion. `kind`: `literal` (as written), `quoted`, `spread` (to be split)."""

    kind: str
    value: Value


BREAK = Piece("break", Value("", Place("shell")))


def join(values: list[Value], place: Place) -> Value:
    """Texts put together; one alone (beside empty ones) stays itself, with where it came from."""
    lost = [value for value in values if not value.known]
    if lost:
        head = "".join(value.text or "" for value in values[: values.index(lost[0])])
        many = any(value.many for value in lost)
        number = len([value for value in values if value.text != ""]) == 1 and lost[0].number
        return replace(lost[0], many=many, beat=(), prefix=head + lost[0].prefix, number=number)
    full = [value for value in values if value.text]
    if sum(len(value.text or "") for value in full) > MAX_JOINED:
        return Value(None, place, "a text of several megabytes", many=True)
    if len(full) == 1:
        return full[0]
    if len(values) == 1:
        return values[0]
    text = "".join(value.text or "" for value in full)
    used = tuple(value for value in full if value.place != place)
    return Value(text, place, parts=used[:20])


def plain(values: Iterable[Value]) -> list[str] | None:
    """The texts of values that are all known."""
    texts = [value.text for value in values]
    return None if None in texts else [text for text in texts if text is not None]
