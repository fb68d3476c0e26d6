"""A running server to ask, wherever it runs: requests in batches, answers in order.

`Served` speaks the protocol of client.py over any byte stream; host.py and container.py provide the streams. It
knows the server's HTTP interface by name only; what is asked and what the answers mean is in checks.py.
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


@dataclass(frozen=True)
class Answer:
    """`status` 0: nobody answered, and `body` says why."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        """The body as JSON. Raises QdcError `gate.answer` unless the status is 200."""
        if self.status != 200:
            raise QdcError("gate.answer", f"the server answered {self.status}: {self.text()}", exit_code=COULD_NOT)
        return json.loads(self.body)

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
        except (OSError, ValueError) as error:
            raise Gone(f"the server went away ({error}). {self.last_words()}".strip()) from error
        return [answers[index] for index in range(len(requests))]

    def get(self, path: str, timeout_s: float = 30.0) -> Answer:
        return self.ask([{"method": "GET", "path": path}], timeout_s=timeout_s)[0]

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Answer:
        return self.ask([{"method": "POST", "path": path, "body": body}], timeout_s=timeout_s)[0]

    def wait_ready(self, path: str, timeout_s: float, report: Callable[[float, str], None]) -> float:
        """Wait until GET `path` answers 200; the seconds it took. Raises Gone, or QdcError `gate.not-ready`."""
        started = time.monotonic()
        while True:
            answer = self.get(path)
            waited = time.monotonic() - started
            if answer.status == 200:
                return waited
            if waited > timeout_s:
                raise QdcError(
                    "gate.not-ready",
                    f"{path} answered {answer.status} after {waited:.0f} s: {answer.text()}. {self.last_words()}",
                    exit_code=COULD_NOT,
                )
            report(waited, "not listening yet" if answer.status == 0 else answer.text())
            time.sleep(0.5)

    def counters(self) -> dict[str, float]:
        """The engine's counters of speculation: `drafts`, `accepted`; empty for a server that does not speculate."""
        text = self.get("/metrics").body.decode()
        found: dict[str, float] = {}
        for key, name in (("drafts", "num_drafts"), ("accepted", "num_accepted_tokens")):
            values = re.findall(rf"^vllm:spec_decode_{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
            if values:
                found[key] = sum(map(float, values))
        return found

    def _line(self, timeout_s: float) -> dict[str, Any]:
        while b"\n" not in self.rest:
            data = self.stream.read(timeout_s)
            if not data:
                raise OSError("its stream ended")
            self.rest += data
        line, self.rest = self.rest.split(b"\n", 1)
        value: dict[str, Any] = json.loads(line)
        return value
