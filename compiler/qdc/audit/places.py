"""Where a setting comes from, as evidence: the line of a file, the image's configuration, `docker run`."""

from __future__ import annotations

from qdc.audit.evidence import Evidence, Look, brief
from qdc.audit.shell_state import Place, Value

MAX_ROWS = 12


def file(path: str, line: int) -> Place:
    """The line of a file of the image."""
    return Place("file", f"/{path.strip('/')}", line)


def rows(look: Look, value: Value, text: str) -> list[Evidence]:
    """Where a value was given, what it was put together from, and each value that it beat, in order."""
    found = [row(look, value.place, text)]
    found += [row(look, part.place, f"made from {brief(part.text)}") for part in value.parts[:4]]
    for loser in value.beat:
        shown = brief(loser.text) if loser.known else f"a value that is not known ({loser.why})"
        found.append(row(look, loser.place, f"beats {shown}"))
    return found[:MAX_ROWS]


def row(look: Look, place: Place, text: str) -> Evidence:
    """Evidence for one place."""
    if place.kind == "file" and place.path.startswith("/"):
        if look.image.find(place.path) is None:
            return _elsewhere(place.path, f"{text} (line {place.line} of a file that the container writes)")
        start, length = _line(look, place)
        return look.at(place.path, f"{text} (line {place.line})", start, length)
    if place.kind in ("ENV", "file"):
        return look.configuration(text)
    return _elsewhere(f"({place})", text)


def _elsewhere(path: str, text: str) -> Evidence:
    return {"layer": None, "path": path, "offset": None, "length": None, "text": text, "command": None}


def _line(look: Look, place: Place) -> tuple[int, int | None]:
    """(offset, length) of a line in its file."""
    entry = look.image.find(place.path)
    if entry is None or entry.size > 1 << 20:
        return 0, None
    lines = look.image.read(place.path).splitlines(keepends=True)
    if not 1 <= place.line <= len(lines):
        return 0, entry.size
    start = sum(len(line) for line in lines[: place.line - 1])
    return start, len(lines[place.line - 1].rstrip(b"\r\n"))
