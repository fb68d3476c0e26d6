"""What the stages' code is, remembered: digests for keys, and the files behind a digest for explanations.

Losing what is remembered costs a quarter of a second, or the name of a file in an explanation; never an answer.
"""

from __future__ import annotations

import contextlib
import json
import sys

from qdc.core import canonical
from qdc.core.files import write_atomic
from qdc.graph.plan import Files
from qdc.store.store import Store


def digests(store: Store, signature: str) -> dict[str, str]:
    """Kind -> digest of its code. `signature`: of the package's files by stat; equal ones are not parsed again."""
    memo, python = store.root / "memo" / "code.json", sys.version
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        value = json.loads(memo.read_bytes())
        if (value["code"], value["python"]) == (signature, python):
            return dict(value["digests"])
    from qdc.graph.code import code_digest, code_files

    files = code_files()
    made = {kind: code_digest(held) for kind, held in files.items()}
    with contextlib.suppress(OSError):
        for kind, held in files.items():
            place = store.root / "memo" / "code" / f"{made[kind]}.json"
            if not place.is_file():
                write_atomic(place, canonical.dumps(held))
        write_atomic(memo, canonical.dumps({"code": signature, "python": python, "digests": made}))
    return made


def files(store: Store) -> Files:
    """What was in the code with a digest, where this store has seen it."""

    def look(digest: str) -> dict[str, str] | None:
        try:
            value = json.loads((store.root / "memo" / "code" / f"{digest}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    return look
