"""The checks of a running server: it answers, it is lossless, its drafter is accepted as the replay said.

Each check gives one `Check`; what it cannot ask it does not guess. Knows `Served` and the content manifest's
fields, not where the server runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from qdc.core.errors import QdcError
from qdc.gate import texts
from qdc.gate.served import Answer, Served

MIN_PROMPTS = 50
MAX_TIE_SHARE = 0.02
TIE_ULPS = 2
MIN_CUT_OFF = 2
MIN_MEASURED = 20
TOLERANCE = 0.05
SAMPLED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 1, "logprobs": 2}
CUT_OFF_ROOM = range(3, 15)  # tokens left for an answer that shall run into the context's end


@dataclass(frozen=True)
class Check:
    """One line of the report. `outcome`: pass, fail, undecided or not-run."""

    id: str
    outcome: str
    figure: Any
    why: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "outcome": self.outcome, "figure": self.figure, "why": self.why}


@dataclass(frozen=True)
class Subject:
    """What is known of the image before it runs, from its content manifest."""

    model: str
    max_model_len: int
    k: int | None
    """K, or None when nothing drafts."""
    ping: str = "/ping"
    invocations: str = "/invocations"

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Subject:
        """Raises QdcError `gate.manifest` when the manifest does not describe a served model."""
        try:
            serving, arguments = manifest["serving"], manifest["serving"]["arguments"]
            speculates = "--speculative-config" in arguments
            return cls(
                model=serving["served_model_name"],
                max_model_len=int(arguments[arguments.index("--max-model-len") + 1]),
                k=manifest["recipe"]["serve"]["k"] if speculates else None,
                ping=serving["contract"]["ping"],
                invocations=serving["contract"]["invocations"],
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise QdcError(
                "gate.manifest", f"the manifest does not say how it serves: {error!r}", exit_code=4
            ) from error


@dataclass
class Asked:
    """Greedy answers of the speculating server, kept for the comparison with the one that does not speculate."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)


def check_answers(served: Served, subject: Subject) -> Check:
    """Completions (sampled, with log-probabilities), chat and the contract's entry point each answer a token."""
    message = [{"role": "user", "content": "Ann has 3 apples and gets 2 more. How many apples?"}]
    asked = {
        "/v1/completions": {"model": subject.model, "prompt": "Ann has 3 apples", "max_tokens": 8, **SAMPLED},
        "/v1/chat/completions": {"model": subject.model, "messages": message, "max_tokens": 8},
        subject.invocations: {"messages": message, "max_tokens": 8, "thinking": False},
    }
    answered = served.ask([{"method": "POST", "path": path, "body": body} for path, body in asked.items()])
    for path, answer in zip(asked, answered, strict=True):
        if answer.status != 200 or answer.json()["usage"]["completion_tokens"] < 1:
            return Check("answers", "fail", None, f"{path} answered {answer.status}: {answer.text()}")
    return Check("answers", "pass", len(answered), "completions, chat and invocations answer")


def check_manifest(served: Served, expected: bytes) -> Check:
    """GET /manifest gives the very bytes of the manifest in the archive (or of its digest, where that is shown)."""
    answer = served.get("/manifest")
    if answer.status == 200 and answer.body == expected:
        return Check(
            "manifest", "pass", len(expected), "the running server shows the archive's manifest, byte for byte"
        )
    why = f"GET /manifest answered {answer.status} with {len(answer.body)} bytes that are not the archive's manifest"
    return Check("manifest", "fail", len(answer.body), why)


