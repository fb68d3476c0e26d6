"""The gate's checks of a running server, against a stand-in engine on this machine, right or wrong as told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdc.gate import checks, client, load, texts
from qdc.gate.checks import Asked
from qdc.gate.contracts import Contract, Subject, named
from qdc.gate.host import PipeStream, free_port
from qdc.gate.report import Check
from qdc.gate.served import Answer, Gone, Served, Unusable

STUB = Path(__file__).with_name("stub_engine.py")
CONTRACT = named("adaptfm").limited(start_s=10, answer_s=0.5)
SUBJECT = Subject(model="stub", max_model_len=256, k=3, drafts=True, counts=True)


def silent(done: int, total: int, note: str) -> None: ...


@contextmanager
def server(folder: Path, *arguments: str, **behaviour: Any) -> Iterator[Served]:
    """A stand-in engine on a free loopback port, and the gate's client beside it."""
    port = free_port()
    told = folder / f"behaviour-{port}.json"
    told.write_text(json.dumps({"port": port, "pings_before_ready": 0, **behaviour}))
    command = [sys.executable, str(STUB), "serve", *arguments]
    with ExitStack() as stack:
        engine = subprocess.Popen(command, env={"STUB_BEHAVIOUR": str(told)}, stdout=subprocess.PIPE)
        stack.callback(engine.wait)
        stack.callback(engine.kill)
        assert engine.stdout is not None and b"listening" in engine.stdout.readline()
        asking = subprocess.Popen(
            [sys.executable, "-u", client.__file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(asking.wait)
        stack.callback(asking.kill)
        yield Served(PipeStream(asking), lambda: "its last words")


Make = Callable[[Served], Check]
MAKE: dict[str, Make] = {
    "answers": lambda served: checks.check_answers(served, SUBJECT, CONTRACT),
    "repeats": lambda served: load.check_repeats(served, SUBJECT, CONTRACT, silent),
    "concurrency": lambda served: load.check_concurrency(served, SUBJECT, CONTRACT, silent),
    "runaway": lambda served: load.check_runaway(load.ask_samples(served, SUBJECT, CONTRACT), CONTRACT, None),
    "stays": lambda served: load.check_stays(served, CONTRACT),
    "acceptance": lambda served: checks.check_acceptance(
        checks.ask_greedy(served, SUBJECT, texts.built_in(60), 32, silent), None, floor=2.0, subject=SUBJECT
    ),
}


def test_a_good_server_passes_every_check(tmp_path: Path) -> None:
    with server(tmp_path) as served:
        found = {id: make(served) for id, make in MAKE.items()}
    assert {id: check.outcome for id, check in found.items()} == dict.fromkeys(MAKE, "pass"), found
    assert found["repeats"].figure == {"requests": 12, "acceptance": "3.00, 3.00, 3.00"}
    assert found["concurrency"].figure["at once"] == 8
    assert found["acceptance"].figure["served"] == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize(
    ("behaviour", "id", "outcome", "why"),
    [
        ({"decay": 0.9}, "repeats", "fail", "decays from"),
        ({"decay": 0.999}, "repeats", "pass", "in a row"),
        ({"metrics": False}, "repeats", "undecided", "no counters"),
        ({"accepted": 0}, "acceptance", "fail", "1.0"),
        ({"accepted": 0.04}, "acceptance", "fail", "1.0 to 1.05"),
        ({"accepted": 0.5}, "acceptance", "fail", "under the recipe's floor 2"),
        ({"metrics": False}, "acceptance", "fail", "no drafts"),
        ({"runaway": True}, "runaway", "fail", "again and again"),
        ({"slow_s": 0.1}, "concurrency", "fail", "take longer than 0.5 s"),
        ({"slow_s": 0.6}, "runaway", "fail", "longer than 0.5 s"),
        ({"ping": 500}, "stays", "fail", "answered 500"),
        ({"status": 503}, "answers", "fail", "answered 503"),
        ({"garbage": "drip"}, "answers", "fail", "no whole answer within 0.5 s"),
        ({"garbage": "endless"}, "answers", "fail", "did not answer"),
        ({"garbage": "http"}, "answers", "fail", "did not answer"),
        ({"thinks_on_invocations": True}, "answers", "fail", "render it differently"),
    ],
)
def test_a_wrong_server_is_told(tmp_path: Path, behaviour: dict[str, Any], id: str, outcome: str, why: str) -> None:
    with server(tmp_path, **behaviour) as served:
        check = MAKE[id](served)
    assert (check.id, check.outcome) == (id, outcome) and why in check.why, check


@pytest.mark.parametrize("garbage", ["text", "shape"])
@pytest.mark.parametrize("id", ["answers", "concurrency", "runaway"])
def test_answers_of_another_shape_are_the_servers_fault(tmp_path: Path, garbage: str, id: str) -> None:
    with server(tmp_path, garbage=garbage) as served, pytest.raises(Unusable):
        MAKE[id](served)


def test_an_engine_that_dies_in_an_answer_is_told(tmp_path: Path) -> None:
    with server(tmp_path, crash_at=5) as served:
        check = MAKE["repeats"](served)
    assert check.outcome == "fail" and "request 6 in a row" in check.why and "its last words" in check.why


def test_a_client_that_ends_is_a_server_that_is_gone(tmp_path: Path) -> None:
    with server(tmp_path) as served:
        assert isinstance(served.stream, PipeStream)
        served.stream.process.kill()
        with pytest.raises(Gone, match="its last words"):
            served.get("/ping")


def test_a_server_that_hangs_in_ping_is_given_up_in_time(tmp_path: Path) -> None:
    with server(tmp_path, ping="hang") as served:
        started = time.monotonic()
        with pytest.raises(Exception, match=r"/ping did not answer within \d+ s"):
            served.wait_ready("/ping", 1.0, lambda waited, why: None)
        assert time.monotonic() - started < 10


def test_a_server_on_another_port_is_found(tmp_path: Path) -> None:
    with server(tmp_path) as served:
        ports = served.ask([{"method": "LISTENING", "path": ""}])[0].json()
        assert ports and all(type(port) is int for port in ports)


def test_what_a_server_says_of_itself_completes_what_is_known(tmp_path: Path) -> None:
    with server(tmp_path, model="other") as served:
        found = checks.discover(served, Subject(drafts=False, why="the bytes say none"))
    assert (found.model, found.max_model_len, found.drafts) == ("other", 256, True), "its counters say that it drafts"
    with server(tmp_path, model="other", metrics=False) as served:
        assert checks.discover(served, Subject()).drafts is None
    assert checks.discover(Served(PipeStream.__new__(PipeStream)), SUBJECT) == SUBJECT


def test_the_same_text_is_compared_and_another_is_found(tmp_path: Path) -> None:
    def compared(**behaviour: Any) -> Check:
        with server(tmp_path, **behaviour) as served, server(tmp_path, "--without-drafter", **behaviour) as plain:
            asked = checks.ask_greedy(served, SUBJECT, texts.built_in(60), 32, silent)
            cut_off = checks.ask_to_the_end(served, SUBJECT, asked)
            return checks.check_lossless(plain, asked, cut_off, silent)

    assert compared().outcome == "pass"
    wrong = compared(wrong=True)
    assert wrong.outcome == "fail" and "other text than without speculation" in wrong.why


def test_without_its_own_routes_text_is_asked_and_lossless_is_undecided(tmp_path: Path) -> None:
    with server(tmp_path, own_routes=False) as served:
        asked = checks.ask_greedy(served, SUBJECT, texts.built_in(60), 32, silent)
        assert len(asked.answers) == 60
        cut_off = checks.ask_to_the_end(served, SUBJECT, asked)
        assert checks.check_lossless(served, asked, cut_off, silent).outcome == "undecided"


def test_a_runaway_without_speculation_too_is_not_the_drafters() -> None:
    def samples(cut: int, loops: int) -> load.Samples:
        answers = [
            Answer(200, json.dumps({"choices": [{"finish_reason": "length" if n < cut else "stop"}]}).encode(), 0.1)
            for n in range(8)
        ]
        return load.Samples(answers, ["a b" if n < loops else None for n in range(8)])

    def judged(ours: load.Samples, plain: load.Samples | None) -> str:
        return load.check_runaway(ours, CONTRACT, plain).outcome

    assert judged(samples(8, 0), samples(8, 0)) == "pass"
    assert judged(samples(3, 0), samples(0, 0)) == "fail"
    assert judged(samples(8, 0), None) == "undecided"
    assert judged(samples(1, 1), samples(1, 0)) == "fail"
    assert judged(samples(1, 1), samples(1, 1)) == "pass"


# Acceptance from counters


def parts(values: list[tuple[float, float]]) -> Asked:
    return Asked(parts=[{"drafts": drafts, "accepted": accepted} for drafts, accepted in values])


@pytest.mark.parametrize(
    ("values", "floor", "outcome"),
    [
        ([(100, 200)] * 10, 3.0, "pass"),
        ([(100, 200)] * 10, 3.01, "fail"),
        ([(100, 150), (100, 250)] * 5, 3.1, "undecided"),
        ([(100, 150), (100, 250)] * 5, 3.9, "fail"),
        ([(9, 0)], None, "fail"),
        ([(90, 3)], None, "undecided"),
        ([(110, 3)], None, "fail"),
        ([], None, "fail"),
    ],
)
def test_acceptance_against_its_floor(values: list[tuple[float, float]], floor: float | None, outcome: str) -> None:
    assert checks.check_acceptance(parts(values), None, floor=floor, subject=SUBJECT).outcome == outcome


def test_counters_that_nobody_shows_decide_nothing_of_an_unknown_image() -> None:
    for drafts, why in ((None, "cannot be told (/srv/start: as computed)"), (True, "it is started with a drafter")):
        subject = Subject(drafts=drafts, why="/srv/start: as computed")
        found = checks.check_acceptance(parts([]), None, subject=subject)
        assert found.outcome == "undecided" and why in found.why
        assert checks.check_acceptance(parts([(0, 0)]), None, subject=subject).outcome == "fail", "counted, and none"


# Loops


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=2, max_size=20), st.integers(4, 6))
def test_what_is_said_four_times_is_a_loop(words: list[str], times: int) -> None:
    assert load.loop(" ".join(["start", *words * max(times, 8 if len(set(words)) == 1 else times)])) is not None


