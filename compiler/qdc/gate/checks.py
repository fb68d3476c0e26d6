"""The checks of a running server's answers: its routes, its drafter, the same text with and without speculation.

Each check gives one `Check`; what it cannot ask it does not guess. An answer of another shape than the routes' is a
fault of the server (`Unusable`), which the caller makes the check's failure. Knows `Served`, `Subject` and
`Contract`, not where the server runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qdc.gate import texts
from qdc.gate.contracts import DEFAULT, Contract, Subject, named
from qdc.gate.report import Check
from qdc.gate.served import Answer, Served, Unusable

MIN_PROMPTS = 50
MAX_TIE_SHARE = 0.02
_OWN_PROMPTS = "--ask FILE, or a recipe with evaluate.acceptance.data"
TIE_ULPS = 2
MIN_CUT_OFF = 2
MIN_MEASURED = 20
MIN_DRAFTS = 100
ANSWER_S = 120.0
NO_GAIN = 1.05
"""Acceptance length up to which drafts count for nothing: the bonus token alone makes 1.0."""
PARTS = 10
T_95 = 2.262
"""Student's t of a 95 % interval from PARTS parts."""
TOLERANCE = 0.05
SAMPLED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 1, "logprobs": 2}
CUT_OFF_ROOM = range(3, 15)  # tokens left for an answer that shall run into the context's end
QUESTION: texts.Messages = [{"role": "user", "content": "Ann has 3 apples and gets 2 more. How many apples?"}]


@dataclass
class Asked:
    """Greedy answers of the speculating server, kept for the comparison with the one that does not speculate.

    `prompt_tokens`: of each conversation; -1 where it leaves no head-room and was not asked. `parts`: what the
    engine's counters (`drafts`, `accepted`) did in each of the parts in which the requests were sent.
    """

    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


def discover(served: Served, subject: Subject) -> Subject:
    """`subject` with what a server of /v1/models and /metrics says of itself, where no manifest said it.

    Counters of drafts are an engine's that drafts, whatever its arguments: a target's own configuration can name a
    drafter.
    """
    if subject.model is not None:
        return subject
    if subject.drafts is not True and served.counters():
        subject = replace(subject, drafts=True, why="/metrics counts drafts")
    answer = served.get("/v1/models")
    try:
        name, told = answer.part("data", 0, "id"), answer.part("data", 0)
    except Unusable:
        return subject
    length = told.get("max_model_len") if isinstance(told, dict) else None
    return replace(subject, model=str(name), max_model_len=length if type(length) is int else subject.max_model_len)


