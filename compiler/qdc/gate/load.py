"""The checks of a server under use: requests in a row, all at once, answers that do not end, the same server after it.

Limits are the contract's. Knows `Served`, `Subject` and `Contract`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qdc.gate import texts
from qdc.gate.checks import acceptance_length, uncounted
from qdc.gate.contracts import Contract, Subject
from qdc.gate.report import Check
from qdc.gate.served import Answer, Served, Unusable

ROUNDS = 3
IN_A_ROUND = 4
DECAY = 0.8
"""Least acceptance of the last round, as a part of the first's."""
MIN_DRAFTS = 10
ROUND_TOKENS = 64
SAMPLES = 8
SHORT_TOKENS = 512
LEAST_ROOM = 8
LONGEST_LOOP = 20
LOOPED = 4
"""Times that the end of an answer says the same up to LONGEST_LOOP words before it counts as a loop."""
ALLOWED_CUT = 0.1
HALF = 0.5

Report = Callable[[int, int, str], None]


def check_repeats(served: Served, subject: Subject, contract: Contract, report: Report) -> Check:
    """The same requests again and again, one at a time: state that leaks between requests makes acceptance decay."""
    requests = _requests(served, subject, contract, texts.built_in(2 * IN_A_ROUND), IN_A_ROUND, ROUND_TOKENS)
    rounds: list[float | None] = []
    drafts: list[float] = []
    for number in range(ROUNDS):
        before = served.counters()
        answers = served.ask(requests, concurrency=1, timeout_s=contract.answer_s)
        report(number + 1, ROUNDS, "requests in a row")
        for place, answer in enumerate(answers):
            if answer.status != 200:
                why = f"request {number * IN_A_ROUND + place + 1} in a row: {_failed(answer, served)}"
                return Check("repeats", "fail", number * IN_A_ROUND + place, why)
        after = served.counters()
        step = {key: after[key] - before.get(key, 0.0) for key in after}
        rounds.append(acceptance_length(step))
        drafts.append(step.get("drafts", 0.0))
    asked = ROUNDS * IN_A_ROUND
    known = [length for length in rounds if length is not None]
    if len(known) < ROUNDS:
        if subject.drafts is False:
            return Check("repeats", "pass", asked, f"{asked} requests in a row are answered; nothing drafts")
        why = f"{asked} requests in a row are answered. {uncounted(subject)}"
        return Check("repeats", "undecided", asked, why)
    figure = {"requests": asked, "acceptance": ", ".join(f"{length:.2f}" for length in known)}
    if min(drafts) < MIN_DRAFTS:
        return Check("repeats", "undecided", figure, f"fewer than {MIN_DRAFTS} drafts in {IN_A_ROUND} requests")
    if known[-1] < DECAY * known[0]:
        why = f"acceptance decays from {known[0]:.2f} to {known[-1]:.2f}: state leaks from request to request"
        return Check("repeats", "fail", figure, why)
    return Check("repeats", "pass", figure, f"{asked} requests in a row, the same {IN_A_ROUND} each round")


def check_concurrency(served: Served, subject: Subject, contract: Contract, report: Report) -> Check:
    """The contract's number of long answers at once, each within its time."""
    number = contract.at_once
    candidates = [*texts.long_answers(number), *texts.built_in(number)]
    requests = _requests(served, subject, contract, candidates, number, contract.answer_tokens, thinking=True)
    answers = served.ask(
        requests,
        concurrency=number,
        timeout_s=2 * contract.answer_s,
        report=lambda done: report(done, number, f"answers of {number} at once"),
    )
    for place, answer in enumerate(answers):
        if answer.status != 200:
            return Check(
                "concurrency", "fail", place, f"of {number} at once, number {place + 1}: {_failed(answer, served)}"
            )
    slowest = max(answer.seconds for answer in answers)
    figure = {
        "at once": number,
        "slowest s": round(slowest, 2),
        "longest tokens": max(answer.tokens()[1] for answer in answers),
    }
    if slowest > contract.answer_s:
        late = sum(answer.seconds > contract.answer_s for answer in answers)
        why = f"{late} of {number} answers at once take longer than {contract.answer_s:g} s"
        return Check("concurrency", "fail", figure, why)
    return Check("concurrency", "pass", figure, f"each within {contract.answer_s:g} s")


@dataclass
class Samples:
    """Answers that a working model ends by itself."""

    answers: list[Answer]
    loops: list[str | None]

    @property
    def cut(self) -> float:
        """Share of answers that ended at their limit."""
        return sum(answer.cut() for answer in self.answers) / len(self.answers)

    @property
    def looped(self) -> list[str]:
        return [loop for loop in self.loops if loop is not None]


