"""`prompts`: draw unique synthetic prompts with their reference answers, disjoint from given prompt sets."""

from __future__ import annotations

import json
from pathlib import Path

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import synthetic


def _excluded(folders: list[Path]) -> set[str]:
    texts = set()
    for folder in folders:
        with (folder / "prompts.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                turns = [m["content"] for m in json.loads(line)["messages"] if m["role"] == "user"]
                texts.add(synthetic.normalised(" ".join(turns)))
    return texts


def run(context: Context) -> None:
    """Writes prompts.jsonl and summary.json; see `synthetic.unique_problems` for what can fail."""
    source = context.params["synthetic"]
    folders = [folder for role, folder in sorted(context.inputs.items()) if role.startswith("exclude_")]
    count = int(source["count"])
    if count < 1:
        raise QdcError("stage.prompts.none", "no prompts were asked for", exit_code=COULD_NOT)
    kept, dropped = synthetic.unique_problems(source["kind"], count, int(source["seed"]), _excluded(folders))
    with (context.output / "prompts.jsonl").open("wb") as lines:
        for problem in kept:
            row = {
                "id": synthetic.prompt_id(problem.prompt),
                "messages": [{"role": "user", "content": problem.prompt}],
                "answer": problem.answer,
            }
            lines.write(canonical.dumps(row) + b"\n")
    write_json(
        context.output / "summary.json",
        {"rows": len(kept), "drawn": len(kept) + sum(dropped.values()), "dropped": dropped},
    )
    context.report(count, count, "prompts")