@given(st.lists(st.integers(), min_size=0, max_size=200, unique=True))
def test_words_that_differ_are_none(numbers: list[int]) -> None:
    assert load.loop(" ".join(map(str, numbers))) is None


def test_a_single_character_for_ever_is_a_loop() -> None:
    assert load.loop("The answer is " + "!" * 200) == "!"
    assert load.loop("") is None and load.loop("5") is None


# Answers


@given(st.one_of(st.binary(max_size=40), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "usage", "message", "text", "count", "token_ids", "completion_tokens"]), inner
    ), max_leaves=12).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_any_answer_is_understood_or_unusable(body: bytes) -> None:
    answer = Answer(200, body, 0.0)
    for read in (answer.words, answer.tokens, answer.cut, answer.token_ids, answer.count, answer.json):
        try:
            read()
        except Unusable as error:
            assert error.message


@pytest.mark.parametrize("name", ["adaptfm", "sagemaker", "openai"])
def test_a_contract_says_where_a_chat_is_asked(name: str) -> None:
    contract: Contract = named(name)
    assert contract.chat_path in ("/v1/chat/completions", "/invocations")
    assert contract.start_s > 0 and contract.answer_s > 0 and contract.at_once >= 1


def test_a_server_that_no_longer_answers_is_asked_no_more(tmp_path: Path) -> None:
    with server(tmp_path, slow_s=1.0) as served:
        started = time.monotonic()
        asked = checks.ask_greedy(served, SUBJECT, texts.built_in(60), 32, silent, timeout_s=0.3)
        assert len(asked.requests) == len(asked.answers) == 6 and len(asked.parts) == 1
        samples = load.ask_samples(served, SUBJECT, named("adaptfm").limited(answer_s=0.2))
        assert [answer.status for answer in samples.answers] == [0]
        assert time.monotonic() - started < 10
