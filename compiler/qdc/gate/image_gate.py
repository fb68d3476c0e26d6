"""`gate`: starts the very image that is to be uploaded and checks what only a running image can show.

    loads, starts, answers /ping in time, shows its own manifest, answers requests, gives the same greedy text with
    and without speculation, accepts drafts as the replay said, fits the size limit

Two containers without a network: the image as it is, and the same image with `serve --without-drafter`.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.formats import oci
from qdc.gate import checks, container, texts
from qdc.gate.checks import Asked, Check, Subject
from qdc.gate.served import Served

MANIFEST = "opt/qdc/manifest.json"
IDS = ("engine", "loads", "size", "starts", "ping", "manifest", "answers", "acceptance", "lossless")
Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Options:
    """`ping_timeout_s`: for both servers to be ready. `max_tokens`: an answer's limit; the replay's own, where there
    is one. `lossless_prompts`: how many are compared (at least 50 must leave head-room). `image_id`: refuse another.
    """

    ping_timeout_s: float = 420.0
    max_tokens: int = 64
    lossless_prompts: int = 200
    image_id: str | None = None


def silent(done: int, total: int, note: str) -> None:
    """A report that nobody listens to."""


def gate(
    image: str,
    record: Mapping[str, Any] | None = None,
    prompts: Sequence[Mapping[str, Any]] | None = None,
    options: Options | None = None,
    report: Report = silent,
) -> dict[str, Any]:
    """The report on `image` (`archive:FILE` or `docker:NAME`): {image, checks: [{id, outcome, figure, why}]}.

    `record`: its build record; another image ID than the record's is a failure. `prompts`: rows with `messages` and
    the replay's `accepted` and `drafts`, or `replay` {label: {accepted, drafts}} (one label, or one with a
    window); without them built-in prompts are asked and nothing is compared with a replay.
    Raises QdcError (exit 2) only for an `image` that is neither; all else is an outcome.
    """
    run = _Run(image, record, prompts, options or Options(), report)
    with contextlib.suppress(_Stop):
        run.all()
    return run.report_json()


def exit_code(report: Mapping[str, Any]) -> int:
    """0: all passed; 1: something failed; 3: nothing failed, but not everything could be decided."""
    outcomes = {check["outcome"] for check in report["checks"]}
    return 1 if "fail" in outcomes else 0 if outcomes == {"pass"} else 3


class _Stop(Exception):
    """No further check can run."""


class _Run:
    """One gate: its checks in order; a failure that leaves nothing to ask stops it."""

    def __init__(
        self,
        image: str,
        record: Mapping[str, Any] | None,
        prompts: Sequence[Mapping[str, Any]] | None,
        options: Options,
        report: Report,
    ) -> None:
        self.place, _, self.name = image.partition(":")
        if self.place not in ("archive", "docker") or not self.name:
            raise QdcError(
                "gate.image", f"{image!r} cannot be started", hint="archive:FILE or docker:NAME", exit_code=WRONG_USE
            )
        self.options, self.report, self.prompts = options, report, prompts
        self.expected_id = options.image_id or ((record or {}).get("image") or {}).get("id")
        self.shown = image
        self.checks: list[Check] = []

    def all(self) -> None:
        with self._step("engine"):
            self.engine = container.engine()
            version = self.engine.version()["Version"]
        self._done("engine", "pass", version, "the engine answers")
        self._load()
        self._size()
        with contextlib.ExitStack() as stack:
            self._started(stack)
            self._running()

    def report_json(self) -> dict[str, Any]:
        """The answer; a check that was not reached says why."""
        found = {check.id: check for check in self.checks}
        reason = next((c.why for c in self.checks if c.outcome in ("fail", "not-run")), "an earlier check did not end")
        wanted = [id for id in IDS if id != "acceptance" or not self._drafts_nothing()]
        return {
            "image": self.shown,
            "checks": [found.get(id, Check(id, "not-run", None, reason)).as_json() for id in wanted],
        }

    def _drafts_nothing(self) -> bool:
        subject = getattr(self, "subject", None)
        return subject is not None and subject.k is None

    def _done(self, id: str, outcome: str, figure: Any, why: str) -> None:
        self.checks.append(Check(id, outcome, figure, why))
        self.report(len(self.checks), len(IDS), f"{id}: {outcome}")
        if outcome == "fail" and id in ("loads", "starts", "ping"):
            raise _Stop

    @contextlib.contextmanager
    def _step(self, id: str) -> Iterator[None]:
        """What goes wrong inside is the outcome of check `id`, and the end; without an engine nothing has run."""
        try:
            yield
        except QdcError as error:
            text = f"{error.message} ({error.hint})" if error.hint else error.message
            self.checks.append(Check(id, "not-run" if id == "engine" else "fail", None, text))
            raise _Stop from error

    def _load(self) -> None:
        with self._step("loads"):
            started = time.monotonic()
            if self.place == "archive":
                archive = Path(self.name)
                if not archive.is_file():
                    raise QdcError("gate.archive", f"there is no archive {archive}", exit_code=COULD_NOT)
                read = oci.open_image(archive)
                self.image_id, self.manifest_bytes = read.image_id, read.read(MANIFEST)
                known = container.has_image(self.engine, self.image_id)
                if not known:
                    container.load(self.engine, archive, self.report)
                    known = container.has_image(self.engine, self.image_id)
                    if not known:
                        raise QdcError("gate.loaded", f"the engine holds no {self.image_id} after loading", exit_code=4)
            else:
                with container.docker_errors(f"looking for {self.name}"):
                    self.image_id = self.engine.images.get(self.name).id
                self.manifest_bytes = container.read_file(self.engine, self.image_id, MANIFEST)
            self.manifest = json.loads(self.manifest_bytes)
            self.subject = Subject.of(self.manifest)
        self.shown = self.image_id
        if self.expected_id and self.expected_id.removeprefix("sha256:") != self.image_id.removeprefix("sha256:"):
            self._done("loads", "fail", self.image_id, f"the build made {self.expected_id}, this is another image")
        self._done("loads", "pass", round(time.monotonic() - started, 1), f"the engine holds {self.image_id}")

    def _size(self) -> None:
        limit = ((self.manifest["recipe"].get("deploy") or {}).get("size_limit")) or None
        with self._step("size"):
            if limit is None:
                self._done("size", "pass", None, "the recipe sets no limit")
                return
            size = Path(self.name).stat().st_size if self.place == "archive" else self._saved()
            allowed, of = int(float(limit["bytes"])), limit["of"]
            if of == "docker-save-gzip" and size > allowed:
                size = self._compressed()
            outcome = "pass" if size <= allowed else "fail"
            self._done("size", outcome, size, f"{size / 1e9:.3f} GB of {allowed / 1e9:.3f} GB allowed ({of})")

    def _saved(self) -> int:
        return container.saved_size(self.engine, self.image_id, self.report)

    def _compressed(self) -> int:
        """The size of `docker save | gzip`."""
        state, size = zlib.compressobj(6, wbits=31), 0
        with container.docker_errors("saving the image"):
            for chunk in self.engine.images.get(self.image_id).save():
                size += len(state.compress(chunk))
        return size + len(state.flush())

    def _started(self, stack: contextlib.ExitStack) -> None:
        """Both servers, started at once (their start is mostly one thread's work) and ready."""
        with self._step("starts"):
            start = time.monotonic()
            self.served = stack.enter_context(container.serve(self.engine, self.image_id, ["serve"]))
            self.plain: Served | None = None
            if self.subject.k is not None:
                plain = container.serve(self.engine, self.image_id, ["serve", "--without-drafter"])
                self.plain = stack.enter_context(plain)
        self._done("starts", "pass", round(time.monotonic() - start, 1), "with `serve`, without a network")
        with self._step("ping"):
            limit = self.options.ping_timeout_s
            waited = self.served.wait_ready(self.subject.ping, limit, self._waiting)
            self._done("ping", "pass", round(waited, 1), f"{self.subject.ping} answers 200 after a real completion")

    def _waiting(self, waited: float, why: str) -> None:
        self.report(int(waited), int(self.options.ping_timeout_s), f"waiting for {self.subject.ping}: {why}")

    def _running(self) -> None:
        with self._step("manifest"):
            self.checks.append(checks.check_manifest(self.served, self.manifest_bytes))
        with self._step("answers"):
            self.checks.append(checks.check_answers(self.served, self.subject))
        if self.plain is None:
            why = "no drafter: there is no speculation to compare with"
            self._done("lossless", "pass", None, why)
            return
        rows = list(self.prompts or [])
        conversations = [row["messages"] for row in rows]
        if len(rows) < self.options.lossless_prompts:
            conversations += texts.built_in(self.options.lossless_prompts - len(rows))
        with self._step("acceptance"):
            asked = checks.ask_greedy(
                self.served,
                self.subject,
                conversations[: len(rows)] or conversations,
                self.options.max_tokens,
                self.report,
            )
            replay = [_replayed(row) for row in rows] if rows else None
            self.checks.append(checks.check_acceptance(asked, replay))
        with self._step("lossless"):
            self._lossless(asked, conversations[len(rows) :] if rows else [])

    def _lossless(self, asked: Asked, more: Sequence[texts.Messages]) -> None:
        assert self.plain is not None
        if more:
            extra = checks.ask_greedy(self.served, self.subject, more, self.options.max_tokens, self.report)
            asked = Asked([*asked.requests, *extra.requests], [*asked.answers, *extra.answers])
        wanted = self.options.lossless_prompts
        asked = Asked(asked.requests[:wanted], asked.answers[:wanted])
        cut_off = checks.ask_to_the_end(self.served, self.subject, asked)
        self.plain.wait_ready(self.subject.ping, self.options.ping_timeout_s, self._waiting)
        self.checks.append(checks.check_lossless(self.plain, asked, cut_off, self.report))


def _replayed(row: Mapping[str, Any]) -> Mapping[str, int]:
    """The replay's counts of one prompt: accepted and drafts. Raises QdcError `gate.replay`."""
    if "replay" not in row:
        return {"accepted": row["accepted"], "drafts": row["drafts"]}
    forms: Mapping[str, Mapping[str, int]] = row["replay"]
    served = [label for label in forms if ", window " in label] or list(forms)
    if len(served) != 1:
        raise QdcError("gate.replay", f"the replay does not say which of {', '.join(forms)} is served", exit_code=4)
    return forms[served[0]]
