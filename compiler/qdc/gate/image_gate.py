"""`gate`: runs a contract against the very artifact that is to be uploaded.

First what its bytes alone show (nothing is started when that is wrong), then the image in a container engine as the
harness starts it, then the same image without speculation, where a way to switch it off is known: for an image of qdc
`serve --without-drafter`, for another what the user says. Every check is listed in report.py.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.gate import artifact, configuration, container, contracts, memory, report
from qdc.gate.container import Containers, NoEngine
from qdc.gate.contracts import Contract, Subject
from qdc.gate.report import Check
from qdc.gate.running import Running
from qdc.gate.served import Gone, Served
from qdc.gate.steps import Report, Steps, Stop, words
from qdc.gate.texts import Messages

PLACES = ("archive", "oci", "docker")
OWN_PLAIN = ("serve", "--without-drafter")
WITHOUT_ARGUMENT_S = 20.0
CARD = "deploy.hardware"


@dataclass(frozen=True)
class Options:
    """`contract`: for an image that names none. `start_s`, `answer_s`: instead of the contract's limits.

    `max_tokens`: an answer's limit; the replay's own, where there is one. `lossless_prompts`: how many are compared (at
    least 50 must leave head-room). `image_id`: refuse another. `floor`: least acceptance length. `plain`: the command
    that starts the image without speculation, where qdc did not build it. `gpus`: whether the container gets the cards;
    None lets the image say. `require`: claims (`path=value`) that the bytes must not refute.
    """

    contract: str | None = None
    start_s: float | None = None
    answer_s: float | None = None
    max_tokens: int = 64
    lossless_prompts: int = 200
    image_id: str | None = None
    floor: float | None = None
    plain: tuple[str, ...] | None = None
    gpus: bool | None = None
    require: tuple[str, ...] = ()


def silent(done: int, total: int, note: str) -> None:
    """A report that nobody listens to."""


def gate(
    image: str,
    record: Mapping[str, Any] | None = None,
    prompts: Sequence[Mapping[str, Any]] | None = None,
    options: Options | None = None,
    report: Report = silent,
) -> dict[str, Any]:
    """The report on `image` (`archive:FILE`, `oci:DIR` or `docker:NAME`).

    {image: its ID or null, artifact, contract, checks: [{id, outcome, figure, why}]}. `record`: its build record;
    another image ID than the record's is a failure. `prompts`: rows with `messages` and the replay's `accepted` and
    `drafts`, or `replay` {label: {accepted, drafts}} (one label, or one with a window); rows without these are asked
    and not compared with a replay, and without rows built-in prompts are.
    Raises QdcError for an `image` of no such form, a missing file and an unknown contract; all else is an outcome.
    """
    options = options or Options()
    evaluate = ((record or {}).get("recipe") or {}).get("evaluate") or {}
    run = _Gate(image, record, options, report)
    with contextlib.suppress(Stop):
        run.all(list(prompts or []), options.floor or (evaluate.get("acceptance") or {}).get("floor"))
    return run.answer()


class _Gate(Steps):
    """One gate: its checks in order; a failure that leaves nothing to ask stops it."""

    def __init__(self, image: str, record: Mapping[str, Any] | None, options: Options, report: Report) -> None:
        super().__init__(report)
        self.place, _, self.name = image.partition(":")
        if self.place not in PLACES or not self.name:
            hint = "archive:FILE, oci:DIR or docker:NAME"
            raise QdcError("gate.image", f"{image!r} cannot be started", hint=hint, exit_code=WRONG_USE)
        if self.place != "docker" and not Path(self.name).exists():
            raise QdcError("image.missing", f"there is no {self.name}", exit_code=COULD_NOT)
        self.contract: Contract = contracts.named(options.contract or contracts.DEFAULT)
        self.shown, self.options = image, options
        self.expected_id = options.image_id or ((record or {}).get("image") or {}).get("id")
        self.image_id: str | None = None
        self.manifest: dict[str, Any] | None = None
        self.subject = Subject()
        self.gpus = False

    def all(self, prompts: Sequence[Mapping[str, Any]], floor: float | None) -> None:
        compared = all("replay" in row or "accepted" in row for row in prompts)
        replay = [replayed(row) for row in prompts] if prompts and compared else None
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._before_start()
            if self.engine is None:
                self._engine()
            self._device()
            known = self._load()
            python = configuration.find_python(self.artifact.image)
            made = Containers(self.engine, known, python, self.contract.port, self.gpus)
            stack.enter_context(made.removed())
            self._serve(made, [row["messages"] for row in prompts], replay, floor)

    def answer(self) -> dict[str, Any]:
        without = frozenset({"acceptance"}) if self.subject.drafts is False else frozenset()
        return {
            "image": self.image_id,
            "artifact": self.shown,
            "contract": self.contract.name,
            "checks": [check.as_json() for check in report.complete(self.checks, without)],
        }

    # Before anything starts

    def _open(self, stack: contextlib.ExitStack) -> None:
        path = Path(self.name)
        if self.place == "docker":
            self._engine()
            if not container.knows(self.engine, self.name):
                raise QdcError("image.missing", f"the engine holds no {self.name}", exit_code=COULD_NOT)
            with self.step("image"):
                path = stack.enter_context(artifact.saved(self.engine, self.name, self.report))
        with self.step("image"):
            self.artifact = stack.enter_context(artifact.open_artifact(path, self.shown))
            self.image_id = self.artifact.image.image_id
            if self.artifact.manifest is not None:
                self.manifest = _object(self.artifact.manifest)
                self.contract = contracts.of_manifest(self.manifest)
                self.subject = Subject.of(self.manifest)
        if self.options.contract is not None:
            self.contract = contracts.named(self.options.contract)
        self.contract = self.contract.limited(self.options.start_s, self.options.answer_s)

    def _before_start(self) -> None:
        image, contract = self.artifact.image, self.contract
        with self.step("image"):
            self.report(0, 0, "reading every layer")
            whole, said, verdicts = artifact.audited(
                self.artifact, self.expected_id, self._required(), contract.command
            )
            self.done(whole)
            if self.manifest is None:
                self.subject = Subject.of_verdicts(verdicts, contract.chat_path)
        self.check("size", lambda: artifact.check_size(self.artifact, contract, self.report))
        self.check("layers", lambda: configuration.check_layers(image))
        self.check("architecture", lambda: configuration.check_architecture(image, contract))
        self.check("entrypoint", lambda: configuration.check_entrypoint(image, contract))
        self.check("environment", lambda: configuration.check_environment(image))
        self.done(said)
        if self.failed:
            raise Stop

    def _required(self) -> tuple[str, ...]:
        """Claims to hold against the bytes: the user's, and the contract's card for an image that names none."""
        card, asked = self.contract.card, self.options.require
        said = self.manifest is not None or any(text.startswith(f"{CARD}=") for text in asked)
        if said or card is None or not configuration.wants_gpu(self.artifact.image):
            return asked
        return (*asked, f"{CARD}={card}")

    # In the engine

    def _engine(self) -> None:
        with self.step("engine"):
            self.engine = container.engine()
            with container.docker_errors("asking the engine"):
                version = self.engine.version()["Version"]
        self.done(Check("engine", "pass", version, "the engine answers"))

    def _device(self) -> None:
        """A GPU image needs an engine with a card; another card than the recipe's decides nothing about that one."""
        recipe = (self.manifest or {}).get("recipe") or {}
        named = (recipe.get("deploy") or {}).get("hardware")
        hardware = None if named is None else str(named)
        wanted = configuration.wants_gpu(self.artifact.image) if hardware is None else hardware != "cpu"
        self.gpus = wanted if self.options.gpus is None else self.options.gpus
        if not self.gpus:
            self.done(Check("device", "pass", hardware or "cpu", "no card is asked for"))
            return
        card = memory.card_memory()
        with self.step("device"), container.docker_errors("asking the engine"):
            if "nvidia" not in (self.engine.info().get("Runtimes") or {}) and card is None:
                why = f"the image is built for {hardware or 'an NVIDIA card'}, and the engine offers none"
                raise NoEngine("gate.device", f"{why}: nothing that starts it was run", exit_code=COULD_NOT)
        name = card[0] if card else None
        if hardware is None or name is None or _letters(hardware) in _letters(name):
            self.done(Check("device", "pass", name, "the container gets the cards"))
        else:
            why = f"the recipe is for {hardware}: what runs on {name} may not run, or not as fast, there"
            self.done(Check("device", "undecided", name, why))

    def _load(self) -> str:
        image, started = self.artifact.image, time.monotonic()
        names = [self.name] if self.place == "docker" else []
        with self.step("loads"):
            known = container.held(self.engine, image.image_id, image.diff_ids, names)
            why = f"the engine holds {image.image_id} already"
            if known is None:
                said = container.load(self.engine, self._chunks(), self.shown)
                known = container.held(self.engine, image.image_id, image.diff_ids, said)
                why = f"the engine took it and holds {image.image_id}"
            if known is None:
                why = f"the engine holds no {image.image_id} after loading"
                raise QdcError("gate.loaded", why, exit_code=COULD_NOT)
        self.done(Check("loads", "pass", round(time.monotonic() - started, 1), why))
        return known

    def _chunks(self) -> Iterator[bytes]:
        total = self.artifact.path.stat().st_size if self.artifact.is_file else 0
        done = 0
        for chunk in artifact.archive_chunks(self.artifact):
            done += len(chunk)
            self.report(done >> 20, total >> 20, "MiB loaded")
            yield chunk

    def _serve(
        self,
        made: Containers,
        conversations: Sequence[Messages],
        replay: Sequence[Mapping[str, int]] | None,
        floor: float | None,
    ) -> None:
        """Both servers at once where they do not share a card (a start is mostly one thread's work)."""
        command = self._plain_command()
        with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
            served = self._start(made, first)
            run = Running(
                self, served, self.contract, self.subject, command is not None, conversations, replay, floor,
                self.options.max_tokens, self.options.lossless_prompts,
            )  # fmt: skip
            plain: Served | None = None
            if command is not None and not self.gpus:
                with self.step("lossless", stop=False):
                    plain = second.enter_context(made.serve(command))
            self._ping(made, run)
            with memory.watched(served.pid) as seen:
                run.answers(self.artifact.manifest)
                run.speculation()
                if plain is not None:
                    with self.step("lossless", stop=False):
                        run.ready(plain)
                run.use()
                self.check("memory", lambda: memory.check_memory(seen, self._machine_memory(), self.gpus))
            if command is not None and self.gpus and not self.has("lossless"):
                first.close()
                with self.step("lossless"):
                    plain = second.enter_context(made.serve(command))
                    run.ready(plain)
            run.compare(plain)

    def _plain_command(self) -> tuple[str, ...] | None:
        """How the image starts without speculation, if that is known and there is any."""
        if self.subject.drafts is False:
            return None
        return OWN_PLAIN if self.manifest is not None else self.options.plain

    def _start(self, made: Containers, stack: contextlib.ExitStack) -> Served:
        started = time.monotonic()
        with self.step("starts"):
            try:
                served = stack.enter_context(made.serve(self.contract.command))
            except NoEngine:
                raise
            except QdcError as error:
                raise QdcError(error.id, self._without_argument(made, words(error)), exit_code=COULD_NOT) from error
        command = " ".join(self.contract.command) or "its own command"
        network = "" if made.publishes else ", without a network"
        self.done(Check("starts", "pass", round(time.monotonic() - started, 1), f"with `{command}`{network}"))
        return served

    def _ping(self, made: Containers, run: Running) -> None:
        with self.step("ping"):
            try:
                waited = run.ready(run.served)
            except Gone as error:
                if self.away():
                    raise
                raise QdcError(error.id, self._without_argument(made, words(error)), exit_code=COULD_NOT) from error
        why = f"{self.contract.ping} answers 200, {self.contract.start_s:g} s allowed"
        self.done(Check("ping", "pass", round(waited, 1), why))

    def _without_argument(self, made: Containers, why: str) -> str:
        """`why`, and whether the image serves when it is started without the contract's argument."""
        if not self.contract.command:
            return why
        with contextlib.suppress(QdcError), made.serve(()) as served:
            served.wait_ready(self.contract.ping, WITHOUT_ARGUMENT_S, lambda waited, said: None)
            argument = " ".join(self.contract.command)
            return f"it serves without an argument, and not with `{argument}`, which its entrypoint ignores. {why}"
        return why

    def _machine_memory(self) -> int | None:
        """Bytes of the contract's machine or of the engine's, the smaller."""
        found = [self.contract.memory_bytes]
        with contextlib.suppress(QdcError), container.docker_errors("asking the engine"):
            found.append(int(self.engine.info().get("MemTotal") or 0))
        return min((value for value in found if value), default=None)


def _letters(name: str) -> str:
    """The name of a card as both NVIDIA's tool and a recipe write it."""
    return "".join(filter(str.isalnum, name.lower()))


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise QdcError("gate.manifest", f"the manifest in the image is not JSON: {error}", exit_code=4) from error
    if not isinstance(value, dict):
        raise QdcError("gate.manifest", "the manifest in the image is no JSON object", exit_code=COULD_NOT)
    return value


def replayed(row: Mapping[str, Any]) -> Mapping[str, int]:
    """The replay's counts of one prompt: accepted and drafts. Raises QdcError `gate.replay`."""
    if "replay" not in row:
        return {"accepted": row["accepted"], "drafts": row["drafts"]}
    forms: Mapping[str, Mapping[str, int]] = row["replay"]
    served = [label for label in forms if ", window " in label] or list(forms)
    if len(served) != 1:
        raise QdcError("gate.replay", f"the replay does not say which of {', '.join(forms)} is served", exit_code=4)
    return forms[served[0]]
