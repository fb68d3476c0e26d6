"""A page of results whose sections are measured at different times: each is replaced alone, the others stay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_MARK = "<!-- section: {} -->"


def compose(page: Path, head: Iterable[str], sections: Mapping[str, Iterable[str]]) -> None:
    """Write `head` and the sections (name -> lines), in their order, before those that the page has besides."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    parts = re.split(r"<!-- section: (\S+) -->\n", text)
    there = {name: part.strip() + "\n\n" for name, part in zip(parts[1::2], parts[2::2], strict=True)}
    made = {name: "\n".join(lines).strip() + "\n\n" for name, lines in sections.items()}
    order = [*there, *(name for name in made if name not in there)]
    body = [f"{_MARK.format(name)}\n{made.get(name) or there[name]}" for name in order]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(("\n".join(head).strip() + "\n\n" + "".join(body)).rstrip() + "\n", encoding="utf-8")