def check_answers(served: Served, subject: Subject, contract: Contract | None = None) -> Check:
    """Each route of the contract answers a token: sampled, chat, and the entry point with both kinds of body.

    The entry point and the chat route must read the same chat alike.
    """
    contract = contract or named(DEFAULT)
    model = {} if subject.model is None else {"model": subject.model}
    chat, text = {"messages": QUESTION, "max_tokens": 8}, {"prompt": "Ann has 3 apples", "max_tokens": 8}
    asked: list[tuple[str, dict[str, Any]]] = []
    if contract.completions:
        asked.append((contract.completions, {**model, **text, **SAMPLED}))
    if contract.chat:
        asked.append((contract.chat, {**model, **chat}))
    if contract.invocations:
        asked += [(contract.invocations, chat), (contract.invocations, text)]
        asked.append((contract.invocations, {**chat, "thinking": False}))
    answered = served.ask(
        [{"method": "POST", "path": path, "body": body} for path, body in asked], timeout_s=contract.answer_s
    )
    for (path, _), answer in zip(asked, answered, strict=True):
        if answer.status != 200:
            said = f"answered {answer.status}" if answer.status else "did not answer"
            return Check("answers", "fail", None, f"{path} {said}: {answer.text()}. {served.last_words()}")
        answer.words()
        if answer.tokens()[1] < 1:
            return Check("answers", "fail", None, f"{path} answered without a token: {answer.text()}")
    if contract.chat and contract.invocations:
        place = 1 if contract.completions else 0
        lengths = [answered[place].tokens()[0], answered[place + 1].tokens()[0]]
        if lengths[0] != lengths[1]:
            why = (
                f"a chat is {lengths[0]} tokens on {contract.chat} and {lengths[1]} on {contract.invocations}: they "
                "render it differently, so two tests would meet two models. Put the default into the chat template"
            )
            return Check("answers", "fail", lengths, why)
    routes = ", ".join(dict.fromkeys(path for path, _ in asked))
    return Check("answers", "pass", len(answered), f"real answers from {routes}")


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
    timeout_s: float = ANSWER_S,
) -> Asked:
    """Ask all conversations that leave head-room, greedily, and note what the engine's counters did meanwhile.

    A server that counts no tokens for us (/tokenize) is asked them all. One that no longer answers is asked no more:
    `requests` are then those up to there.
    """
    counts = served.ask([texts.tokenize(subject.model, messages) for messages in conversations])
    lengths = [answer.count() if answer.status == 200 else 0 for answer in counts]
    fits = [subject.room(length, max_tokens) >= max_tokens for length in lengths]
    asked = Asked(prompt_tokens=[length if ok else -1 for length, ok in zip(lengths, fits, strict=True)])
    asked.requests = [
        texts.chat(subject.model, messages, subject.chat_path, max_tokens=max_tokens)
        for messages, ok in zip(conversations, fits, strict=True)
        if ok
    ]
    total, size = len(asked.requests), -(-len(asked.requests) // PARTS) or 1
    before = served.counters()
    for start in range(0, total, size):
        asked.answers += served.ask(
            asked.requests[start : start + size],
            timeout_s=timeout_s,
            report=lambda done, start=start: report(start + done, total, "greedy answers"),  # type: ignore[misc]
        )
        after = served.counters()
        asked.parts.append({key: after[key] - before.get(key, 0.0) for key in after})
        before = after
        if _silent(asked.answers[start:]):
            break
    asked.requests = asked.requests[: len(asked.answers)]
    return asked


def _silent(answers: Sequence[Answer]) -> bool:
    """Whether one of them never came."""
    return any(answer.status == 0 for answer in answers)


def ask_to_the_end(served: Served, subject: Subject, asked: Asked) -> Asked:
    """Ask long multi-turn conversations whose answers run into max_model_len; keep those that did."""
    limit = subject.max_model_len
    if limit is None:
        return Asked()
    turns = [
        (request["body"]["messages"], answer.words(), sum(answer.tokens()))
        for request, answer in zip(asked.requests, asked.answers, strict=True)
        if answer.status == 200
    ]
    candidates = texts.long_conversations(turns, limit, 80) if turns else []
    counts = served.ask([texts.tokenize(subject.model, messages) for messages in candidates])
    fitting = [
        messages
        for messages, answer in zip(candidates, counts, strict=True)
        if answer.status == 200 and limit - answer.count() in CUT_OFF_ROOM
    ]
    chosen = fitting[:: max(1, len(fitting) // 6)][:6]
    found = Asked()
    for ignore_eos in (False, True):
        if len(found.requests) >= MIN_CUT_OFF or not chosen:
            break
        requests = [
            texts.chat(subject.model, messages, subject.chat_path, ignore_eos=ignore_eos) for messages in chosen
        ]
        for request, answer in zip(requests, served.ask(requests, concurrency=2), strict=True):
            if answer.status != 200 or sum(answer.tokens()) >= limit:
                found.requests.append(request)
                found.answers.append(answer)
    return found


def check_lossless(plain: Served, asked: Asked, cut_off: Asked, report: Callable[[int, int, str], None]) -> Check:
    """The same greedy tokens from `plain`, a server of the same target that does not speculate.

    A prompt whose first difference is a tie (plain's logit of the other token is at most 2 BF16 steps below its
    highest) is counted as such; with more than 2 % of them nothing is decided.
    """
    answers = [*asked.answers, *cut_off.answers]
    requests = [texts.with_logits(request) for request in (*asked.requests, *cut_off.requests)]
    total = len(requests)
    if total - len(cut_off.requests) < MIN_PROMPTS or len(cut_off.requests) < MIN_CUT_OFF:
        figure = {"prompts": total, "cut_off": len(cut_off.requests)}
        why = f"{MIN_PROMPTS} prompts with head-room and {MIN_CUT_OFF} up to max_model_len are needed"
        return Check("lossless", "undecided", figure, why)
    compared: list[Answer] = []
    while len(compared) < total and not _silent(compared):
        part = requests[len(compared) : len(compared) + total // PARTS + 1]
        compared += plain.ask(part, timeout_s=ANSWER_S)
        report(len(compared), total, "the same without speculation")
    ties: list[int] = []
    wrong: list[str] = []
    for number, (with_drafter, without) in enumerate(zip(answers, compared, strict=False)):
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
        why = f"{len(ties)} of {total} prompts differ at a tie, more than 2 %: too many to tell a fault from a tie"
        return Check("lossless", "undecided", figure, f"{why}. Ask prompts of which the model is sure: {_OWN_PROMPTS}")
    counted = f"ties counted (prompts {', '.join(map(str, ties))})" if ties else "ties counted"
    return Check("lossless", "pass", figure, f"greedy text is the same with and without speculation, {counted}")


def difference(with_drafter: Answer, without: Answer) -> str | None:
    """None when both have the same tokens; "tie" when they first differ at a tie; else what differs."""
    if with_drafter.status != 200 or without.status != 200:
        failed = with_drafter if with_drafter.status != 200 else without
        return f"status {failed.status}: {failed.text()}"
    ours, theirs = with_drafter.token_ids(), without.token_ids()
    if ours == theirs:
        return None
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"{len(ours)} tokens against {len(theirs)}, the shorter a beginning of the longer"
    top = without.part("choices", 0, "logprobs", "content", place, "top_logprobs")
    try:
        logits = {int(entry["token"].removeprefix("token_id:")): float(entry["logprob"]) for entry in top}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unusable(f"log-probabilities of another shape: {error!r}") from error
    if ours[place] not in logits or theirs[place] not in logits:
        return f"token {place} is {ours[place]}, not one of the {len(logits)} highest without speculation"
    gap = bf16_steps(logits[ours[place]], logits[theirs[place]])
    return "tie" if gap <= TIE_ULPS else f"token {place} differs by {gap:.1f} BF16 steps of the logit"


def bf16_steps(a: float, b: float) -> float:
    """|a - b| in units of the last place of BF16 (8 significant bits) at the larger of the two."""
    largest = max(abs(a), abs(b))
    return 0.0 if largest == 0.0 else abs(a - b) / 2.0 ** (math.floor(math.log2(largest)) - 7)


def acceptance_length(counters: Mapping[str, float]) -> float | None:
    """(accepted + drafts) / drafts; None when nothing was drafted."""
    drafts = counters.get("drafts", 0.0)
    return (counters.get("accepted", 0.0) + drafts) / drafts if drafts else None


def half_width(parts: Sequence[Mapping[str, float]], length: float) -> float | None:
    """Half of the 95 % interval of an acceptance length, from how its parts vary; None from fewer than PARTS."""
    drafts = [part.get("drafts", 0.0) for part in parts]
    if len(parts) < PARTS or not all(drafts):
        return None
    rests = [part["accepted"] - (length - 1) * number for part, number in zip(parts, drafts, strict=True)]
    spread = math.sqrt(len(parts) / (len(parts) - 1) * sum(rest * rest for rest in rests))
    return T_95 * spread / sum(drafts)


def check_acceptance(
    asked: Asked,
    replay: Sequence[Mapping[str, int]] | None,
    *,
    floor: float | None = None,
    subject: Subject | None = None,
) -> Check:
    """Acceptance length by the engine's counters: not 1.0, not below `floor`, and as the replay on the same prompts.

    `replay`: accepted and drafts for each conversation given to `ask_greedy`, in its order.
    """
    counted = any("drafts" in part for part in asked.parts)
    counters = {key: sum(part.get(key, 0.0) for part in asked.parts) for key in ("drafts", "accepted")}
    served = acceptance_length(counters)
    if served is None:
        if subject is not None and not subject.counts and not counted:
            return Check("acceptance", "undecided", None, uncounted(subject))
        return Check("acceptance", "fail", None, "the engine counted no drafts: it does not speculate")
    figure: dict[str, Any] = {
        "served": round(served, 4),
        "drafts": int(counters["drafts"]),
        "prompts": len(asked.requests),
    }
    half = half_width(asked.parts, served)
    if half is not None:
        figure["95 %"] = f"± {half:.3f}"
    if counters["accepted"] == 0:
        return Check("acceptance", "fail", figure, "acceptance length is 1.0: not one draft token was accepted")
    if served <= NO_GAIN:
        enough = counters["drafts"] >= MIN_DRAFTS
        why = f"acceptance length is 1.0 to {NO_GAIN}: the drafter's weights were not loaded, or not as they are meant"
        return Check("acceptance", "fail" if enough else "undecided", figure, why)
    if floor is not None:
        figure["floor"] = floor
        if served + (half or 0.0) < floor:
            return Check("acceptance", "fail", figure, f"{served:.3f} is under the recipe's floor {floor:g}")
    found = _against_replay(served, asked, replay, figure)
    if floor is not None and served < floor and found.outcome == "pass":
        return Check("acceptance", "undecided", figure, f"the floor {floor:g} lies inside the interval")
    return found


def uncounted(subject: Subject) -> str:
    """Why a server without counters decides nothing of its drafter."""
    says = "it is started with a drafter" if subject.drafts else "whether it speculates cannot be told"
    return f"/metrics shows no counters of speculation: {says}{f' ({subject.why})' if subject.why else ''}"


def _against_replay(
    served: float, asked: Asked, replay: Sequence[Mapping[str, int]] | None, figure: dict[str, Any]
) -> Check:
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
