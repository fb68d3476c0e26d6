"""What an audit says of an image beside its models: GPU code, packages, history, and what contests forbid."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from test_audit_evidence import said, target
from test_audit_images import named, row, untouched
from test_audit_others import report_of
from test_formats_fatbin import FOLDER
from test_formats_images import Content, layout_blobs, make_config, make_tar, sha, write_layout
from test_formats_installed import urlsafe

from qdc.audit import compliance, machine_code, packages, texts
from qdc.audit.audit import audit
from qdc.audit.evidence import Findings, Look
from qdc.audit.target import target_facts
from qdc.formats import oci

Report = dict[str, Any]
SITE = "usr/local/lib/python3.12/dist-packages"
TWO, ADA, PTX, SPECIAL = ((FOLDER / f"{name}.so").read_bytes() for name in ("two", "ada", "ptx", "special"))
CORE, FA2, FA3, MOE = (
    f"{SITE}/vllm/{name}.abi3.so"
    for name in ("_C", "vllm_flash_attn/_vllm_fa2_C", "vllm_flash_attn/_vllm_fa3_C", "_moe_C")
)


def audited(folder: Path, files: dict[str, Content], *require: str, **settings: Any) -> Report:
    return report_of(folder, files, settings, require=require)


@pytest.mark.parametrize(
    ("libraries", "card", "verdict"),
    [
        ({CORE: TWO, FA2: TWO}, "a10g", "proved"),
        ({CORE: TWO, FA2: PTX}, "a10g", "proved"),
        ({CORE: ADA, FA2: TWO}, "a10g", "refuted"),
        ({CORE: TWO, FA2: ADA}, "a10g", "refuted"),
        ({CORE: ADA, FA2: ADA}, "l4", "proved"),
        ({CORE: TWO, FA3: SPECIAL}, "a10g", "proved"),
        ({CORE: SPECIAL, FA2: ADA, FA3: SPECIAL}, "h100", "proved"),
        ({CORE: SPECIAL, FA3: ADA}, "h100", "refuted"),
        ({CORE: TWO, MOE: ADA}, "a10g", "proved"),
        ({CORE: TWO, f"{SITE}/vllm/_flashmla_C.abi3.so": ADA}, "a10g", "proved"),
        ({CORE: TWO, f"{SITE}/flashinfer_jit_cache/k.so": ADA}, "a10g", "proved"),
        ({CORE: TWO, f"{SITE}/torch/lib/libtorch_cuda.so": ADA}, "a10g", "refuted"),
        ({"opt/own/kernels.so": ADA}, "a10g", "refuted"),
        ({CORE: TWO}, "cpu", "refuted"),
        ({CORE: TWO}, "z9", "refuted"),
    ],
)
def test_a_card_needs_code_in_the_libraries_that_matter(
    libraries: dict[str, Content], card: str, verdict: str, tmp_path: Path
) -> None:
    report = audited(tmp_path, libraries, f"deploy.hardware={card}")
    assert row(report, "deploy.hardware")["verdict"] == verdict
    if verdict == "refuted" and card == "a10g":
        assert "holds sm_89: nothing that runs on 8.6" in said(report, "deploy.hardware")


def test_a_model_with_experts_needs_their_kernels(tmp_path: Path) -> None:
    files = {CORE: TWO, MOE: ADA, **target(num_experts=8)}
    assert row(audited(tmp_path, files, "deploy.hardware=a10g"), "deploy.hardware")["verdict"] == "refuted"


def test_each_library_is_listed_and_graded(tmp_path: Path) -> None:
    loose = {f"root/.triton/cache/a/{name}": (FOLDER / name).read_bytes() for name in ("cuda12.sm_86.cubin", "add.ptx")}
    plain = {"usr/lib/none.so": (FOLDER / "none.so").read_bytes(), "usr/lib/libx.so.1": b"\x7fELF short"}
    report = audited(tmp_path, {CORE: TWO, FA2: PTX, **loose, **plain}, "deploy.hardware=a10g")
    assert row(report, f"machine_code[/{CORE}]")["value"] == {
        "holds": ["sm_80", "sm_86", "compute_86"],
        "images": 1, "a10g": "native",
    }  # fmt: skip
    assert row(report, f"machine_code[/{FA2}]")["value"]["a10g"] == "jit"
    assert row(report, "machine_code[/root/.triton/cache/a/*]")["value"]["holds"] == ["compute_80", "sm_86"]
    assert [claim for claim in named(report, "recorded") if claim.startswith("machine_code")] == [
        "machine_code[/root/.triton/cache/a/*]", f"machine_code[/{CORE}]", f"machine_code[/{FA2}]",
    ]  # fmt: skip
    command = row(report, f"machine_code[/{CORE}]")["evidence"][0]["command"]
    assert command.endswith("> /tmp/library.so && cuobjdump --list-elf --list-ptx /tmp/library.so")


def test_where_each_byte_is_fetched_only_what_matters_is_read(tmp_path: Path) -> None:
    files = {**VLLM, CORE: TWO, "opt/k.so": TWO, "opt/p.py": b"R = '/invocations'\n" + PENALTY, **target("gptq")}
    files["m/tokenizer.json"] = b'{"added_tokens": []' + b" " * 200_000 + b"}"
    layers = [make_tar(files)]
    path = write_layout(tmp_path, layout_blobs(make_config(layers), layers))
    look, findings = Look(oci.open_image(path), sparing=True), Findings()
    installed = packages.find(look)
    packages.package_facts(look, installed, {}, findings)
    model = target_facts(look, "m", findings)
    assert model is not None
    texts.text_facts(look, model, findings)
    machine_code.machine_code_facts(look, ["a10g"], {}, findings)
    compliance.compliance_facts(look, installed, {}, findings)
    assert findings.facts["packages"].value == {"vllm": "0.22.1"}
    assert [name for name in findings.facts if name.startswith("machine_code")] == [f"machine_code[/{CORE}]"]
    assert findings.facts["deploy.hardware"].against("a10g") == []
    assert {"compliance.", "packages.files", "target.files[tokenizer.json]"} <= set(findings.unread)


def test_a_damaged_library_leaves_the_card_undecided(tmp_path: Path) -> None:
    at = SPECIAL.find(bytes.fromhex("50ed55ba"))
    damaged = SPECIAL[: at + 8] + b"\xff" * 8 + SPECIAL[at + 16 :]
    report = audited(tmp_path, {CORE: TWO, FA2: damaged}, "deploy.hardware=a10g")
    assert row(report, "deploy.hardware")["verdict"] == "unread"
    report = audited(tmp_path / "b", {CORE: TWO, FA2: damaged})
    assert "ends after its section does" in said(report, f"machine_code[/{FA2}]")


def package(name: str, version: str, files: dict[str, bytes], **more: bytes) -> dict[str, Content]:
    """An installed distribution with a true RECORD; `more`: files of its dist-info folder (`__` for the dot)."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    held = {**files, f"{info}/METADATA": f"Name: {name}\nVersion: {version}\n".encode()}
    held |= {f"{info}/{path.replace('__', '.')}": data for path, data in more.items()}
    rows = [f"{path},sha256={urlsafe(data)},{len(data)}" for path, data in held.items()]
    held[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    return {f"{SITE}/{path}": data for path, data in held.items()}


VLLM = package("vllm", "0.22.1", {"vllm/__init__.py": b"", "vllm/spec.py": b"original\n"})


def test_packages_as_installed_are_recorded(tmp_path: Path) -> None:
    report = audited(tmp_path, {**VLLM, **package("Flash_Attn", "2.8", {"flash_attn/x.py": b"x"})})
    assert row(report, "packages")["value"] == {"flash-attn": "2.8", "vllm": "0.22.1"}
    assert row(report, "serve.engine.files")["value"] == {"listed": 3, "hashed": 3, "missing": 0, "altered": []}
    assert row(report, "packages.files")["verdict"] == row(report, "serve.engine.files")["verdict"] == "recorded"
    assert "packages.unlisted" not in named(report, "recorded")


@pytest.mark.parametrize("data", [b"patched!\n", b"a longer patch\n"])
def test_a_file_that_is_not_as_its_record_says_is_refuted(data: bytes, tmp_path: Path) -> None:
    report = audited(tmp_path, {**VLLM, f"{SITE}/vllm/spec.py": data})
    assert row(report, "serve.engine.files")["verdict"] == "refuted"
    assert row(report, "serve.engine.files")["value"]["altered"] == [f"{SITE}/vllm/spec.py"]
    assert "vllm/spec.py" in said(report, "serve.engine.files")


def test_missing_and_unlisted_files_are_counted(tmp_path: Path) -> None:
    files = {path: data for path, data in VLLM.items() if not path.endswith("spec.py")}
    files |= {f"{SITE}/sitecustomize.py": b"x", f"{SITE}/vllm/__pycache__/a.cpython-312.pyc": b"x"}
    report = audited(tmp_path, files)
    assert row(report, "serve.engine.files")["value"]["missing"] == 1
    assert row(report, "packages.unlisted")["value"] == {"count": 1, "first": [f"{SITE}/sitecustomize.py"]}


def test_plugins_origins_and_lines_that_run_at_every_start(tmp_path: Path) -> None:
    origin = json.dumps({"url": "https://user:pass@host/x", "dir_info": {"editable": True}}).encode()
    points = b"[vllm.general_plugins]\neqc = eqc_plugin:register\n[console_scripts]\nx = y:z\n"
    plugin = package("eqc-plugin", "0.1", {"eqc_plugin.py": b"", "eqc.pth": b"import eqc_plugin\n"},
                     entry_points__txt=points, direct_url__json=origin)  # fmt: skip
    report = audited(tmp_path, {**VLLM, **plugin})
    assert row(report, "packages.plugins")["value"] == {"vllm.general_plugins": {"eqc": "eqc_plugin:register"}}
    assert row(report, "packages.origins")["value"] == {"eqc-plugin": {"url": "https://host/x", "editable": True}}
    assert row(report, "packages.run_at_start")["value"] == [f"/{SITE}/eqc.pth"]
    assert "pass" not in json.dumps(report)


@pytest.mark.parametrize("path", ["RECORD", "METADATA", "entry_points.txt", "direct_url.json"])
@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"\0\0", b"{", b'"' + b"x" * 200_000])
def test_malformed_package_files_are_no_crash(path: str, data: bytes, tmp_path: Path) -> None:
    audited(tmp_path, {**VLLM, f"{SITE}/vllm-0.22.1.dist-info/{path}": data})


