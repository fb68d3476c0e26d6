"""`qdc diff A B`: what differs between any two of recipe, lock, manifest, build, image and model folder.

Domain words first, then how images start, packages, files, layers, measurements. Exit 0 when nothing differs, 1 when
something does, 3 when nothing does as far as could be read.
"""

from __future__ import annotations

from pathlib import Path

from qdc.cli.common import answer, open_store, parser
from qdc.manifest.diff.words import Change
from qdc.run.compare import RECIPES, compare, open_side

SHOWN = 20
"""Lines of one subject in text; all are in `--json`."""


def main(arguments: list[str]) -> int:
    options = parser("diff", __doc__ or "")
    options.add_argument(
        "a",
        metavar="A",
        help="a recipe or lock file, a manifest.json, a build id or @2, archive:FILE, oci:DIR, docker:NAME, folder:DIR",
    )
    options.add_argument("b", metavar="B")
    given = options.parse_args(arguments)
    near = next((Path(text) for text in (given.a, given.b) if text.endswith(RECIPES)), None)
    store = open_store(given.store, near)
    with open_side(given.a, store) as a, open_side(given.b, store) as b:
        changes, unread = compare(a, b)
    same = not changes  # unchanged weights are told only beside something that changed
    if given.json:
        answer({"same": same, "changes": changes, "unread": unread})
    else:
        print(render_text(changes, unread, same))
    return 1 if not same else 3 if unread else 0


def render_text(changes: list[Change], unread: dict[str, str], same: bool) -> str:
    """The answer for a person; of files and packages the first of each."""
    lines: list[str] = []
    counts: dict[str, int] = {}
    for change in changes:
        subject = change["subject"]
        counts[subject] = counts.get(subject, 0) + 1
        if subject not in ("file", "package") or counts[subject] <= SHOWN:
            lines.append(change["text"])
        elif counts[subject] == SHOWN + 1:
            more = sum(row["subject"] == subject for row in changes) - SHOWN
            lines.append(f"and {more} more {subject}s (--json lists them)")
    if same:
        lines.append("no difference" if not unread else "no difference in what could be read")
    if unread:
        names = sorted(unread)
        lines.append(f"not compared: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else ""))
        lines += [f"  {name}: {unread[name]}" for name in names[:8]]
    return "\n".join(lines)