def ask_samples(served: Served, subject: Subject, contract: Contract) -> Samples:
    """Short questions with room for a long answer. Raises Unusable for what is none."""
    requests = _requests(served, subject, contract, texts.built_in(2 * SAMPLES), SAMPLES, SHORT_TOKENS, thinking=False)
    answers: list[Answer] = []
    while len(answers) < len(requests) and all(answer.status == 200 for answer in answers):
        answers += served.ask([requests[len(answers)]], timeout_s=2 * contract.answer_s)
    return Samples(answers, [loop(answer.words()) if answer.status == 200 else None for answer in answers])


def check_runaway(samples: Samples, contract: Contract, plain: Samples | None) -> Check:
    """Answers end by themselves, do not loop, and take no longer than the contract allows.

    Against the same target without speculation where it can be asked (`plain`): a model that is cut or loops there
    too is none of the drafter's making, and a loop alone there is a matter of quality.
    """
    for place, answer in enumerate(samples.answers):
        if answer.status != 200:
            said = answer.text() if answer.status == 0 else f"answered {answer.status}: {answer.text()}"
            return Check("runaway", "fail", place, f"sample {place + 1}: {said}")
    figure: dict[str, Any] = {
        "samples": len(samples.answers),
        "cut": samples.cut,
        "loops": len(samples.looped),
        "slowest s": round(max(answer.seconds for answer in samples.answers), 2),
    }
    if plain is not None:
        figure["cut without speculation"] = plain.cut
    if figure["slowest s"] > contract.answer_s:
        return Check("runaway", "fail", figure, f"an answer takes longer than {contract.answer_s:g} s")
    if len(samples.looped) > (len(plain.looped) if plain else 0):
        return Check(
            "runaway", "fail", figure, f"{len(samples.looped)} answers loop: `{samples.looped[0]}` again and again"
        )
    if plain is not None and samples.cut > plain.cut + ALLOWED_CUT:
        why = f"{samples.cut:.0%} of the answers run to their limit, without speculation {plain.cut:.0%}"
        return Check("runaway", "fail", figure, why)
    if plain is None and samples.cut > HALF:
        why = f"{samples.cut:.0%} of the answers to short questions run to their limit; nothing to compare with"
        return Check("runaway", "undecided", figure, why)
    return Check("runaway", "pass", figure, "answers end by themselves")


def loop(text: str) -> str | None:
    """What the end of `text` says at least LOOPED times over, in up to LONGEST_LOOP words (or as one character)."""
    words = text.split()
    for length in range(1, LONGEST_LOOP + 1):
        times = LOOPED if length > 1 else 2 * LOOPED
        end = words[-length:]
        if len(words) >= length * times and all(
            words[len(words) - (n + 1) * length : len(words) - n * length] == end for n in range(times)
        ):
            return " ".join(end)[:60]
    last = text.rstrip()[-4 * LOOPED * LOOPED :]
    return last[-1] if len(last) == 4 * LOOPED * LOOPED and len(set(last)) == 1 else None


def check_stays(served: Served, contract: Contract) -> Check:
    """The same server is still well."""
    answer = served.get(contract.ping)
    if answer.status == 200:
        return Check("stays", "pass", None, f"{contract.ping} still answers 200")
    return Check("stays", "fail", None, f"{contract.ping} after all requests: {_failed(answer, served)}")


def _requests(
    served: Served,
    subject: Subject,
    contract: Contract,
    candidates: list[texts.Messages],
    wanted: int,
    max_tokens: int,
    thinking: bool | None = None,
) -> list[dict[str, Any]]:
    """Greedy chats of the first `wanted` candidates that leave room for an answer, up to `max_tokens` long.

    `thinking` goes the contract's way where it has one. Where the server counts no tokens (/tokenize), a prompt is
    taken to have one for each two bytes, and some for the template.
    """
    more: dict[str, Any] = {}
    if thinking is None:
        path = subject.chat_path
    elif contract.invocations:
        path, more = contract.invocations, {"thinking": thinking}
    else:
        path, more = subject.chat_path, {"chat_template_kwargs": {"enable_thinking": thinking}}
    counts = served.ask([texts.tokenize(subject.model, messages) for messages in candidates])
    found: list[dict[str, Any]] = []
    for messages, counted in zip(candidates, counts, strict=True):
        guess = len(messages[-1]["content"].encode()) // 2 + 32
        room = subject.room(counted.count() if counted.status == 200 else guess, max_tokens)
        if room >= LEAST_ROOM and len(found) < wanted:
            found.append(texts.chat(subject.model, messages, path, max_tokens=room, **more))
    if not found:
        raise Unusable(f"no request leaves {LEAST_ROOM} tokens for an answer in {subject.max_model_len} tokens")
    return [found[number % len(found)] for number in range(wanted)]


def _failed(answer: Answer, served: Served) -> str:
    said = f"answered {answer.status}: {answer.text()}" if answer.status else answer.text()
    return f"{said}. {served.last_words()}".strip()