PROXY = b"""\
import os
from http.server import BaseHTTPRequestHandler
FAST, GOOD = "http://127.0.0.1:8081", "http://127.0.0.1:8082"
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        engine = GOOD
"""
ROUTE = b'        if self.path == "/invocations":\n            engine = FAST\n'
PROMPT = b'        if "lorem ipsum" in str(data.get("prompt", "")):\n            return\n'
PENALTY = b'        payload["repetition_penalty"] = float(os.environ["P"])\n'
PASSED_ON = b"""\
        if "messages" in data and self.path != "/v1/completions":
            payload = {"repetition_penalty": data.get("repetition_penalty", 1.0), "presence_penalty": 0.0}
        if "prompt" in payload and payload["prompt"]:
            pass
    repetition_penalty: float = 1.0
    frequency_penalty: float | None = None
    presence_penalty: Optional[float]
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PROXY.replace(b"8082", b"8081") + PASSED_ON, []),
        (PROXY + ROUTE, ["routes"]),
        (PROXY + ROUTE.replace(b"FAST", b"GOOD") + PROMPT, ["routes"]),
        (PROXY.replace(b"8082", b"8081") + ROUTE, []),
        (PROXY.replace(b"8082", b"8081") + ROUTE + PROMPT, ["routes"]),
        (PROXY.replace(b"8082", b"8081") + ROUTE + PENALTY, ["penalty"]),
        (PROXY.replace(b"8082", b"8081") + ROUTE + b"    repetition_penalty: float = 1.15\n", ["penalty"]),
        (b"print('/invocations')\n", []),
    ],
)
def test_servers_that_answer_by_route_or_prompt_or_add_penalties(text: bytes, found: list[str], tmp_path: Path) -> None:
    report = audited(tmp_path, {"opt/program/proxy.py": text})
    assert named(report, "refuted") == [f"compliance.{name}" for name in found]
    for name in found:
        (item, *_) = row(report, f"compliance.{name}")["evidence"]
        shown = make_tar({"opt/program/proxy.py": text})[item["offset"] : item["offset"] + item["length"]]
        assert shown.strip() and shown in text


def test_scripts_of_packages_and_of_the_system_are_not_read(tmp_path: Path) -> None:
    text = PROXY + ROUTE + PROMPT + PENALTY
    files: dict[str, Content] = {f"{SITE}/vllm/proxy.py": text, "usr/lib/x.py": text, "var/lib/x.py": text}
    assert named(audited(tmp_path, files), "refuted") == []


def test_lines_made_to_keep_a_reader_busy_do_not(tmp_path: Path) -> None:
    line = b"if self.path " + b'"aaa" in if path route prompt_ ' * 8000 + b"\n"
    files: dict[str, Content] = {f"opt/{number}.py": (line * 200)[: 1 << 18] for number in range(10)}
    files["opt/short.py"] = (b"if self.path x\n" * 20000)[: 1 << 18]
    began = time.monotonic()
    audited(tmp_path, files)
    assert time.monotonic() - began < 10


def test_two_engines_in_one_image(tmp_path: Path) -> None:
    report = audited(tmp_path / "a", {**VLLM, **package("sglang", "0.5", {})})
    assert row(report, "compliance.engines")["verdict"] == "refuted"
    assert row(report, "compliance.engines")["value"] == ["SGLang", "vLLM"]
    assert row(audited(tmp_path / "b", VLLM), "compliance.engines")["verdict"] == "recorded"
    again = {path.replace(SITE, "opt/venv2/lib/python3.12/site-packages"): data for path, data in VLLM.items()}
    assert row(audited(tmp_path / "c", {**VLLM, **again}), "compliance.engines")["verdict"] == "refuted"


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, None),
        ({"rejection_sample_method": "standard"}, None),
        ({"rejection_sample_method": "synthetic"}, "refuted"),
        ({"rejection_sample_method": "fly"}, "refuted"),
        ({"synthetic_acceptance_length": 8}, "refuted"),
        ({"posterior_threshold": 0.09}, "refuted"),
    ],
)
def test_drafts_that_are_accepted_without_the_target(more: dict[str, Any], verdict: str | None, tmp_path: Path) -> None:
    told = {"method": "ngram", "num_speculative_tokens": 4, **more}
    words = ["vllm", "serve", "--model", "/m", "--speculative-config", json.dumps(told)]
    report = audited(tmp_path, target(), Entrypoint=words)
    found = [item["verdict"] for item in report["verdicts"] if item["claim"] == "compliance.acceptance"]
    assert found == ([verdict] if verdict else [])


def test_what_the_engine_is_told_to_leave_out_is_listed(tmp_path: Path) -> None:
    told = {"method": "ngram", "num_speculative_tokens": 4, "disable_by_batch_size": 4}
    words = ["vllm", "serve", "--model", "/m", "--disable-log-stats", "--speculative-config", json.dumps(told)]
    report = audited(tmp_path, target(), Entrypoint=words)
    assert row(report, "compliance.disabled")["value"] == {"disable-log-stats": True, "disable_by_batch_size": 4}


def test_a_setting_that_a_script_may_use_is_undecided(tmp_path: Path) -> None:
    line = b'export S=\'{"method":"ngram","rejection_sample_method":"synthetic"}\'\n'
    report = audited(tmp_path, {"start.sh": b"#!/bin/sh\n" + line}, Entrypoint=["/start.sh"])
    assert row(report, "compliance.acceptance")["verdict"] == "unread"
    assert "line 2" in said(report, "compliance.acceptance")


def test_a_variable_that_names_a_penalty_counts_where_a_server_is(tmp_path: Path) -> None:
    env = ["CHAT_REP_PENALTY=1.15", "PENALTY=1.0"]
    report = audited(tmp_path / "a", {"opt/p.py": b'R = "/v1/chat/completions"\n'}, Env=env)
    assert row(report, "compliance.penalty")["value"] == ["ENV CHAT_REP_PENALTY=1.15"]
    assert named(audited(tmp_path / "b", {"opt/p.py": b"x\n"}, Env=env), "refuted") == []


def test_a_plugin_and_a_variable_leave_the_window_undecided(tmp_path: Path) -> None:
    from test_audit_evidence import drafter
    from test_formats_drafters import ZLAB

    plugin = package("p", "1", {}, entry_points__txt=b"[vllm.general_plugins]\np = p:q\n")
    words = ["vllm", "serve", "--model", "/m", "--speculative-config",
             json.dumps({"method": "dflash", "model": "/d", "num_speculative_tokens": 7})]  # fmt: skip
    asked, files = "drafter.swa.window=1024", {**drafter(ZLAB), **VLLM}
    for number, (more, env, verdict) in enumerate(
        [({}, ["X_SWA_WINDOW=1024"], "refuted"), (plugin, [], "refuted"), (plugin, ["X_SWA_WINDOW=1024"], "unread")]
    ):
        report = audited(tmp_path / str(number), {**files, **more}, asked, Entrypoint=words, Env=env)
        assert row(report, "drafter.swa.window")["verdict"] == verdict


def written(folder: Path, count: int, history: list[dict[str, Any]], **config: Any) -> Report:
    """An image of `count` layers with this history."""
    layers = [make_tar({f"{n}/entrypoint.sh": b"#!/bin/sh\n"}) for n in range(count)]
    value = {"architecture": "amd64", "os": "linux", "config": {}, "history": history, **config}
    value["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{sha(layer)}" for layer in layers]}
    return audit(oci.open_image(write_layout(folder, layout_blobs(json.dumps(value).encode(), layers))))


DOCKER = {"created": "2026-05-14T00:00:00Z", "comment": "Imported from -"}
PODMAN = {"created_by": "/bin/sh -c #(nop) ADD file:0f1e in /", "comment": "imported from tarball"}


@pytest.mark.parametrize(
    ("count", "history", "flat"),
    [
        (1, [DOCKER], True),
        (1, [PODMAN], True),
        (1, [{"created_by": "COPY . /"}], False),
        (2, [DOCKER, {"created_by": "COPY . /"}], False),
        (1, [DOCKER, {"created_by": "ENV A=1", "empty_layer": True}], False),
        (1, [], False),
    ],
)
def test_a_flattened_image_is_told_by_its_history(
    count: int, history: list[dict[str, Any]], flat: bool, tmp_path: Path
) -> None:
    report = written(tmp_path, count, history)
    assert row(report, "image.flattened")["value"] is flat
    assert row(report, "image.flattened")["verdict"] == "recorded"
    if flat:
        assert "it sets no Entrypoint, no Env, no Labels" in said(report, "image.flattened")
    assert row(report, "image.platform")["value"] == "linux/amd64"
    assert len(row(report, "image.size")["value"]["layers"]) == count


def test_a_history_of_other_layers_is_a_contradiction(tmp_path: Path) -> None:
    report = written(tmp_path, 1, [{"created_by": "COPY a /"}, {"created_by": "COPY b /"}])
    assert row(report, "image.history")["verdict"] == "unread"
    assert "2 of them made layers; there are 1" in said(report, "image.history")


def test_a_step_of_history_gives_no_credential_away(tmp_path: Path) -> None:
    step = "RUN HF_TOKEN=hf_abcdefgh pip install https://user:geheim@host/x?sig=geheim2"
    report = written(tmp_path, 1, [{"created_by": step}])
    text = json.dumps(report)
    assert "pip install https://host/x" in text
    assert not any(word in text for word in ("hf_abcdefgh", "geheim"))


def test_an_image_of_qdc_has_nothing_to_hide(tmp_path: Path) -> None:
    report = untouched().audit(tmp_path)
    claims = {item["claim"]: item["verdict"] for item in report["verdicts"]}
    assert claims["deploy.hardware"] == "proved"
    assert not any(claim.startswith("compliance.") and word != "recorded" for claim, word in claims.items())
    assert {claims[name] for name in ("packages", "image.history", "image.flattened", "target.weights")} == {"recorded"}


def test_many_packages_and_libraries_take_little_memory(tmp_path: Path) -> None:
    files: dict[str, Content] = {f"opt/{number}/k.so": TWO for number in range(60)}
    for number in range(40):
        files |= package(f"p{number}", "1", {f"p{number}/m{n}.py": b"x" * 100 for n in range(20)})
    tracemalloc.start()
    report = audited(tmp_path, files)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert row(report, "packages.files")["value"]["hashed"] == 40 * 21
    assert peak < 100 << 20
