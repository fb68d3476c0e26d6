"""What the gate says before anything starts: configuration, files, size, claims; and of files that are no image."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import gate_images
import pytest
from gate_images import Stub, Tree, pack
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.formats.oci import Image
from qdc.gate import artifact, configuration, contracts
from qdc.gate.artifact import Artifact, archive_chunks, check_size
from qdc.gate.contracts import named
from qdc.gate.report import BEFORE_START, IDS, Check, complete, exit_code

ADAPTFM, OPENAI = named("adaptfm"), named("openai")
ELF = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little") + bytes(40)
ARM = b"\x7fELF" + bytes(14) + (183).to_bytes(2, "little") + bytes(40)
FILES: Tree = {
    "usr/bin/python3": (0o755, "python3.11"),
    "usr/bin/python3.11": (0o755, ELF),
    "bin/sh": (0o755, ELF),
    "srv/start": (0o755, b"#!/bin/sh\nexec python3\n"),
    "srv/lost": (0o755, b"#!/bin/bash\n"),
    "srv/env": (0o755, b"#!/usr/bin/env ruby\n"),
    "usr/bin/env": (0o755, ELF),
    "srv/plain": (0o644, b"#!/bin/sh\n"),
    "srv/arm": (0o755, ARM),
    "srv/app.py": (0o644, b""),
    "usr/local/bin/serve": (0o755, b"#!/usr/bin/python3\n"),
}


def open_artifact(path: Path, shown: str) -> Artifact:
    """Its files stay open as long as it is used."""
    with artifact.open_artifact(path, shown) as opened:
        return opened


def silent(done: int, total: int, note: str) -> None: ...


def image(folder: Path, files: Tree | None = None, **more: Any) -> Image:
    own = {name: more.pop(name) for name in ("architecture", "history", "tag") if name in more}
    made = Stub([pack(FILES | (files or {}))], more, **own)
    return open_artifact(made.archive(folder / "image.tar"), "it").image


# The start


@pytest.mark.parametrize(
    ("settings_", "outcome", "why"),
    [
        ({"Entrypoint": ["/srv/start"]}, "pass", "`docker run IMAGE serve` starts /srv/start"),
        ({"Entrypoint": ["python3", "/srv/app.py"]}, "pass", "/usr/bin/python3"),
        ({"Entrypoint": ["start"], "WorkingDir": "/srv"}, "fail", "starts start, which is not in the image"),
        ({"Entrypoint": ["./start"], "WorkingDir": "/srv"}, "pass", "starts /srv/start"),
        ({"Entrypoint": ["python3", "app.py"], "WorkingDir": "/srv"}, "pass", "python3"),
        ({"Entrypoint": ["python3", "app.py"]}, "fail", "is to run /app.py, which is not in the image"),
        ({"Entrypoint": ["start"], "Env": ["PATH=/srv"]}, "pass", "starts /srv/start"),
        ({"Entrypoint": None}, "pass", "starts /usr/local/bin/serve"),
        ({"Entrypoint": [], "Env": ["PATH=/bin"]}, "fail", "there is no entrypoint"),
        ({"Cmd": ["/srv/start"], "Env": ["PATH=/bin"]}, "fail", "its command /srv/start is replaced by it"),
        ({"Entrypoint": ["/srv/plain"]}, "fail", "may not be executed (mode 644)"),
        ({"Entrypoint": ["/srv/lost"]}, "fail", "is a script for /bin/bash, which is not in the image"),
        ({"Entrypoint": ["/srv/env"]}, "fail", "is a script for ruby, which is not in the image"),
        ({"Entrypoint": ["/bin/sh", "-c", "/srv/start"]}, "pass", "does not pass on `serve`"),
        ({"Entrypoint": ["/bin/sh", "-c", "exec /srv/start $0"]}, "pass", "starts /bin/sh"),
        ({"Entrypoint": "/srv/start", "Env": ["PATH=/bin"]}, "fail", "there is no entrypoint"),
    ],
)
def test_what_docker_run_image_serve_starts(tmp_path: Path, settings_: dict[str, Any], outcome: str, why: str) -> None:
    check = configuration.check_entrypoint(image(tmp_path, **settings_), ADAPTFM)
    assert check.outcome == outcome and why in check.why, check


def test_a_contract_without_an_argument_starts_the_images_own_command(tmp_path: Path) -> None:
    assert configuration.check_entrypoint(image(tmp_path, Cmd=["/srv/start"]), OPENAI).outcome == "pass"
    check = configuration.check_entrypoint(image(tmp_path), OPENAI)
    assert check.outcome == "fail" and "neither entrypoint nor command" in check.why


IMPORTED = {"created": "2026-01-01", "comment": "Imported from -"}


@pytest.mark.parametrize(
    ("history", "outcome"),
    [
        ([IMPORTED], "fail"),
        ([{"created_by": "/bin/sh -c #(nop) ADD file:1 in /", "comment": "imported from tarball"}], "fail"),
        ([IMPORTED, {"created_by": "RUN more"}], "pass"),
        ([{"created_by": "ADD base.tar /"}], "pass"),
    ],
)
def test_an_import_of_one_layer_is_a_flattened_image(
    tmp_path: Path, history: list[dict[str, Any]], outcome: str
) -> None:
    assert configuration.check_layers(image(tmp_path, history=history)).outcome == outcome


def test_the_machine_is_that_of_configuration_and_program(tmp_path: Path) -> None:
    start = {"Entrypoint": ["/srv/start"]}
    assert configuration.check_architecture(image(tmp_path, **start), ADAPTFM).outcome == "pass"
    assert configuration.check_architecture(image(tmp_path, architecture="arm64"), ADAPTFM).outcome == "fail"
    check = configuration.check_architecture(image(tmp_path, Entrypoint=["/srv/arm"]), ADAPTFM)
    assert check.outcome == "fail" and "/srv/arm is a program for arm64" in check.why


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (["A=1", "B="], None),
        (["TOKENIZERS_PARALLELISM=false", "MAX_TOKENS=5", "HF_TOKEN_PATH=/x", "HF_TOKEN="], None),
        (["A"], "no NAME=VALUE"),
        (["=1"], "no NAME=VALUE"),
        (["A=1", "A=1"], None),
        (["A=1", "A=2"], "A stands twice"),
        (["HF_TOKEN=hf_x"], "HF_TOKEN is in the image for everybody"),
        (["AWS_SECRET_ACCESS_KEY=x"], "for everybody"),
        (["VLLM_PORT=tcp://10.0.0.1:80"], "VLLM_PORT"),
    ],
)
def test_an_environment_is_well_formed_and_holds_no_secret(tmp_path: Path, entries: list[str], why: str | None) -> None:
    check = configuration.check_environment(image(tmp_path, Env=entries))
    assert check.outcome == ("pass" if why is None else "fail") and (why or "") in check.why
    assert "hf_x" not in check.why


def test_a_python_to_ask_through_is_found_where_it_is(tmp_path: Path) -> None:
    assert configuration.find_python(image(tmp_path)) == "/usr/bin/python3"
    bare = Stub([pack({"app/bin/python3": (0o755, ELF)})], {"Env": ["PATH=/app/bin"]})
    assert configuration.find_python(open_artifact(bare.archive(tmp_path / "a.tar"), "a").image) == "/app/bin/python3"
    none = Stub([pack({"bin/sh": (0o755, ELF)})])
    assert configuration.find_python(open_artifact(none.archive(tmp_path / "b.tar"), "b").image) is None


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["/srv/start", "serve", "A=1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(("Entrypoint", "Cmd", "Env", "WorkingDir"), JUNK)), JUNK)
def test_any_configuration_gives_outcomes(tmp_path_factory: pytest.TempPathFactory, given_: Any, history: Any) -> None:
    folder = tmp_path_factory.mktemp("junk")
    made = Stub([pack({"srv/start": (0o755, b"#!/bin/sh\n")})], given_, history=history or None)
    read = open_artifact(made.archive(folder / "image.tar"), "it").image
    for check in (
        configuration.check_entrypoint(read, ADAPTFM),
        configuration.check_layers(read),
        configuration.check_architecture(read, ADAPTFM),
        configuration.check_environment(read),
    ):
        assert check.outcome in ("pass", "fail") and check.why


WORDS = ["/ping", "adaptfm", "--port", "8080", "a b", ""]
FIELDS = ["serving", "recipe", "contract", "arguments", "name", "ping", "invocations", "deploy", "size_limit", "bytes"]
MANIFESTS = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 9000) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=14,
)


@settings(max_examples=150, deadline=None)
@given(MANIFESTS, MANIFESTS, MANIFESTS)
def test_any_manifest_says_how_it_serves_or_is_refused(serving: Any, contract: Any, deploy: Any) -> None:
    whole = {
        "serving": {"contract": contract, "arguments": serving, "served_model_name": 1},
        "recipe": {"deploy": deploy},
    }
    for manifest in (whole, {"serving": serving, "recipe": deploy}):
        for read in (contracts.of_manifest, contracts.Subject.of):
            try:
                found = read(manifest)
            except QdcError as error:
                assert error.message
            else:
                assert isinstance(found, (contracts.Contract, contracts.Subject))


# The artifact


def test_a_layout_is_loaded_as_the_archive_that_it_makes(tmp_path: Path) -> None:
    made = Stub([pack(FILES), pack({"a": (0o644, b"1")})], {"Cmd": ["x"]}, tag="name:1")
    layout = open_artifact(made.layout(tmp_path / "layout"), "layout")
    file = tmp_path / "made.tar"
    file.write_bytes(b"".join(archive_chunks(layout)))
    again = open_artifact(file, "made")
    assert again.image.image_id == layout.image.image_id == made.id
    assert [layer.diff_id for layer in again.image.layers] == [layer.diff_id for layer in layout.image.layers]
    assert check_size(layout, OPENAI, silent).figure == file.stat().st_size


def limited(bytes_: float, of: str) -> Any:
    from dataclasses import replace

    return replace(ADAPTFM, size_limit={"bytes": bytes_, "of": of})


def test_what_the_contract_weighs_is_weighed(tmp_path: Path) -> None:
    made = Stub([pack({"zeros": (0o644, bytes(1 << 20))})])
    raw = open_artifact(made.archive(tmp_path / "i.tar"), "raw")
    zipped = open_artifact(made.archive(tmp_path / "i.tar.gz"), "zipped")
    layout = open_artifact(made.layout(tmp_path / "layout"), "layout")

    def outcome(of: str, bytes_: float, what: Artifact) -> str:
        return check_size(what, limited(bytes_, of), silent).outcome

    for what in (raw, zipped, layout):
        assert outcome("docker-save", 2e6, what) == "pass"
        assert outcome("docker-save", 1e6, what) == "fail"
        assert outcome("docker-save-gzip", 1e5, what) == "pass"
        assert outcome("docker-save-gzip", 500, what) == "fail"
    assert check_size(zipped, limited(1e5, "docker-save-gzip"), silent).figure == (tmp_path / "i.tar.gz").stat().st_size


def test_what_is_no_whole_image_is_refused(tmp_path: Path) -> None:
    whole = Stub([pack(FILES)]).archive(tmp_path / "whole.tar").read_bytes()
    zipped = gzip.compress(whole)
    for number, data in enumerate((b"", b"text", whole[:700], whole[: len(whole) // 2], zipped[:-50], zipped[:30])):
        file = tmp_path / f"{number}.tar"
        file.write_bytes(data)
        with pytest.raises(QdcError):
            open_artifact(file, "it").image.read("srv/start")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_or_another_image(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("damage")
    made = Stub([pack({"a": (0o644, b"12345")})])
    whole = bytearray(made.archive(folder / "whole.tar").read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    file = folder / "damaged.tar"
    file.write_bytes(bytes(whole)[: data.draw(st.integers(place, len(whole)))])
    try:
        read = open_artifact(file, "it")
        check = artifact.audited(read, made.id)[0]
    except QdcError as error:
        assert error.message
    else:
        same = [layer.diff_id for layer in read.image.layers]
        assert check.outcome == "fail" or same == [f"sha256:{sha}" for sha in map(_sha, made.layers)]


def _sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_path_is_known_as_a_file_or_a_layout(tmp_path: Path) -> None:
    made = Stub([pack(FILES)])
    file, layout = made.archive(tmp_path / "i.tar"), made.layout(tmp_path / "layout")
    assert artifact.given_path(str(file)) == ("archive", str(file))
    assert artifact.given_path(str(layout)) == ("oci", str(layout))
    (tmp_path / "recipe.yaml").write_text("name: x")
    for other in ("@1", "docker:x", str(tmp_path / "recipe.yaml"), str(tmp_path / "none"), str(tmp_path)):
        assert artifact.given_path(other) is None


# Words and bytes


def test_a_tag_that_says_what_the_image_does_not_hold_is_refuted(tmp_path: Path) -> None:
    start = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/t", "--speculative-config"]
    ngram = [*start, json.dumps({"method": "ngram", "num_speculative_tokens": 20})]
    made = Stub([pack(FILES)], {"Entrypoint": ngram}, tag="team:dflash-r6v2")
    whole, claims, _ = artifact.audited(open_artifact(made.archive(tmp_path / "i.tar"), "it"), None)
    assert whole.outcome == "pass" and claims.outcome == "fail"
    assert "drafter.kind" in claims.why and "dflash" in claims.why


def test_an_image_that_says_nothing_is_undecided_and_another_id_fails(tmp_path: Path) -> None:
    made = open_artifact(Stub([pack(FILES)], tag="x:1").archive(tmp_path / "i.tar"), "it")
    assert artifact.audited(made, None)[1].outcome == "undecided"
    assert artifact.audited(made, "sha256:" + "0" * 64)[0].outcome == "fail"


VLLM = "exec python3 -m vllm.entrypoints.openai.api_server --model /models/t"
DRAFTS = ' --speculative-config \'{"method": "ngram", "num_speculative_tokens": 20}\''


@pytest.mark.parametrize(
    ("script", "drafts", "k", "length", "why"),
    [
        (f"{VLLM}{DRAFTS} --max-model-len 4096", True, 20, 4096, "/srv/start: method ngram"),
        (f"{VLLM} --max-model-len 8192", False, None, 8192, "method none"),
        (f'if [ "$1" = serve ]; then {VLLM}{DRAFTS}; fi\n{VLLM}', True, 20, None, "/srv/start: method ngram"),
        (f'if [ "$1" = serve ]; then {VLLM}; fi\n{VLLM}{DRAFTS}', False, None, None, "method none"),
        (f"{VLLM} $(nvidia-smi | wc -l)", None, None, None, "a command computes it: the output of wc (/srv/start:2)"),
        ("exec /srv/arm", None, None, None, "/srv/arm is a program, which is not run (/srv/start:2)"),
    ],
)
def test_of_another_makers_image_the_gate_knows_what_its_bytes_decide(
    tmp_path: Path, script: str, drafts: bool | None, k: int | None, length: int | None, why: str
) -> None:
    files: Tree = {**FILES, "srv/start": (0o755, f"#!/bin/sh\n{script}\n".encode())}
    made = Stub([pack(files)], {"Entrypoint": ["/srv/start"]}, tag="x:1").archive(tmp_path / "i.tar")
    verdicts = artifact.audited(open_artifact(made, "it"), None, (), ADAPTFM.command)[2]
    found = contracts.Subject.of_verdicts(verdicts, "/chat")
    assert (found.drafts, found.k, found.max_model_len, found.counts) == (drafts, k, length, False)
    assert why in found.why, found.why


# The report


def test_a_report_has_every_check_and_the_reason_of_those_that_did_not_run() -> None:
    found = complete([Check("image", "pass", None, "a"), Check("entrypoint", "fail", None, "lost\nmore")])
    assert [check.id for check in found] == list(IDS)
    assert {check.outcome for check in found if check.id not in ("image", "entrypoint")} == {"not-run"}
    assert found[-1].why == "stopped by `entrypoint`: lost"
    assert set(BEFORE_START) < set(IDS)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [(["pass"], 0), (["pass", "fail", "not-run"], 1), (["pass", "undecided"], 3), (["pass", "not-run"], 3)],
)
def test_the_exit_code_is_a_pass_only_when_all_passed(outcomes: list[str], code: int) -> None:
    assert exit_code({"checks": [{"outcome": outcome} for outcome in outcomes]}) == code


def test_an_image_for_another_card_is_refuted_and_one_for_this_is_not(tmp_path: Path) -> None:
    """Of the other image the card is proved; what drafts in it, its bytes do not say."""
    for library, outcome, word in (("ada", "fail", "refuted"), ("two", "undecided", "proved")):
        made = gate_images.for_another_card(library).archive(tmp_path / f"{library}.tar")
        opened = open_artifact(made, "it")
        assert configuration.wants_gpu(opened.image)
        check = artifact.audited(opened, None, ("deploy.hardware=a10g",))[1]
        assert check.outcome == outcome and check.figure[word] == 1, check
        assert ("deploy.hardware" in check.why) == (outcome == "fail")
    assert not configuration.wants_gpu(image(tmp_path))
    assert configuration.wants_gpu(image(tmp_path, {"opt/lib/libcudart.so.12": (0o644, b"")}))
