"""Many variants of a recipe as one plan: which there are, which of their stages are the same, and how each has ended.

Stages with the same parameters and inputs are one instance, whatever variant they are of; `Build` runs the union.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.graph.instances import Instance
from qdc.run.build import Build, Ran
from qdc.run.front import Front, front
from qdc.run.outcome import require_buildable
from qdc.store.store import Store

MOST = 256
"""Variants of one sweep."""
_CLOSING = {"[": "]", "{": "}"}


@dataclass
class Variant:
    """`set`: recipe path -> the value's text, of every path that has several; `sets`: all assignments; `names`: stage
    -> its name in the union; `error`: why it is no build."""

    number: int
    set: dict[str, str]
    sets: list[str]
    read: Front | None = None
    names: dict[str, str] = field(default_factory=dict)
    error: QdcError | None = None


def variants(sets: Sequence[str]) -> list[Variant]:
    """All combinations of the values of `path=value,value` assignments; the last path's change fastest.

    Raises QdcError for a text that is none, a value that is there twice, and for more than `MOST` variants.
    """
    given = [(name, mark, values(text, name)) for name, mark, text in (item.partition("=") for item in sets)]
    for name, mark, _ in given:
        if not mark or not name:
            raise QdcError("set.form", f"`--set {name}` has no `=`", hint="write --set serve.k=4,7")
    names = [name for name, _, _ in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise QdcError("sweep.twice", f"`{twice}` is set twice", hint=f"write --set {twice}=VALUE,VALUE")
    count = 1
    for _, _, found in given:
        count *= len(found)
    if count > MOST:
        raise QdcError("sweep.many", f"these are {count} variants, and {MOST} is the most", hint="sweep fewer values")
    several = {name for name, _, found in given if len(found) > 1}
    made = []
    for number, chosen in enumerate(itertools.product(*(found for _, _, found in given)), 1):
        pairs = list(zip(names, chosen, strict=True))
        varied = {name: value for name, value in pairs if name in several}
        made.append(Variant(number, varied, [f"{name}={value}" for name, value in pairs]))
    return made


def values(text: str, name: str) -> list[str]:
    """The values in `text`: it is split at commas outside of quotes, brackets and braces.

    Raises QdcError where quotes or brackets do not end, a value is empty among others, or is there twice.
    """
    found, start, open_, position, before = [], 0, [], 0, ","
    while position < len(text):
        letter = text[position]
        if letter in "\"'" and before in ",[{:":
            position = _quoted(text, position, name)
        elif letter in _CLOSING:
            open_.append(_CLOSING[letter])
        elif open_ and letter == open_[-1]:
            open_.pop()
        elif letter == "," and not open_:
            found.append(text[start:position].strip())
            start = position + 1
        before = before if letter == " " else letter
        position += 1
    if open_:
        raise QdcError("sweep.value", f"`--set {name}={text}`: a `{open_[-1]}` is missing", hint="--set path=[1,2],[3]")
    found.append(text[start:].strip())
    if len(found) > 1 and "" in found:
        raise QdcError(
            "sweep.value",
            f"`--set {name}={text}`: there is a comma with no value beside it",
            hint=f"a value with a comma stands in quotes: --set {name}='\"a,b\",c'",
        )
    if twice := next((value for value in found if found.count(value) > 1), None):
        raise QdcError("sweep.twice", f"`--set {name}={text}` has the value `{twice}` twice", hint="leave one out")
    return found


def _quoted(text: str, start: int, name: str) -> int:
    """Where the quotes end that begin at `start`."""
    mark, position = text[start], start + 1
    while position < len(text):
        pair = text[position : position + 2]
        if (mark == '"' and pair[0] == "\\") or (mark == "'" and pair == "''"):
            position += 1
        elif pair[0] == mark:
            return position
        position += 1
    raise QdcError("sweep.value", f"`--set {name}={text}`: a {mark} is missing", hint="quotes come in pairs")


def read_all(store: Store, recipe: Path, found: list[Variant]) -> None:
    """Read the recipe of each variant; one that is invalid or cannot be built has its `error`."""
    for variant in found:
        try:
            variant.read = front(recipe, variant.sets, store)
            require_buildable(variant.read, recipe, variant.sets)
        except QdcError as error:
            variant.error = error


def union(found: list[Variant]) -> tuple[list[Instance], dict[str, str]]:
    """All stages of the variants that can be built, each once, inputs first, and name in the union -> stage.

    The first of a name keeps it; another is `stage#3`, where variant 3 is the first that has it. Fills their `names`.
    """
    made: dict[str, Instance] = {}
    taken: set[str] = set()
    for variant in found:
        if variant.read is None or variant.error is not None:
            continue
        for instance in variant.read.instances:
            inputs = {role: variant.names.get(source, source) for role, source in instance.inputs.items()}
            same = canonical.digest(replace(instance, inputs=inputs).as_json())
            if same not in made:
                name = f"{instance.name}#{variant.number}" if instance.name in taken else instance.name
                taken.add(instance.name)
                made[same] = replace(instance, name=name, inputs=inputs)
            variant.names[instance.name] = made[same].name
    real = {shared: name for variant in found for name, shared in variant.names.items()}
    return list(made.values()), real


def stages_of(variant: Variant, ran: dict[str, Ran], told: set[str]) -> list[Ran]:
    """What became of a variant's stages; of those that several share, the first variant says that they ran.

    `told`: names in the union that an earlier variant has spoken of; added to.
    """
    rows = []
    for name, shared in variant.names.items():
        if shared in ran:
            row = replace(ran[shared], name=name)
            rows.append(replace(row, ran=False, seconds=0.0, fetched=False) if shared in told else row)
            told.add(shared)
    return rows


def cause(variant: Variant, build: Build) -> QdcError | None:
    """The failure that keeps a variant from its image: that of its first stage that failed."""
    shared = set(variant.names.values())
    failed = [stage for stage in build.plan().stages if stage.instance.name in shared and stage.key in build.failed]
    return build.failed[str(failed[0].key)] if failed else None
