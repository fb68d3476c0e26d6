"""Everything that a started image is asked, check by check, and then its twin without speculation.

Knows the servers, not how they were started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qdc.gate import checks, load, texts
from qdc.gate.checks import Asked
from qdc.gate.contracts import Contract, Subject
from qdc.gate.report import Check
from qdc.gate.served import Served
from qdc.gate.steps import Steps, Stop


@dataclass
class Running:
    """One server under test. `replay`: accepted and drafts for each of `conversations`, or None.

    `compares`: whether the same image can be started without speculation. `subject` is completed by `answers`.
    """

    steps: Steps
    served: Served
    contract: Contract
    subject: Subject
    compares: bool
    conversations: Sequence[texts.Messages] = ()
    replay: Sequence[Any] | None = None
    floor: float | None = None
    max_tokens: int = 64
    wanted: int = 200
    asked: Asked = field(default_factory=Asked)
    cut_off: Asked = field(default_factory=Asked)
    samples: load.Samples | None = None

    def ready(self, served: Served) -> float:
        """Wait for the health route; the seconds it took. Raises Gone, QdcError `gate.not-ready`."""
        limit, ping = self.contract.start_s, self.contract.ping
        return served.wait_ready(
            ping, limit, lambda waited, why: self.steps.report(int(waited), int(limit), f"waiting for {ping}: {why}")
        )

    def answers(self, manifest: bytes | None) -> None:
        """Checks `manifest` and `answers`. Raises Stop where no real answer comes."""
        if manifest is None:
            why = "qdc did not build this image: it has no content manifest"
            self.steps.done(Check("manifest", "not-run", None, why))
        else:
            self.steps.check("manifest", lambda: checks.check_manifest(self.served, manifest))

        def found() -> Check:
            self.subject = checks.discover(self.served, self.subject)
            return checks.check_answers(self.served, self.subject, self.contract)

        if self.steps.check("answers", found).outcome == "fail":
            raise Stop

    def speculation(self) -> None:
        """Checks `repeats` and `acceptance`, and the answers that `lossless` will compare."""
        served, subject, report = self.served, self.subject, self.steps.report
        self.steps.check("repeats", lambda: load.check_repeats(served, subject, self.contract, report))
        if subject.drafts is False:
            return
        more = texts.built_in(max(0, self.wanted - len(self.conversations)))

        def acceptance() -> Check:
            asked = self.conversations or more
            self.asked = checks.ask_greedy(served, subject, asked, self.max_tokens, report, self.contract.answer_s)
            lost = [answer for answer in self.asked.answers if answer.status != 200]
            if lost:
                why = (
                    f"{len(lost)} of {len(self.asked.answers)} greedy answers failed: {lost[0].status} {lost[0].text()}"
                )
                return Check("acceptance", "fail", len(lost), f"{why}. {served.last_words()}")
            return checks.check_acceptance(self.asked, self.replay, floor=self.floor, subject=subject)

        self.steps.check("acceptance", acceptance)
        if any(answer.status == 0 for answer in self.asked.answers):
            raise Stop
        if not self.compares:
            return
        with self.steps.step("lossless", stop=False):
            if self.conversations and more:
                extra = checks.ask_greedy(served, subject, more, self.max_tokens, report)
                self.asked.requests += extra.requests
                self.asked.answers += extra.answers
            self.asked = Asked(self.asked.requests[: self.wanted], self.asked.answers[: self.wanted])
            self.cut_off = checks.ask_to_the_end(served, subject, self.asked)

    def use(self) -> None:
        """Checks `concurrency` and `stays`, and the samples that `runaway` will judge."""
        served, subject, contract = self.served, self.subject, self.contract
        self.steps.check("concurrency", lambda: load.check_concurrency(served, subject, contract, self.steps.report))
        with self.steps.step("runaway", stop=False):
            self.samples = load.ask_samples(served, subject, contract)
        self.steps.check("stays", lambda: load.check_stays(served, contract))

    def compare(self, plain: Served | None) -> None:
        """Checks `runaway` and `lossless`, which need the same target without speculation, as far as it can be had."""
        before: load.Samples | None = None
        if plain is not None and self.samples is not None and not self.steps.has("lossless"):
            with self.steps.step("runaway", stop=False):
                before = load.ask_samples(plain, self.subject, self.contract)
        samples = self.samples
        if samples is not None and not self.steps.has("runaway"):
            self.steps.check("runaway", lambda: load.check_runaway(samples, self.contract, before))
        if self.steps.has("lossless"):
            return
        if self.subject.drafts is False:
            why = "nothing drafts: there is no speculation to compare with"
            self.steps.done(Check("lossless", "pass", None, why))
        elif plain is None:
            why = "how this image is started without speculation is not known: say --without-drafter 'WORDS'"
            self.steps.done(Check("lossless", "undecided", None, why))
        else:
            asked, cut_off, report = self.asked, self.cut_off, self.steps.report
            self.steps.check("lossless", lambda: checks.check_lossless(plain, asked, cut_off, report))
