"""Entrypoint scripts as the audit reads them, against the shells that run them.

`AUDIT_SHELL_CASES=10000 pytest tests/test_audit_shell.py -k real_shells -s` is the long run, which prints its figures;
`AUDIT_SHELL_FIRST` is the first seed, `AUDIT_SHELL_THREADS` how many shells run at a time.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shell_cases import Case, Tree, judge, made

from qdc.audit.container import start
from qdc.audit.effective import Trace, trace
from qdc.audit.shell_files import ImageFiles
from qdc.audit.shell_state import Launch, Value

CASES = int(os.environ.get("AUDIT_SHELL_CASES", "200"))
FIRST = int(os.environ.get("AUDIT_SHELL_FIRST", "0"))
THREADS = int(os.environ.get("AUDIT_SHELL_THREADS", "4"))


def read(
    script: str, *, files: dict[str, str] | None = None, env: tuple[str, ...] = (), args: tuple[str, ...] = (),
    shell: str = "bash", sh: str = "dash", **settings: object,
) -> Trace:  # fmt: skip
    """What `/start.sh` starts, run by `shell` in an image with `files`."""
    texts = {"/start.sh": script, **(files or {})}
    image = Tree({path: text.encode() for path, text in texts.items()}, set(texts))
    first = start({"Entrypoint": [f"/bin/{shell}", "/start.sh"], "Cmd": list(args), "Env": list(env), **settings})
    return trace(ImageFiles(image, first.mounts), first, sh=sh)  # type: ignore[arg-type]


def engines(found: Trace) -> list[Launch]:
    assert found.undecided is None, found.undecided
    return [launch for end in found.ends for launch in end.launches if launch.engine]


def why(found: Trace) -> Value:
    """Why it cannot be decided what starts."""
    if found.undecided is not None:
        return found.undecided
    assert not any(launch.engine for end in found.ends for launch in end.launches)
    return next(launch.words[0] for end in found.ends for launch in end.launches if not launch.words[0].known)


def words(found: Trace) -> list[Value]:
    (launch,) = engines(found)
    return list(launch.words[1:])


def texts(found: Trace) -> list[str | None]:
    return [word.text for word in words(found)]


def places(value: Value) -> list[tuple[str | None, str]]:
    """A value and all that it beat: (text, place)."""
    return [(item.text, str(item.place)) for item in (value, *value.beat)]


def test_what_is_said_is_what_real_shells_do(tmp_path: Path) -> None:
    """Random scripts: where the audit knows a word or variable, bash and dash agree; not one may differ."""
    counts: Counter[str] = Counter()
    began = time.monotonic()

    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(FIRST, FIRST + CASES, 100):
            cases = [made(seed, tmp_path) for seed in range(first, min(first + 100, FIRST + CASES))]
            for case in cases:
                case.write()
            counts.update(pool.map(judge, cases))
            for case in cases:
                shutil.rmtree(case.root, ignore_errors=True)
            number = counts.total()
            if number % 500 == 0 or number == CASES:
                shares = {word: f"{counts[word] / number:.1%}" for word in ("known", "partly", "undecided")}
                seconds = time.monotonic() - began
                print(f"\n{number} cases from seed {FIRST}, 0 wrong, {shares}, {seconds:.0f} s", flush=True)
    assert counts["known"] >= 0.7 * CASES


# ---- where values come from


def test_a_sourced_file_beats_env_and_env_beats_a_default() -> None:
    files = {"/opt/config.sh": "# settings\nexport K=15\nexport LEN=${LEN:-4096}\nexport SEQS=${SEQS:-2}\n"}
    script = 'set -eu\n[ -f /opt/config.sh ] && source /opt/config.sh\nexec vllm serve /m "$K" "$LEN" "$SEQS"\n'
    _, model, k, length, sequences = words(read(script, files=files, env=("K=20", "LEN=8192")))
    assert places(k) == [("15", "/opt/config.sh:2"), ("20", "image configuration ENV")]
    assert places(length) == [("8192", "image configuration ENV"), ("4096", "/opt/config.sh:3")]
    assert places(sequences) == [("2", "/opt/config.sh:4")]
    assert places(model) == [("/m", "/start.sh:3")]


def test_each_value_that_was_beaten_is_kept_in_order() -> None:
    script = "K=1\nK=2\nexport K=3\nexec vllm serve --k=$K\n"
    (_, word) = words(read(script, env=("K=0",)))
    assert word.text == "--k=3"
    assert [places(part) for part in word.parts if part.text == "3"] == [
        [("3", "/start.sh:3"), ("2", "/start.sh:2"), ("1", "/start.sh:1"), ("0", "image configuration ENV")]
    ]


def test_a_written_file_is_known_to_its_line() -> None:
    script = "cat > /tmp/made.sh <<EOF\nA=1\nB=$K\nEOF\n. /tmp/made.sh\nexec vllm serve $A $B\n"
    found = words(read(script, env=("K=7",), files={"/tmp/x": ""}))
    assert [value.text for value in found] == ["serve", "1", "7"]
    assert str(found[2].place) == "/tmp/made.sh:2"


@pytest.mark.parametrize(
    ("shell", "expected"),
    [("bash", ["serve", "sourced"]), ("sh", ["serve", "env"])],
)
def test_dash_has_no_source_and_goes_on(shell: str, expected: list[str]) -> None:
    files = {"/c.sh": "MODE=sourced\n"}
    assert texts(read("source /c.sh\nexec vllm serve $MODE\n", files=files, env=("MODE=env",), shell=shell)) == expected


def test_where_it_is_not_known_which_shell_sh_is_source_cannot_be_decided() -> None:
    found = read("source /c.sh\nexec vllm serve $MODE\n", files={"/c.sh": "MODE=1\n"}, shell="sh", sh="sh")
    assert str(why(found).place) == "/start.sh:1"
    assert "`source`" in why(found).why


@pytest.mark.parametrize(
    ("value", "expected"),
    [('{"k":1}', '{"k":1}}'), ("", '{"k":4}')],
)
def test_braces_of_json_in_a_default_end_where_the_shell_ends_them(value: str, expected: str) -> None:
    script = 'exec vllm serve "${SPEC:-{\\"k\\":4}}"\n'
    assert texts(read(script, env=(f"SPEC={value}",) if value else ())) == ["serve", expected]


# ---- what is not known


def test_after_an_unknown_condition_what_both_ways_agree_on_is_known() -> None:
    script = (
        "K=4\nif curl -sf http://host/flag; then K=7; LEN=8; MODE=a; else LEN=8; MODE=b; fi\n"
        "exec vllm serve --len $LEN --k $K --mode $MODE\n"
    )
    found = words(read(script))
    assert [value.text for value in found] == ["serve", "--len", "8", "--k", None, "--mode", None]
    assert str(found[4].place) == "/start.sh:2"
    assert "how curl ends" in found[4].why


def test_an_unknown_program_may_change_files_and_no_variable() -> None:
    script = "K=4\n/opt/prepare\n. /c.sh\nexec vllm serve $K\n"
    found = read(script, files={"/c.sh": "K=9\n"})
    assert "prepare ran" in why(found).why
    assert str(why(found).place) == "/start.sh:2"
    assert texts(read("K=4\n/opt/prepare || true\nexec vllm serve $K\n")) == ["serve", "4"]


def test_programs_that_change_nothing_change_nothing() -> None:
    script = "nvidia-smi --query-gpu=name || true\nsleep 1\n. /c.sh\nexec vllm serve $K\n"
    assert texts(read(script, files={"/c.sh": "K=9\n"})) == ["serve", "9"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("K=$(curl -s http://host/k)", "a command computes it"),
        ("read -r K < /proc/k", "read"),
        ("K=$RANDOM", "$RANDOM"),
        ("K=$(cat /proc/k)", "a command computes it"),
    ],
)
def test_a_computed_value_is_unknown_with_its_line(line: str, why: str) -> None:
    found = words(read(f'# first\n{line}\nexec vllm serve --max-model-len 8 --k "$K"\n'))
    assert [value.text for value in found[:4]] == ["serve", "--max-model-len", "8", "--k"]
    assert found[4].text is None
    assert str(found[4].place) == "/start.sh:2"
    assert why in found[4].why


@pytest.mark.parametrize(
    "script",
    [
        "coproc vllm serve\n", "select x in a; do :; done\n", "$(curl x) serve\n", ". \"$(curl x)\"\n", "trap x ERR\n",
        "set -o posix\n", "if true; then\n", 'echo "\n', "K=$((1/0))\n", "x=( [3]=a )\n", "let K=3\n", "getopts a b\n",
    ],
)  # fmt: skip
def test_what_is_outside_of_the_subset_is_not_decided(script: str) -> None:
    found = read(f"{script}exec vllm serve --k 4\n")
    assert why(found).place.path == "/start.sh"


def test_what_stands_after_the_engine_is_never_read() -> None:
    assert texts(read("exec vllm serve --k 4\ncoproc ( ((\n")) == ["serve", "--k", "4"]


def test_two_engines_are_seen() -> None:
    script = "vllm serve /a --port 1 &\nvllm serve /b --port 2 &\nwait -n\n"
    found = engines(read(script))
    assert [[word.text for word in launch.words[2:]] for launch in found] == [
        ["/a", "--port", "1"],
        ["/b", "--port", "2"],
    ]
    assert all(launch.background for launch in found)


def test_a_fallback_engine_is_only_possible() -> None:
    (first, second) = engines(read("vllm serve /a || vllm serve /b\n"))
    assert not first.possible
    assert second.possible


def test_a_wrapper_named_like_the_engine_is_read() -> None:
    files = {"/usr/local/bin/vllm": '#!/bin/bash\nexec /opt/venv/bin/vllm "$@" --k 3\n'}
    assert texts(read("exec vllm serve --k 9\n", files=files)) == ["serve", "--k", "9", "--k", "3"]


def test_bash_env_is_read_before_a_bash_script() -> None:
    files = {"/env.sh": "K=5\n"}
    env = ("K=1", "BASH_ENV=/env.sh")
    assert texts(read("exec vllm serve $K\n", files=files, env=env)) == ["serve", "5"]
    assert texts(read("exec vllm serve $K\n", files=files, env=env, shell="sh")) == ["serve", "1"]


def test_a_mounted_folder_is_not_the_images() -> None:
    script = "[ -f /data/c.sh ] && . /data/c.sh\nexec vllm serve $K\n"
    found = read(script, files={"/data/c.sh": "K=2\n"}, Volumes={"/data": {}}, env=("K=1",))
    assert str(why(found).place) == "/start.sh:1"


def test_a_restart_loop_starts_one_engine() -> None:
    assert texts(read("while true; do\n  vllm serve --k 4\n  sleep 1\ndone\n")) == ["serve", "--k", "4"]


def test_waiting_for_something_outside_changes_nothing() -> None:
    wait = "until curl -s localhost:1; do sleep 1; done\nfor i in 1 2; do curl -s x && break; done\n"
    assert texts(read(f"K=3\n{wait}exec vllm serve $K\n")) == ["serve", "3"]


@pytest.mark.parametrize(
    "script",
    [
        "f() { f; }\nf\n", "while :; do n=x$n; done\n", "for a in 1 2 3 4 5 6 7; do " * 8 + ":; " + "done; " * 8 + "\n",
        "exec /start.sh\n", "x=0\nwhile [ $x -lt 9999999 ]; do x=$((x+1)); done\n", "( " * 99 + ":" + " )" * 99 + "\n",
        "$(" * 300 + ")" * 300 + "\n", "X=${a:-" * 900 + "}" * 900 + "\n", "K=$((" + "(" * 90 + "1" + ")" * 90 + "))\n",
        "set -- a b\n" + 'set -- "$@" "$@"\n' * 40,
    ],
)  # fmt: skip
def test_no_script_makes_the_audit_endless(script: str) -> None:
    began = time.monotonic()
    found = read(f"{script}exec vllm serve --k 4\n")
    assert found.undecided is not None or not any(launch.engine for end in found.ends for launch in end.launches)
    assert time.monotonic() - began < 30


def test_a_text_of_megabytes_is_unknown() -> None:
    script = "X=aaaaaaaaaa\n" + 'X="$X$X$X$X$X$X$X$X$X$X"\n' * 9 + 'exec vllm serve --k 4 "$X"\n'
    assert texts(read(script)) == ["serve", "--k", "4", None]


@pytest.mark.parametrize("text", ["*a" * 40 + "b", "[a-z]*" * 30 + "]", "?*" * 50 + "z"])
def test_no_pattern_makes_the_audit_slow(text: str) -> None:
    began = time.monotonic()
    script = f"X={'a' * 5000}\ncase $X in\n {text}) K=1 ;;\nesac\nK=${{X%%{text}}}\nexec vllm serve $K\n"
    assert engines(read(script))
    assert time.monotonic() - began < 20


def test_broken_scripts_are_undecided_and_never_a_crash(tmp_path: Path) -> None:
    """Cut, doubled and mixed pieces of the random scripts."""
    chance = random.Random(7)
    pieces = [
        "$(",
        "${",
        "))",
        "fi",
        "((",
        "<<EOF",
        "'",
        '"',
        "`",
        "\\",
        "\n",
        ";;",
        "{",
        "}",
        "[[",
        "&&",
        "|",
        "\0",
        "é",
    ]
    for seed in range(60):
        case = made(seed, tmp_path)
        for path, text in case.files.items():
            cuts = sorted(chance.randrange(len(text) + 1) for _ in range(4))
            parts = [text[: cuts[0]], chance.choice(pieces), text[cuts[1] :], text[cuts[2] : cuts[3]]]
            case.files[path] = "#!/bin/bash\n" + "".join(parts) if chance.random() < 0.9 else text
        found = case.read()
        assert found.undecided is not None or isinstance(found.ends, list)


def test_a_case_shows_itself(tmp_path: Path) -> None:
    """The judge of the random cases does not accept a wrong answer."""
    root = str(tmp_path / "c")
    settings = {"Entrypoint": [f"{root}/entry.sh"], "Env": [f"PATH={root}/bin:/usr/bin:/bin"], "WorkingDir": root}
    case = Case(root, {f"{root}/entry.sh": "#!/bin/bash\nexec vllm serve 4\n"}, settings)
    case.write()
    assert judge(case) == "known"
    Path(f"{root}/launches").unlink()
    lying = Case(root, dict(case.files), case.settings)
    Path(f"{root}/entry.sh").write_text("#!/bin/bash\nexec vllm serve 5\n")
    with pytest.raises(AssertionError, match="the word '4', really '5'"):
        judge(lying)
