"""Why a stage is fresh, stale or waiting: the smallest cause, in a few lines. For now, and for any build in the log.

From a plan, what changed in the recipe since its last build, and records. It decides nothing.
"""

from __future__ import annotations

from typing import Any

from qdc.graph.plan import Plan, Stage
from qdc.report.text import reason_text, short

Json = dict[str, Any]
LINES = 11
"""An answer has fewer than twelve lines."""
SHOWN = 6


def why_now(plan: Plan, name: str, record: Json | None, edits: list[Json]) -> list[str]:
    """Lines about one stage of a present plan. `record`: of a fresh stage; `edits`: of the recipe since its last build,
    with the reasons of stale stages already naming the recipe's values (`edits.named`)."""
    stage = plan[name]
    if stage.state == "fresh":
        lines = [f"{name} is fresh", *_fresh(stage, record or {}, edits)]
    elif stage.state == "stale":
        lines = [f"{name} is stale: a build runs it", *_reasons(list(stage.reasons), SHOWN)]
    else:
        lines = [f"{name} is waiting: whether it runs is decided when its inputs are there", *_roots(plan, stage)]
    return lines[:LINES]


def why_then(log: Json, name: str) -> list[str]:
    """Lines about one stage of a build in the log."""
    stage = log["stages"][name]
    when = f"in the build of {log['recipe_name']} at {log['started']}"
    said = {
        "ran": f"{name} ran {when}",
        "failed": f"{name} failed {when}",
        "fetched": f"{name} was fetched {when}",
        "fresh": f"{name} was fresh {when}",
        "stale": f"{name} was stale and did not come to run {when}",
        "waiting": f"{name} was still waiting at the end {when}",
    }
    lines = [said.get(stage["state"], f"{name}: {stage['state']} {when}"), *_reasons(stage["reasons"], SHOWN)]
    if stage["more"]:
        lines.append(f"  and {stage['more']} more")
    if stage["state"] == "fresh":
        lines += _unreached(log["edits"])
    if stage["key"]:
        lines.append(f"  key {stage['key']}")
    if stage.get("output"):
        lines.append(f"  output {stage['output']}")
    if log.get("error") and stage["state"] == "failed":
        lines.append(f"  {short(log['error'].splitlines()[0])}")
    return lines[:LINES]


def _reasons(reasons: list[Json], most: int) -> list[str]:
    lines = [f"  {reason_text(reason)}" for reason in reasons[:most]]
    return [*lines, f"  and {len(reasons) - most} more"] if len(reasons) > most else lines


def _fresh(stage: Stage, record: Json, edits: list[Json]) -> list[str]:
    lines = []
    if (kept := record.get("kept")) is not None:
        lines.append(f"  kept: {kept['because']} (made under key {kept['from'][:12]})")
    elif (imported := record.get("imported")) is not None:
        lines.append(f"  imported: {imported['because']}")
    else:
        lines.append(f"  nothing that its key covers has changed since {record.get('finished', 'it ran')}")
    lines += _unreached(edits)
    lines.append(f"  key {stage.key}")
    how = f"{record.get('determinism', stage.instance.determinism)}, {record.get('seconds', 0.0):.1f} s"
    lines.append(f"  output {stage.output} ({how})")
    roles = [f"{role} {digest[:12]}" for role, digest in stage.inputs.items()]
    if roles:
        lines.append(f"  inputs: {', '.join(roles[:5])}" + (f" and {len(roles) - 5} more" if len(roles) > 5 else ""))
    return lines


def _unreached(edits: list[Json]) -> list[str]:
    """The recipe's changes that a fresh stage does not read, or whose effect ended before it."""
    if not edits:
        return []
    shown = [f"{edit['path']} {short(edit['was'])} -> {short(edit['now'])}" for edit in edits[:2]]
    more = f" and {len(edits) - 2} more" if len(edits) > 2 else ""
    return [f"  does not depend on what changed: {', '.join(shown)}{more}"]


def _roots(plan: Plan, stage: Stage) -> list[str]:
    """For a waiting stage: the stale stages behind it, the cause of each, and the way from one to it."""
    paths: dict[str, list[str]] = {stage.instance.name: [stage.instance.name]}
    front, roots = [stage], []
    while front:
        here = front.pop(0)
        if here.state == "stale":
            roots.append(here)
            continue
        locks = [reason for reason in here.reasons if reason["kind"] == "lock"]
        if locks:
            roots.append(here)
        for source in here.instance.inputs.values():
            if not source.startswith(("tree:", "lock:")) and source not in paths:
                paths[source] = [source, *paths[here.instance.name]]
                front.append(plan[source])
    lines: list[str] = []
    for root in sorted(roots, key=lambda root: len(paths[root.instance.name]))[:3]:
        name = root.instance.name
        reasons = [reason for reason in root.reasons if reason["kind"] != "upstream"]
        lines += [f"  {name} is {root.state}:", *(f"  {line}" for line in _reasons(reasons, 1))]
        if len(paths[name]) > 2:
            lines.append(f"    {' -> '.join(paths[name])}")
    return [*lines, f"  and {len(roots) - 3} more stale stages"] if len(roots) > 3 else lines
