"""What a gate says: its checks by id, in the order in which they are made, and what they come to.

Knows no image and no engine. An outcome is `pass`, `fail`, `undecided` (it was looked at and cannot be told) or
`not-run` (it was not looked at, and `why` says what was missing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IDS = {
    "image": "the file is one whole image: every layer has the digest that the configuration names",
    "size": "what the contract weighs is under its limit",
    "layers": "it was not flattened by export and import",
    "architecture": "configuration and start program are for the contract's machine",
    "entrypoint": "the contract's command names a program that is in the image",
    "environment": "its environment is well-formed, says everything once, and holds no secret",
    "claims": "no word of tag, labels or manifest is refuted by the bytes",
    "engine": "a container engine answers",
    "device": "the engine offers what the image is built for",
    "loads": "the engine takes this very artifact and holds its image ID",
    "starts": "the contract's command starts a container that stays",
    "ping": "the health route answers 200 within the contract's time",
    "manifest": "the running server shows the image's own manifest",
    "answers": "each of the contract's routes answers a real request",
    "repeats": "requests in a row on one server: acceptance does not decay",
    "acceptance": "acceptance length: not 1.0, not below the floor, as the replay said",
    "concurrency": "the contract's number of requests at once, each within its time",
    "runaway": "answers end, do not loop, and take no longer than the contract allows",
    "stays": "after all requests the same server is still well",
    "memory": "head-room of the container, and of the card",
    "lossless": "the same greedy tokens with and without speculation, near-ties counted",
}
BEFORE_START = ("image", "size", "layers", "architecture", "entrypoint", "environment", "claims")


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    id: str
    outcome: str
    figure: Any
    why: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "outcome": self.outcome, "figure": self.figure, "why": self.why}


def complete(checks: Sequence[Check], without: frozenset[str] = frozenset()) -> list[Check]:
    """All checks in order; those that are not in `checks` did not run, because of the first that failed or could not.

    `without`: ids that mean nothing for this image.
    """
    found = {check.id: check for check in checks}
    stopped = next((check for check in checks if check.outcome == "fail"), None)
    stopped = stopped or next((check for check in checks if check.outcome == "not-run"), None)
    first = stopped.why.partition("\n")[0] if stopped else ""
    why = f"stopped by `{stopped.id}`: {first}" if stopped else "the gate ended before it"
    return [found.get(id, Check(id, "not-run", None, why)) for id in IDS if id not in without]


def exit_code(report: Mapping[str, Any]) -> int:
    """0: all passed; 1: something failed; 3: nothing failed, but not everything could be decided."""
    outcomes = {check["outcome"] for check in report["checks"]}
    return 1 if "fail" in outcomes else 0 if outcomes == {"pass"} else 3
