"""A running server to ask, wherever it runs: requests in batches, answers in order.

`Served` speaks the protocol of client.py over any byte stream; host.py and container.py provide the streams. It
knows the server's HTTP interface by name only; what is asked and what the answers mean is for the checks.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qdc.core.errors import COULD_NOT, QdcError

PING_S = 30.0
"""For one answer of the health route; a server that hangs in it is asked again."""


class Unusable(QdcError):
    """An answer that is none: another status, no JSON, or JSON of another shape. A fault of the server."""

    def __init__(self, why: str) -> None:
        super().__init__("gate.answer", why, exit_code=COULD_NOT)


@dataclass(frozen=True)
class Answer:
    """`status` 0: nobody answered, and `body` says why."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        """The body as JSON. Raises Unusable unless the status is 200 and the body is JSON."""
        if self.status != 200:
            raise Unusable(f"the server answered {self.status}: {self.text()}")
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Unusable(f"the answer is not JSON: {self.text()!r}") from error

    def part(self, *path: str | int) -> Any:
        """What the body's JSON has at `path`. Raises Unusable where it has nothing there."""
        value = self.json()
        try:
            for step in path:
                value = value[step]
        except (KeyError, IndexError, TypeError) as error:
            raise Unusable(f"the answer has no {'.'.join(map(str, path))}: {self.text()!r}") from error
        return value

    def tokens(self) -> tuple[int, int]:
        """Prompt and completion tokens. Raises Unusable."""
        counted = [self.part("usage", name) for name in ("prompt_tokens", "completion_tokens")]
        if not all(type(number) is int and number >= 0 for number in counted):
            raise Unusable(f"the answer's usage is no count: {self.text()!r}")
        return counted[0], counted[1]

    def words(self) -> str:
        """The answered text, of a chat or of a completion. Raises Unusable."""
        choice = self.part("choices", 0)
        if isinstance(choice, dict) and "message" not in choice:
            text = self.part("choices", 0, "text")
        else:
            message = self.part("choices", 0, "message")
            text = (
                (message.get("content") or message.get("reasoning_content")) if isinstance(message, dict) else message
            )
        if text is not None and not isinstance(text, str):
            raise Unusable(f"the answer's text is no text: {self.text()!r}")
        return text or ""

    def token_ids(self) -> list[int]:
        """IDs of the answered tokens. Raises Unusable."""
        ids = self.part("choices", 0, "token_ids")
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise Unusable(f"the answer's token IDs are none: {self.text()!r}")
        return ids

    def count(self) -> int:
        """What /tokenize counted. Raises Unusable."""
        number = self.part("count")
        if type(number) is not int:
            raise Unusable(f"/tokenize counted what is no number: {self.text()!r}")
        return number

    def cut(self) -> bool:
        """Whether the answer ended at its limit. Raises Unusable."""
        return bool(self.part("choices", 0, "finish_reason") == "length")

    def text(self) -> str:
        """The start of the body, for messages."""
        return self.body[:300].decode(errors="replace")


class Stream(Protocol):
    """Bytes to and from client.py. `read` returns b"" at the end; both raise TimeoutError, OSError."""

    def write(self, data: bytes) -> None: ...

    def read(self, timeout_s: float) -> bytes: ...


class Gone(QdcError):
    """The server or its container ended while it was being asked."""

    def __init__(self, why: str) -> None:
        super().__init__("gate.gone", why, exit_code=COULD_NOT)


@dataclass
class Served:
    """A server. `last_words` gives the end of its log when it is gone."""

    stream: Stream
    last_words: Callable[[], str] = lambda: ""
    rest: bytes = b""
    pid: int | None = None
    """Of its first process, where that is on this machine."""

    def ask(
        self,
        requests: Sequence[dict[str, Any]],
        *,
        concurrency: int = 4,
        timeout_s: float = 120.0,
        report: Callable[[int], None] = lambda done: None,
    ) -> list[Answer]:
        """Answers to `requests`, in their order. Raises Gone when the server ended, or answers no longer arrive."""
        batch = {
            "requests": [{"timeout_s": timeout_s, "body": None, **request} for request in requests],
            "concurrency": concurrency,
        }
        answers: dict[int, Answer] = {}
        try:
            self.stream.write(json.dumps(batch).encode() + b"\n")
            while "done" not in (line := self._line(timeout_s + 30)):
                body = base64.b64decode(line["body"])
                answers[line["index"]] = Answer(line["status"], body, line["seconds"])
                report(len(answers))
            return [answers[index] for index in range(len(requests))]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Gone(f"the server went away ({error}). {self.last_words()}".strip()) from error

    def get(self, path: str, timeout_s: float = PING_S) -> Answer:
        return self.ask([{"method": "GET", "path": path}], timeout_s=timeout_s)[0]

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Answer:
        return self.ask([{"method": "POST", "path": path, "body": body}], timeout_s=timeout_s)[0]

    def wait_ready(self, path: str, timeout_s: float, report: Callable[[float, str], None]) -> float:
        """Wait until GET `path` answers 200; the seconds it took. Raises Gone, or QdcError `gate.not-ready`."""
        started = time.monotonic()
        while True:
            answer = self.get(path, max(1.0, min(PING_S, started + timeout_s - time.monotonic())))
            waited = time.monotonic() - started
            if answer.status == 200:
                return waited
            if waited >= timeout_s:
                raise QdcError("gate.not-ready", self._not_ready(path, answer, waited), exit_code=COULD_NOT)
            report(waited, "not listening yet" if answer.status == 0 else answer.text())
            time.sleep(0.5)

    def _not_ready(self, path: str, answer: Answer, waited: float) -> str:
        said = f"answered {answer.status}" if answer.status else "did not answer"
        text = f"{path} {said} within {waited:.0f} s: {answer.text()}"
        ports = self.ask([{"method": "LISTENING", "path": ""}])[0]
        if answer.status == 0 and "refused" in answer.text().lower() and ports.status == 200:
            heard = ", ".join(map(str, ports.json())) or "none"
            text += f". Ports on which the container listens: {heard}"
        return f"{text}. {self.last_words()}".strip()

    def counters(self) -> dict[str, float]:
        """The engine's counters of speculation: `drafts`, `accepted`; empty for a server that does not speculate."""
        answer = self.get("/metrics")
        text = answer.body.decode(errors="replace") if answer.status == 200 else ""
        found: dict[str, float] = {}
        for key, name in (("drafts", "num_drafts"), ("accepted", "num_accepted_tokens")):
            values = re.findall(rf"^vllm:spec_decode_{name}_total(?:{{[^}}]*}})? (\d\S*)$", text, re.MULTILINE)
            try:
                if values:
                    found[key] = sum(map(float, values))
            except ValueError as error:
                raise Unusable(f"/metrics counts what is no number: {values[:3]}") from error
        return found

    def _line(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.rest:
            data = self.stream.read(max(0.1, deadline - time.monotonic()))
            if not data:
                raise OSError("its stream ended")
            self.rest += data
        line, self.rest = self.rest.split(b"\n", 1)
        value: dict[str, Any] = json.loads(line)
        return value
