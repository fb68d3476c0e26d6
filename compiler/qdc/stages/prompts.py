"""`prompts`: unique prompts, made by rule or read from the user's file, disjoint from given prompt sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.formats import chats
from qdc.methods import synthetic

ROLES = ("system", "user", "assistant")
Row = dict[str, Any]


def _excluded(folders: list[Path]) -> set[str]:
    texts = set()
    for folder in folders:
        with (folder / "prompts.jsonl").open(encoding="utf-8") as lines:
            texts |= {_text(json.loads(line)["messages"]) for line in lines}
    return texts


def run(context: Context) -> None:
    """Writes prompts.jsonl and summary.json; see `synthetic.unique_problems` for what can fail.

    A row has `id`, `messages` up to the turn that is to be answered, and `answer`: the reference, null where a file
    gives none.
    """
    folders = [folder for role, folder in sorted(context.inputs.items()) if role.startswith("exclude_")]
    excluded = _excluded(folders)
    if "source" in context.inputs:
        kept, dropped = _from_file(context.inputs["source"], excluded)
    else:
        kept, dropped = _made(context.params["synthetic"], excluded)
    with (context.output / "prompts.jsonl").open("wb") as lines:
        for row in kept:
            lines.write(canonical.dumps(row) + b"\n")
    write_json(
        context.output / "summary.json",
        {"rows": len(kept), "drawn": len(kept) + sum(dropped.values()), "dropped": dropped},
    )
    context.report(len(kept), len(kept), "prompts")


def _made(source: dict[str, Any], excluded: set[str]) -> tuple[list[Row], dict[str, int]]:
    count = int(source["count"])
    if count < 1:
        raise QdcError("stage.prompts.none", "no prompts were asked for", exit_code=COULD_NOT)
    kept, dropped = synthetic.unique_problems(source["kind"], count, int(source["seed"]), excluded)
    rows = [_row([{"role": "user", "content": problem.prompt}], problem.answer) for problem in kept]
    return rows, dropped


def _from_file(folder: Path, excluded: set[str]) -> tuple[list[Row], dict[str, int]]:
    """The file's rows in their order; a last turn of the assistant's is the reference answer."""
    (path,) = [path for path in folder.iterdir() if path.is_file()]
    seen: set[str] = set()
    rows: list[Row] = []
    dropped = {"duplicate": 0, "excluded": 0}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            messages = _messages(line, number)
            answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
            text = _text(messages)
            if not text:
                raise _wrong(number, "it has no text of the user's to be answered")
            if text in excluded or text in seen:
                dropped["excluded" if text in excluded else "duplicate"] += 1
                continue
            seen.add(text)
            rows.append(_row(messages, answer))
    if not rows:
        raise QdcError("stage.prompts.none", f"the file has no prompt to keep: {dropped}", exit_code=COULD_NOT)
    return rows, dropped


def _messages(line: bytes, number: int) -> list[dict[str, str]]:
    """The turns of one line of the file. Raises QdcError `stage.prompts.row`."""
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in chats.messages(line) or ()]
    if not turns or any(turn["role"] not in ROLES for turn in turns):
        raise _wrong(
            number, f"it is no JSON object with `messages`, each with `role` ({', '.join(ROLES)}) and `content`"
        )
    return turns


def _wrong(number: int, why: str) -> QdcError:
    return QdcError("stage.prompts.row", f"line {number} of the file: {why}", exit_code=COULD_NOT)


def _text(messages: list[dict[str, str]]) -> str:
    """What two prompts that are the same prompt share."""
    return synthetic.normalised(" ".join(turn["content"] for turn in messages if turn["role"] == "user"))


def _row(messages: list[dict[str, str]], answer: str | None) -> Row:
    text = " ".join(turn["content"] for turn in messages if turn["role"] == "user")
    return {"id": synthetic.prompt_id(text), "messages": messages, "answer": answer}
