"""A report of an audit as plain text: what is refuted first, with its evidence; then the rest, one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qdc.audit.evidence import PROVED, RECORDED, REFUTED, UNREAD, brief

ROWS = 8
"""Pieces of evidence that are shown for one claim."""
_CLAIMS = " claims "


def render_text(report: Mapping[str, Any]) -> str:
    """The report for a person; ends without a newline."""
    counts = report["counts"]
    lines = [f"image     {report['image'] or 'none: a model folder'}"]
    lines += [f"tag       {tag}" for tag in report.get("tags", [])]
    lines += [f"where     {report['where']}"] if report.get("where") else []
    lines.append("verdicts  " + ", ".join(f"{counts[word]} {word}" for word in (PROVED, REFUTED, RECORDED, UNREAD)))
    transfer = report.get("transfer") or {}
    if transfer.get("requests"):
        lines.append(f"fetched   {transfer['bytes']:,} bytes in {transfer['requests']} requests")
    lines += [f"unchecked {text}" for text in transfer.get("unverified", [])[:20]]
    if report["image"] and not report.get("anchored"):
        lines.append("anchor    none: consistency only (give --expect IMAGE_ID for identity)")
    rows = report["verdicts"]
    for word in (REFUTED, UNREAD):
        for row in rows:
            if row["verdict"] == word:
                lines += ["", f"{word.upper()}  {row['claim']} = {brief(row['value'])}", *_evidence(row["evidence"])]
    proved = [row for row in rows if row["verdict"] == PROVED]
    plain = [row for row in proved if not row["claim"].startswith(("image.", "files["))]
    width = max((len(row["claim"]) for row in plain), default=0)
    lines += ["", "proved"] if proved else []
    for row in plain:
        text = next((item["text"] for item in row["evidence"]), "")
        lines.append(f"  {row['claim']:<{width}}  {brief(row['value'], 24):<24}  {brief(text, 70)}".rstrip())
    if len(proved) > len(plain):
        lines.append(f"  {'and ' if plain else ''}{len(proved) - len(plain)} digests of layers, blobs and files")
    recorded = [row for row in rows if row["verdict"] == RECORDED]
    if recorded:
        width = max(len(row["claim"]) for row in recorded)
        lines += ["", "recorded (found and claimed by nobody, or claimed and not in the bytes)"]
        lines += [f"  {row['claim']:<{width}}  {brief(row['value'])}" for row in recorded]
    return "\n".join(lines)


def _evidence(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is claimed and by whom first, then where the bytes are seen; nothing twice."""
    lines: list[str] = []
    shown: set[str] = set()
    unlike = {item["text"]: item for item in reversed(items)}
    kept = [item for item in items if unlike[item["text"]] is item]
    for item in sorted(kept, key=lambda item: _CLAIMS not in item["text"])[:ROWS]:
        lines.append(f"  {item['text']}")
        place = item["path"] or ""
        if item["layer"] and item["offset"] is not None:
            place += f" at {item['offset']}+{item['length']} of {item['layer'][:19]}"
        if place and place not in shown:
            shown.add(place)
            lines.append(f"    {place}")
            lines += [f"    $ {item['command']}"] if item.get("command") else []
    more = len(kept) - ROWS
    return [*lines, f"  and {more} more (--json has all)"] if more > 0 else lines
