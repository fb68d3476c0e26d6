"""A report of an audit as plain text: what is refuted first, with its evidence; then the rest, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.audit.evidence import PROVED, RECORDED, REFUTED, UNREAD, brief


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
                lines += ["", f"{word.upper()}  {row['claim']} = {brief(row['value'])}"]
                lines += [line for item in row["evidence"][:6] for line in _evidence(item)]
    proved = [row for row in rows if row["verdict"] == PROVED]
    plain = [row for row in proved if not row["claim"].startswith(("image.", "files["))]
    width = max((len(row["claim"]) for row in plain), default=0)
    lines += ["", "proved"] if plain else []
    for row in plain:
        text = next((item["text"] for item in row["evidence"]), "")
        lines.append(f"  {row['claim']:<{width}}  {brief(row['value'], 24):<24}  {brief(text, 70)}".rstrip())
    if len(proved) > len(plain):
        lines.append(f"  and {len(proved) - len(plain)} digests of layers, blobs and files")
    recorded = [row for row in rows if row["verdict"] == RECORDED]
    if recorded:
        width = max(len(row["claim"]) for row in recorded)
        lines += ["", "recorded (found and claimed by nobody, or claimed and not in the bytes)"]
        lines += [f"  {row['claim']:<{width}}  {brief(row['value'])}" for row in recorded]
    return "\n".join(lines)


def _evidence(item: Mapping[str, Any]) -> list[str]:
    where = item["path"] or ""
    if item["layer"] and item["offset"] is not None:
        where += f" at {item['offset']}+{item['length']} of {item['layer'][:19]}"
    lines = [f"  {item['text']}", f"    {where}"]
    if item.get("command"):
        lines.append(f"    $ {item['command']}")
    return lines
