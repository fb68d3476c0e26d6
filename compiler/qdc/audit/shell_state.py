"""What a shell knows at one moment: values with where each came from, variables, files that it wrote, programs.

A value is known or says why not, and keeps every value that it beat. Two states that follow from a condition which
cannot be decided are merged: what they agree on stays known. It knows no syntax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_BEATEN = 20


@dataclass(frozen=True)
class Place:
    """`kind`: `file` (`path` and `line`, from 1), `ENV` (the image's configuration), `docker run`, `engine` or `shell`

    (set by the program itself).
    """

    kind: str
    path: str = ""
    line: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return self.path.strip("()") if self.path.startswith("(") else f"{self.path}:{self.line}"
        return "image configuration ENV" if self.kind == "ENV" else self.kind


@dataclass(frozen=True)
class Value:
    """A text; `text` None: unknown, `why` says it and `place` where it is computed.

    `many`: an unknown number of words (none included); `prefix`: how an unknown text begins.
    `beat`: values that this one beat, the strongest first. `number`: an unknown text that is a whole number for sure.
    `parts`: values that it was put together from.
    """

    text: str | None
    place: Place
    why: str = ""
    many: bool = False
    beat: tuple[Value, ...] = ()
    parts: tuple[Value, ...] = ()
    prefix: str = ""
    number: bool = False

    @property
    def known(self) -> bool:
        return self.text is not None

    def over(self, loser: Value | None) -> Value:
        """This value, which beats `loser` and all that it had beaten."""
        if loser is None or (loser.text == self.text and loser.place == self.place):
            return self
        new = [item for item in (loser, *loser.beat) if item not in self.beat]
        bare = tuple(replace(item, beat=(), parts=()) for item in (*self.beat, *new))
        return replace(self, beat=tuple(dict.fromkeys(bare))[:MAX_BEATEN])


def unknown(place: Place, why: str, *, many: bool = False, number: bool = False) -> Value:
    return Value(None, place, why, many, number=number)


Array = tuple[Value, ...]


@dataclass(frozen=True)
class Var:
    """`value`: a value, or values for an array; None: declared without a value. `exported`: None: not known."""

    value: Value | Array | None
    exported: bool | None = False


def inherited(environment: dict[str, Value]) -> dict[str, Var]:
    """The variables of a program that starts; one that is perhaps not there is perhaps not exported."""
    return {name: Var(value, None if value.many else True) for name, value in environment.items()}


@dataclass(frozen=True)
class Launch:
    """A program that takes part in serving: its words and its environment, as far as they are known.

    `engine`: whether it is the engine itself; `possible`: it may also not be started.
    """

    words: tuple[Value, ...]
    environment: dict[str, Value]
    place: Place
    cwd: Value
    background: bool = False
    possible: bool = False
    engine: bool = False
    files: Any = None


@dataclass(frozen=True)
class Content:
    """A file as a script left it. `kind`: `file`, `dir`, or `gone`."""

    kind: str
    text: Value


@dataclass
class State:
    """`lost`: why no file can be trusted any more (an unknown program ran), or None. `out`: captured output."""

    cwd: Value
    variables: dict[str, Var] = field(default_factory=dict)
    positional: tuple[Value, ...] = ()
    zero: Value | None = None
    status: int | None = 0
    options: frozenset[str] = frozenset()
    functions: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Content] = field(default_factory=dict)
    lost: Value | None = None
    launches: tuple[Launch, ...] = ()
    out: tuple[Value, ...] | None = None
    stdin: Value | None = None
    local: tuple[dict[str, Var | None], ...] = ()

    def copy(self) -> State:
        return replace(
            self, variables=dict(self.variables), functions=dict(self.functions), files=dict(self.files),
            local=tuple(dict(frame) for frame in self.local),
        )  # fmt: skip


def merge(states: Sequence[State], why: Value) -> State:
    """What all `states` agree on; the rest is unknown because of `why`."""
    first = states[0].copy()
    for other in states[1:]:
        first.variables = {
            name: _var(first.variables.get(name), other.variables.get(name), why)
            for name in sorted(first.variables.keys() | other.variables.keys())
        }
        first.positional = _values(first.positional, other.positional, why)
        first.status = first.status if first.status == other.status else None
        first.cwd = _value(first.cwd, other.cwd, why)
        if first.options != other.options or first.functions != other.functions:
            raise Mixed("options or functions")
        first.files = {
            path: _content(first.files.get(path), other.files.get(path), why)
            for path in sorted(first.files.keys() | other.files.keys())
        }
        first.lost = first.lost or other.lost
        first.launches = _launches(first.launches, other.launches)
        if first.out is not None and other.out is not None:
            first.out = first.out if _texts(first.out) == _texts(other.out) else (_because(why),)
        if len(first.local) == len(other.local):
            first.local = tuple({**b, **a} for a, b in zip(first.local, other.local, strict=True))
    return first


class Mixed(Exception):
    """States that differ in what decides how the rest of a script is read."""


def same(a: State, b: State) -> bool:
    """Whether two states lead to the same future (launches and origins aside)."""
    return _sight(a) == _sight(b)


def _sight(state: State) -> tuple[Any, ...]:
    variables = tuple(
        (name, var.exported, _texts(var.value if isinstance(var.value, tuple) else (var.value,)))
        for name, var in sorted(state.variables.items())
    )
    files = tuple((path, item.kind, item.text.text) for path, item in sorted(state.files.items()))
    return (variables, _texts(state.positional), state.cwd.text, files, state.lost is None, state.options,
            tuple(sorted(state.functions)))  # fmt: skip


def _texts(values: Iterable[Value | None]) -> tuple[Any, ...]:
    return tuple(None if value is None else (value.text, value.many) for value in values)


def _because(why: Value) -> Value:
    return unknown(why.place, f"it depends on a condition that is not known: {why.why}"[:300])


def _value(a: Value, b: Value, why: Value) -> Value:
    if a.known and a.text == b.text:
        return a
    if not a.known and not b.known:
        return replace(a, many=a.many or b.many, number=a.number and b.number)
    lost = _because(why) if a.known and b.known else (b if a.known else a)
    return replace(lost, many=lost.many, beat=()).over(a if a.known else b)


def _values(a: Array, b: Array, why: Value) -> Array:
    if len(a) == len(b):
        return tuple(_value(x, y, why) for x, y in zip(a, b, strict=True))
    head = 0
    while head < min(len(a), len(b)) and a[head].known and a[head].text == b[head].text:
        head += 1
    return (*a[:head], replace(_because(why), many=True))


def _var(a: Var | None, b: Var | None, why: Value) -> Var:
    a, b = a or Var(None), b or Var(None)
    exported = a.exported if a.exported == b.exported else None
    if a.value is None and b.value is None:
        return Var(None, exported)
    if isinstance(a.value, tuple) and isinstance(b.value, tuple):
        return Var(_values(a.value, b.value, why), exported)
    if isinstance(a.value, Value) and isinstance(b.value, Value):
        return Var(_value(a.value, b.value, why), exported)
    seen = [item for item in (a.value, b.value) if isinstance(item, Value)]
    lost = replace(_because(why), many=True)
    return Var(lost.over(seen[0] if seen else None), exported)


def _content(a: Content | None, b: Content | None, why: Value) -> Content:
    if a is not None and b is not None and a.kind == b.kind and a.text.known and a.text.text == b.text.text:
        return a
    return Content("unknown", _because(why))


def _launches(a: tuple[Launch, ...], b: tuple[Launch, ...]) -> tuple[Launch, ...]:
    head = 0
    while head < min(len(a), len(b)) and _like(a[head], b[head]):
        head += 1
    rest: list[Launch] = []
    for launch in (*a[head:], *b[head:]):
        if not any(_like(launch, other) for other in rest):
            rest.append(replace(launch, possible=True))
    return (*a[:head], *rest)


def _like(a: Launch, b: Launch) -> bool:
    return (
        a.place == b.place
        and _texts(a.words) == _texts(b.words)
        and {name: value.text for name, value in a.environment.items()}
        == {name: value.text for name, value in b.environment.items()}
    )
