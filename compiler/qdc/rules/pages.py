"""A rule's page as Markdown: what `qdc explain` prints and `docs/rules/` holds."""

from __future__ import annotations

from collections.abc import Mapping

from qdc.recipe.findings import Finding


def page(finding: Finding) -> str:
    """The page of one finding, with a newline at the end."""
    accept = (
        "A recipe can accept it with a reason:\n\n"
        f"```yaml\naccept:\n  - rule: {finding.id}\n    because: ...\n```\n\n"
        "The reason is kept in the manifest of the image."
        if finding.final is None
        else f"It cannot be accepted: {finding.final}."
    )
    parts = [
        f"# {finding.id} ({finding.severity})",
        finding.summary,
        f"## Why\n\n{finding.why}",
        f"## How to fix\n\n{finding.fix}",
        f"## Fails\n\n```yaml\n{finding.failing}\n```",
        f"## Passes\n\n```yaml\n{finding.passing}\n```",
        f"## Source\n\n{finding.evidence}",
        f"## Accepting it\n\n{accept}",
    ]
    return "\n\n".join(parts) + "\n"


def index(pages: Mapping[str, Finding]) -> str:
    """A Markdown table of all findings."""
    rows = [f"| [{item.id}]({item.id}.md) | {item.severity} | {item.summary} |" for item in pages.values()]
    head = "# Rules\n\nWhat `qdc validate` finds; `qdc explain ID` prints a page.\n\n"
    table = "| id | severity | what fires it |\n|---|---|---|\n"
    return head + table + "\n".join(rows) + "\n"


def files(pages: Mapping[str, Finding]) -> dict[str, bytes]:
    """Every file of `docs/rules/`: name -> content."""
    made = {f"{item.id}.md": page(item).encode() for item in pages.values()}
    return {"README.md": index(pages).encode(), **made}