def ask_greedy(
    served: Served,
    subject: Subject,
    conversations: Sequence[texts.Messages],
    max_tokens: int,
    report: Callable[[int, int, str], None],
) -> Asked:
    """Ask all conversations that leave head-room, greedily, and note what the engine's counters did meanwhile.

    Head-room: prompt + max_tokens + K + 1 within max_model_len; nearer to it vLLM drafts nothing for the whole batch
    and counts that as rejected drafts.
    """
    counts = served.ask([texts.tokenize(subject.model, messages) for messages in conversations])
    lengths = [answer.json()["count"] for answer in counts]
    room = subject.max_model_len - max_tokens - (subject.k or 0) - 1
    asked = Asked(prompt_tokens=[length if length <= room else -1 for length in lengths])
    asked.requests = [
        texts.chat(subject.model, messages, max_tokens=max_tokens)
        for messages, length in zip(conversations, lengths, strict=True)
        if length <= room
    ]
    before = served.counters()
    total = len(asked.requests)
    asked.answers = served.ask(asked.requests, report=lambda done: report(done, total, "greedy answers"))
    after = served.counters()
    asked.counters = {key: after[key] - before.get(key, 0.0) for key in after}
    return asked


def ask_to_the_end(served: Served, subject: Subject, asked: Asked) -> Asked:
    """Ask long multi-turn conversations whose answers run into max_model_len; keep those that did."""
    turns = [
        (request["body"]["messages"], text(answer), sum(usage(answer)))
        for request, answer in zip(asked.requests, asked.answers, strict=True)
    ]
    candidates = texts.long_conversations(turns, subject.max_model_len, 80)
    counts = served.ask([texts.tokenize(subject.model, messages) for messages in candidates])
    fitting = [
        (messages, answer.json()["count"])
        for messages, answer in zip(candidates, counts, strict=True)
        if subject.max_model_len - answer.json()["count"] in CUT_OFF_ROOM
    ]
    chosen = fitting[:: max(1, len(fitting) // 6)][:6]
    found = Asked()
    for ignore_eos in (False, True):
        if len(found.requests) >= MIN_CUT_OFF or not chosen:
            break
        requests = [texts.chat(subject.model, messages, ignore_eos=ignore_eos) for messages, _ in chosen]
        for request, answer in zip(requests, served.ask(requests, concurrency=2), strict=True):
            if answer.status != 200 or sum(usage(answer)) >= subject.max_model_len:
                found.requests.append(request)
                found.answers.append(answer)
    return found


def check_lossless(plain: Served, asked: Asked, cut_off: Asked, report: Callable[[int, int, str], None]) -> Check:
    """The same greedy tokens from `plain`, a server of the same target that does not speculate.

    A prompt whose first difference is a tie (plain's logit of the other token is at most 2 BF16 steps below its
    highest) is counted as such; at most 2 % of the prompts may be.
    """
    answers = [*asked.answers, *cut_off.answers]
    requests = [texts.with_logits(request) for request in (*asked.requests, *cut_off.requests)]
    total = len(requests)
    if total - len(cut_off.requests) < MIN_PROMPTS or len(cut_off.requests) < MIN_CUT_OFF:
        figure = {"prompts": total, "cut_off": len(cut_off.requests)}
        why = f"{MIN_PROMPTS} prompts with head-room and {MIN_CUT_OFF} up to max_model_len are needed"
        return Check("lossless", "undecided", figure, why)
    compared = plain.ask(requests, report=lambda done: report(done, total, "the same without speculation"))
    ties: list[int] = []
    wrong: list[str] = []
    for number, (with_drafter, without) in enumerate(zip(answers, compared, strict=True)):
        verdict = difference(with_drafter, without)
        if verdict == "tie":
            ties.append(number)
        elif verdict is not None:
            wrong.append(f"prompt {number}: {verdict}")
    figure = {
        "prompts": total,
        "equal": total - len(ties) - len(wrong),
        "ties": len(ties),
        "different": len(wrong),
        "cut_off": len(cut_off.requests),
    }
    if wrong:
        return Check("lossless", "fail", figure, f"other text than without speculation: {wrong[0]}")
    if len(ties) > MAX_TIE_SHARE * total:
        return Check("lossless", "fail", figure, f"{len(ties)} of {total} prompts differ at a tie, more than 2 %")
    counted = f"ties counted (prompts {', '.join(map(str, ties))})" if ties else "ties counted"
    return Check("lossless", "pass", figure, f"greedy text is the same with and without speculation, {counted}")


def difference(with_drafter: Answer, without: Answer) -> str | None:
    """None when both have the same tokens; "tie" when they first differ at a tie; else what differs."""
    if with_drafter.status != 200 or without.status != 200:
        failed = with_drafter if with_drafter.status != 200 else without
        return f"status {failed.status}: {failed.text()}"
    ours, theirs = token_ids(with_drafter), token_ids(without)
    if ours == theirs:
        return None
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"{len(ours)} tokens against {len(theirs)}, the shorter a beginning of the longer"
    top = without.json()["choices"][0]["logprobs"]["content"][place]["top_logprobs"]
    logits = {int(entry["token"].removeprefix("token_id:")): float(entry["logprob"]) for entry in top}
    if ours[place] not in logits or theirs[place] not in logits:
        return f"token {place} is {ours[place]}, not one of the {len(logits)} highest without speculation"
    gap = bf16_steps(logits[ours[place]], logits[theirs[place]])
    return "tie" if gap <= TIE_ULPS else f"token {place} differs by {gap:.1f} BF16 steps of the logit"


def bf16_steps(a: float, b: float) -> float:
    """|a - b| in units of the last place of BF16 (8 significant bits) at the larger of the two."""
    largest = max(abs(a), abs(b))
    return 0.0 if largest == 0.0 else abs(a - b) / 2.0 ** (math.floor(math.log2(largest)) - 7)


def check_acceptance(asked: Asked, replay: Sequence[Mapping[str, int]] | None) -> Check:
    """Acceptance length (accepted + drafts) / drafts by the engine's counters, beside the replay's on the same prompts.

    `replay`: accepted and drafts for each conversation given to `ask_greedy`, in its order.
    """
    drafts, accepted = asked.counters.get("drafts", 0.0), asked.counters.get("accepted", 0.0)
    if not drafts:
        return Check("acceptance", "fail", None, "the engine counted no drafts: it does not speculate")
    served = (accepted + drafts) / drafts
    figure: dict[str, Any] = {"served": round(served, 4), "drafts": int(drafts), "prompts": len(asked.requests)}
    if accepted == 0:
        return Check("acceptance", "fail", figure, "not one draft token was accepted")
    if replay is None:
        return Check("acceptance", "pass", figure, "drafts are accepted; there is no replay to compare with")
    kept = [row for row, length in zip(replay, asked.prompt_tokens, strict=True) if length >= 0]
    replayed = sum(row["drafts"] for row in kept)
    if len(kept) < MIN_MEASURED or not replayed:
        why = f"only {len(kept)} prompts leave head-room in max_model_len; {MIN_MEASURED} are needed"
        return Check("acceptance", "undecided", figure, why)
    figure["replay"] = round((sum(row["accepted"] for row in kept) + replayed) / replayed, 4)
    figure["ratio"] = round(served / figure["replay"], 4)
    outcome = "pass" if abs(figure["ratio"] - 1) <= TOLERANCE else "fail"
    return Check("acceptance", outcome, figure, f"served against replay on the same prompts, {TOLERANCE:.0%} allowed")


def run_pair(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Both at once; the first exception is raised when both have ended."""
    with ThreadPoolExecutor(2) as pool:
        futures = pool.submit(first), pool.submit(second)
        return futures[0].result(), futures[1].result()


def token_ids(answer: Answer) -> list[int]:
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def text(answer: Answer) -> str:
    content: str = answer.json()["choices"][0]["message"]["content"] or ""
    return content


def usage(answer: Answer) -> tuple[int, int]:
    """Prompt tokens and completion tokens."""
    counted = answer.json()["usage"]
    return counted["prompt_tokens"], counted["completion_tokens"]
