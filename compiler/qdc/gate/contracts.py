"""How a harness starts and asks an image, and what it allows; and what is known of the image to be asked.

What the contracts say themselves is in serving/contracts.json. Added here is how hard a harness asks, where that is
known, and what the gate takes where a contract sets no limit. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.gate.texts import CHAT
from qdc.serving import contracts as table

DEFAULT = "adaptfm"
PATIENCE_S = 600.0
"""For a start and for an answer, where the contract sets no limit."""
AT_ONCE, ANSWER_TOKENS = 8, 2048
ASKED = {"adaptfm": {"at_once": 8, "answer_tokens": 12_288, "memory_bytes": 16 << 30, "card": "a10g"}}
"""Eight GPQA questions at once, up to 12,288 tokens each, on an AWS g5.xlarge (one A10G, 16 GiB):
https://github.com/PraveenAShukla/adaptfm and https://adaptfm.gitlab.io/call-for-competition.html"""
COMPLETIONS = "/v1/completions"
ARCHITECTURE = "amd64"


@dataclass(frozen=True)
class Contract:
    """How a harness starts an image (`command` after its name), where it asks, and its limits.

    Routes are None where the contract has none. `start_s`: until health answers 200; `answer_s`: for one answer;
    `at_once`: requests at a time; `answer_tokens`: longest answer it asks for; `memory_bytes`, `card`: of its machine.
    `size_limit`: {bytes, of: docker-save | docker-save-gzip}, or None.
    """

    name: str
    command: tuple[str, ...]
    port: int
    ping: str
    invocations: str | None
    completions: str | None
    chat: str | None
    start_s: float = PATIENCE_S
    answer_s: float = PATIENCE_S
    at_once: int = AT_ONCE
    answer_tokens: int = ANSWER_TOKENS
    architecture: str = ARCHITECTURE
    memory_bytes: int | None = None
    card: str | None = None
    size_limit: Mapping[str, Any] | None = None

    @property
    def chat_path(self) -> str:
        """Where a chat is asked."""
        return self.chat or self.invocations or CHAT

    def limited(self, start_s: float | None = None, answer_s: float | None = None) -> Contract:
        """The same with other time limits, where they are given."""
        return replace(self, start_s=start_s or self.start_s, answer_s=answer_s or self.answer_s)


def named(name: str) -> Contract:
    """Raises QdcError `gate.contract` for a name that is not in the table."""
    if name not in table.names():
        hint = f"one of {', '.join(table.names())}"
        raise QdcError("gate.contract", f"no contract is called `{name}`", hint=hint, exit_code=WRONG_USE)
    row = table.contract(name)
    asked = {path for method, path in (route.split() for route in row.routes) if method == "POST"}
    limit = row.size_limit
    return Contract(
        name,
        tuple(row.arguments),
        row.port,
        row.ping,
        row.invocations if row.invocations in asked else None,
        COMPLETIONS if COMPLETIONS in asked else None,
        CHAT if CHAT in asked else None,
        start_s=row.ready_s or PATIENCE_S,
        answer_s=row.answer_s or PATIENCE_S,
        size_limit=None if limit is None else {"bytes": limit.bytes, "of": limit.of},
        **ASKED.get(name, {}),  # type: ignore[arg-type]
    )


def of_manifest(manifest: Mapping[str, Any]) -> Contract:
    """The contract that a content manifest names, with the routes that its server has and the recipe's size limit.

    Raises QdcError `gate.manifest` when the manifest does not say how it serves.
    """
    try:
        said, arguments = manifest["serving"]["contract"], manifest["serving"]["arguments"]
        known = named(said.get("name") or DEFAULT)
        limit = (manifest["recipe"].get("deploy") or {}).get("size_limit")
        return replace(
            known,
            port=int(arguments[arguments.index("--port") + 1]) if "--port" in arguments else known.port,
            ping=_path(said["ping"]),
            invocations=_path(said["invocations"]) if known.invocations else None,
            size_limit={"bytes": float(limit["bytes"]), "of": str(limit["of"])} if limit else known.size_limit,
        )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise QdcError(
            "gate.manifest", f"the manifest does not say how it serves: {error!r}", exit_code=COULD_NOT
        ) from error


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or not value.isprintable() or " " in value:
        raise ValueError(f"{value!r} is no path of a URL")
    return value


@dataclass(frozen=True)
class Subject:
    """What is to be asked: from the content manifest of an image of qdc, or of another from its bytes and its server.

    `k`: draft tokens a step; None when nothing drafts. `drafts`: whether something drafts; None when not known.
    `counts`: whether its /metrics is sure to count drafts where there are any. `why`: where `drafts` comes from, or
    why it is not known.
    """

    model: str | None = None
    max_model_len: int | None = None
    k: int | None = None
    drafts: bool | None = None
    chat_path: str = CHAT
    counts: bool = False
    why: str = ""

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Subject:
        """Raises QdcError `gate.manifest` when the manifest does not describe a served model."""
        try:
            serving, arguments = manifest["serving"], manifest["serving"]["arguments"]
            drafts = "--speculative-config" in arguments
            return cls(
                model=str(serving["served_model_name"]),
                max_model_len=int(arguments[arguments.index("--max-model-len") + 1]),
                k=int(manifest["recipe"]["serve"]["k"]) if drafts else None,
                drafts=drafts,
                counts=True,
            )
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise QdcError(
                "gate.manifest", f"the manifest does not say how it serves: {error!r}", exit_code=COULD_NOT
            ) from error

    @classmethod
    def of_verdicts(cls, rows: Iterable[Mapping[str, Any]], chat_path: str) -> Subject:
        """What an audit's verdicts decide of an image that qdc did not build."""
        found = {str(row["claim"]): row for row in rows}
        kind, k, length = (
            found[claim]["value"] if claim in found and found[claim]["verdict"] in ("proved", "recorded") else None
            for claim in ("drafter.kind", "serve.k", "serve.max_model_len")
        )
        telling = ("drafter.kind",) if kind is not None else ("serve", "serve.k", "drafter.kind")
        said = [item for claim in telling for item in found.get(claim, {}).get("evidence", []) if item.get("text")]
        return cls(
            max_model_len=length if type(length) is int else None,
            k=k if type(k) is int and k > 0 and kind != "none" else None,
            drafts=None if kind is None else kind != "none",
            chat_path=chat_path,
            why=_seen(said[0]) if said else "",
        )

    def room(self, prompt: int, wanted: int) -> int:
        """Tokens that an answer to a prompt of so many may have: `wanted`, or what leaves head-room.

        Head-room: K + 1 tokens below max_model_len; nearer to it vLLM drafts nothing for the whole batch.
        """
        if self.max_model_len is None:
            return wanted
        return min(wanted, self.max_model_len - prompt - (self.k or 0) - 1)


def _seen(evidence: Mapping[str, Any]) -> str:
    path = evidence.get("path")
    return f"{path}: {evidence['text']}" if evidence.get("layer") and path else str(evidence["text"])
