"""Benchmark tasks and the datasets that their items come from: tasks.json. Knows no recipe."""

from __future__ import annotations

from functools import cache

from qdc.tables.cells import read


def dataset_is(task: str, dataset: str) -> bool:
    """Whether the items of a task are in a dataset repository (`owner/name`), as far as the table tells.

    A task belongs to the longest entry that begins its name (`gpqa_diamond_cot_zeroshot` to `gpqa`). A copy under
    another owner counts, too: its name is the task's or the original's.
    """
    known = _table()
    entry = max((name for name in known if f"{task}_".startswith(f"{name}_")), key=len, default=None)
    names = {task, entry or task, *(name.rpartition("/")[2] for name in known.get(entry or "", []))}
    given = dataset.rpartition("/")[2]
    return _plain(given) in {_plain(name) for name in names} or dataset.lower() in map(
        str.lower, known.get(entry or "", [])
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@cache
def _table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = read("tasks.json")["datasets"]
    return table
