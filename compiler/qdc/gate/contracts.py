"""What a harness does with an image and what it allows, by name of the contract: data, with its source.

An image of qdc names its contract in the content manifest; of any other the user names it. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.gate.texts import CHAT

DEFAULT = "adaptfm"


@dataclass(frozen=True)
class Contract:
    """How a harness starts an image (`command` after its name), where it asks, and its limits.

    Routes are None where the contract has none. `start_s`: until health answers 200; `answer_s`: for one answer;
    `at_once`: requests at a time; `answer_tokens`: longest answer it asks for; `memory_bytes`: of its machine.
    `size_limit`: {bytes, of: docker-save | docker-save-gzip}, or None.
    """

    name: str
    source: str
    command: tuple[str, ...]
    port: int
    ping: str
    invocations: str | None
    completions: str | None
    chat: str | None
    start_s: float
    answer_s: float
    at_once: int
    answer_tokens: int
    architecture: str
    memory_bytes: int | None
    size_limit: Mapping[str, Any] | None

    @property
    def chat_path(self) -> str:
        """Where a chat is asked."""
        return self.chat or self.invocations or CHAT

    def limited(self, start_s: float | None = None, answer_s: float | None = None) -> Contract:
        """The same with other time limits, where they are given."""
        return replace(self, start_s=start_s or self.start_s, answer_s=answer_s or self.answer_s)


@cache
def table() -> dict[str, Contract]:
    """Every known contract."""
    rows = json.loads((Path(__file__).parent / "contracts.json").read_text(encoding="utf-8"))
    return {name: Contract(name=name, **{**row, "command": tuple(row["command"])}) for name, row in rows.items()}


def named(name: str) -> Contract:
    """Raises QdcError `gate.contract` for a name that is not in the table."""
    if name not in table():
        raise QdcError(
            "gate.contract", f"no contract is called `{name}`", hint=f"one of {', '.join(table())}", exit_code=WRONG_USE
        )
    return table()[name]


def of_manifest(manifest: Mapping[str, Any]) -> Contract:
    """The contract that a content manifest names, with the routes that its server has.

    Raises QdcError `gate.manifest` when the manifest does not say how it serves.
    """
    try:
        said = manifest["serving"]["contract"]
        known = named(said.get("name") or DEFAULT)
        limit = (manifest["recipe"].get("deploy") or {}).get("size_limit")
        return replace(
            known,
            ping=said["ping"],
            invocations=said["invocations"] if known.invocations else None,
            size_limit=limit or known.size_limit,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise QdcError(
            "gate.manifest", f"the manifest does not say how it serves: {error!r}", exit_code=COULD_NOT
        ) from error


@dataclass(frozen=True)
class Subject:
    """What is to be asked: from the content manifest of an image of qdc, or learned from a running server.

    `k`: draft tokens a step; None when nothing drafts. `drafts`: whether something drafts; None when not known.
    """

    model: str | None = None
    max_model_len: int | None = None
    k: int | None = None
    drafts: bool | None = None
    chat_path: str = CHAT

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Subject:
        """Raises QdcError `gate.manifest` when the manifest does not describe a served model."""
        try:
            serving, arguments = manifest["serving"], manifest["serving"]["arguments"]
            drafts = "--speculative-config" in arguments
            return cls(
                model=serving["served_model_name"],
                max_model_len=int(arguments[arguments.index("--max-model-len") + 1]),
                k=manifest["recipe"]["serve"]["k"] if drafts else None,
                drafts=drafts,
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise QdcError(
                "gate.manifest", f"the manifest does not say how it serves: {error!r}", exit_code=COULD_NOT
            ) from error

    def room(self, prompt: int, wanted: int) -> int:
        """Tokens that an answer to a prompt of so many may have: `wanted`, or what leaves head-room.

        Head-room: K + 1 tokens below max_model_len; nearer to it vLLM drafts nothing for the whole batch.
        """
        if self.max_model_len is None:
            return wanted
        return min(wanted, self.max_model_len - prompt - (self.k or 0) - 1)
