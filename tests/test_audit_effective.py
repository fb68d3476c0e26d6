"""Settings in force: `docker run` over ENV, scripts, declared launchers, the engine's own precedence; and verdicts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import entrypoints
import pytest
from shell_cases import Tree
from test_audit_images import drafter_json, drafter_weights, named, recipe, row, target_config, target_weights
from test_formats_images import Content, layout_blobs, make_config, make_tar, write_layout

from qdc.audit import launchers
from qdc.audit.audit import audit, exit_code
from qdc.audit.container import run_arguments, start
from qdc.audit.effective import Configuration, configuration, trace
from qdc.audit.engine_words import Effective, effective
from qdc.audit.shell_files import ImageFiles
from qdc.audit.shell_state import Launch, Place, Value, unknown
from qdc.core.errors import QdcError
from qdc.formats import oci

PLACE = Place("file", "/start.sh", 1)


def found(files: dict[str, str], settings: dict[str, Any], run: str | None = None) -> Configuration:
    image = Tree({f"/{path.strip('/')}": text.encode() for path, text in files.items()}, set())
    first = start(settings, run_arguments(run) if run else None)
    seen = ImageFiles(image, first.mounts)  # type: ignore[arg-type]
    return configuration(seen, first, trace(seen, first, sh="dash"))


def value(result: Configuration, name: str) -> Any:
    setting = result.result.get(name)
    return setting.value if setting is not None and setting.known else None


def history(result: Configuration, name: str) -> list[tuple[str | None, str]]:
    setting = result.result.get(name)
    assert setting is not None
    return [(item.text, str(item.place)) for item in (setting.source, *setting.source.beat)]


def engine(*words: str | Value, form: str = "serve", config: str | None = None) -> Effective:
    held = tuple(word if isinstance(word, Value) else Value(word, PLACE) for word in words)
    return effective(form, held, lambda path: None if config is None else Value(config, Place("file", "/c.yaml", 1)))


# ---- docker run


ENTRY = {"Entrypoint": ["/bin/sh", "-c", 'exec vllm serve /m --max-model-len $LEN "$@"', "sh"],
         "Cmd": ["--max-num-seqs", "4"], "Env": ["LEN=1024"]}  # fmt: skip


def test_arguments_of_docker_run_beat_env_and_cmd() -> None:
    assert value(found({}, ENTRY), "max-model-len") == "1024"
    result = found({}, ENTRY, "--gpus all -it --rm -e LEN=2048 --name x IMAGE --max-num-seqs 9")
    assert history(result, "max-model-len") == [("2048", "docker run"), ("1024", "image configuration ENV")]
    assert history(result, "max-num-seqs") == [("9", "docker run")]


@pytest.mark.parametrize("line", ["-eLEN=7 I", "--env LEN=7 I", "--env=LEN=7 I", "-ite LEN=7 I", "-e LEN=3 -e LEN=7 I",
                                  "docker run --rm -d -p 8080:8080 -v /a:/b -e 'LEN=7' I"])  # fmt: skip
def test_variables_are_given_in_many_forms(line: str) -> None:
    assert value(found({}, ENTRY, line), "max-model-len") == "7"


def test_another_entrypoint_drops_cmd() -> None:
    result = found({}, {**ENTRY, "Cmd": ["--ignored"]}, "--entrypoint vllm IMAGE serve /other")
    assert value(result, "model") == "/other"
    result = found({}, ENTRY, '--entrypoint "" IMAGE vllm serve /other')
    assert value(result, "model") == "/other"


def test_a_variable_that_the_caller_has_is_not_known() -> None:
    result = found({}, ENTRY, "-e LEN IMAGE")
    setting = result.result.get("max-model-len")
    assert setting is not None
    assert not setting.known
    assert str(setting.source.place) == "docker run"


@pytest.mark.parametrize(
    "line", ["-e K=4", "--env-file x IMAGE", "--volumes-from x IMAGE", "-e 'A B=1' IMAGE", "'", "-e"]
)
def test_what_cannot_be_read_of_a_run_line_is_wrong_use(line: str) -> None:
    with pytest.raises(QdcError) as caught:
        run_arguments(line)
    assert caught.value.id == "audit.run"
    assert caught.value.exit_code == 2


# ---- the engine's own precedence


def test_an_argument_beats_the_config_file_and_the_last_of_two_wins() -> None:
    text = "model: /cfg\nmax-model-len: 10\nmax_num_seqs: 2\nspeculative-config:\n  method: ngram\n"
    result = engine("/m", "--max-model-len", "20", "--config", "/c.yaml", "--max_model_len=30", config=text)
    setting = result.settings["max-model-len"]
    assert setting.value == "30"
    assert [(item.text, item.place.line) for item in setting.source.beat] == [("20", 1), ("10", 2)]
    assert result.settings["max-num-seqs"].value == "2"
    assert result.settings["speculative-config"].value == {"method": "ngram"}
    assert result.settings["model"].value == "/m"


def test_a_config_file_is_read_from_a_separate_word_only() -> None:
    result = engine("/m", "--config=/c.yaml", config="max-model-len: 10\n")
    assert "max-model-len" not in result.settings


def test_dotted_arguments_replace_the_whole_object() -> None:
    result = engine("/m", "--speculative-config", '{"method":"ngram","num_speculative_tokens":4}',
                    "--speculative-config.num_speculative_tokens", "7")  # fmt: skip
    assert result.settings["speculative-config"].value == {"num_speculative_tokens": 7}


def test_short_speculative_arguments_join_in() -> None:
    result = engine("/m", "--spec-method", "dflash", "--spec-model", "/d", "--spec-tokens", "15")
    assert result.settings["speculative-config"].value == {
        "method": "dflash", "model": "/d", "num_speculative_tokens": 15
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "model"),
    [(("/a", "--dtype", "half"), "/a"), (("--dtype", "half", "--model", "/b"), "/b"), (("--model=/c",), "/c")],
)
def test_a_model_is_a_word_or_an_argument(words: tuple[str, ...], model: str) -> None:
    assert engine(*words).settings["model"].value == model


def test_two_models_are_not_decided() -> None:
    result = engine("/a", "--model", "/b", "--dtype", "half")
    assert not result.settings["model"].known
    assert not result.settings["dtype"].known
    assert result.problems


def test_an_unknown_word_takes_what_stands_before_it_and_nothing_after() -> None:
    extra = unknown(Place("file", "/start.sh", 9), "the output of curl", many=True)
    result = engine("/m", "--max-model-len", "8", "--dtype", "half", extra, "--dtype", "bfloat16")
    assert not result.settings["max-model-len"].known
    assert result.settings["dtype"].value == "bfloat16"
    seqs = result.get("max-num-seqs")
    assert seqs is not None
    assert not seqs.known
    assert seqs.source.place.line == 9


def test_an_unknown_value_is_unknown_alone() -> None:
    lost = unknown(PLACE, "the output of curl")
    result = engine("/m", "--max-model-len", lost, "--dtype", "half")
    assert not result.settings["max-model-len"].known
    assert result.settings["dtype"].value == "half"
    assert result.get("max-num-seqs") is None


def test_an_abbreviation_may_be_the_argument() -> None:
    result = engine("/m", "--max-model", "8")
    setting = result.get("max-model-len")
    assert setting is not None
    assert not setting.known


@pytest.mark.parametrize("text", ["&a [*a]\n", "- list\n", "a: [\n", "x: !!python/object/apply:os.system [ls]\n"])
def test_a_config_file_that_is_not_plain_is_not_decided(text: str) -> None:
    result = engine("/m", "--dtype", "half", "--config", "/c.yaml", config=text)
    assert result.settings["dtype"].value == "half"
    setting = result.get("max-model-len")
    assert setting is not None
    assert not setting.known


def test_a_config_file_that_the_script_wrote_is_known_to_its_line() -> None:
    script = "cat > /tmp/c.yaml <<EOF\nmax-model-len: $LEN\ndtype: half\nEOF\nexec vllm serve /m --config /tmp/c.yaml\n"
    files = {"start.sh": script, "tmp/x": ""}
    result = found(files, {"Entrypoint": ["bash", "/start.sh"], "Env": ["LEN=64"]})
    assert history(result, "max-model-len") == [("64", "/start.sh:2")]


def test_a_file_that_a_stranger_may_have_changed_is_not_decided() -> None:
    files = {
        "start.sh": "/opt/tool\nexec vllm serve /m --dtype half --config /c.yaml\n",
        "c.yaml": "max-model-len: 4\n",
    }
    result = found(files, {"Entrypoint": ["bash", "/start.sh"]})
    assert value(result, "dtype") == "half"
    setting = result.result.get("max-model-len")
    assert setting is not None
    assert not setting.known
    assert str(setting.source.place) == "/start.sh:1"


# ---- declared launchers


def run_launcher(files: dict[str, str], first: str, folder: Path, env: dict[str, str]) -> list[str]:
    """The words that a launcher really starts the engine with."""
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    started: list[list[str]] = []
    stub = types.SimpleNamespace(Popen=lambda words, **_: started.append(words) or types.SimpleNamespace(wait=int))
    source = (folder / first).read_text()
    before, path_before, modules = dict(os.environ), list(sys.path), sys.modules.get("subprocess")
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, str(folder / "opt/eqc"))
    sys.modules["subprocess"] = stub  # type: ignore[assignment]
    try:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, first, "exec"), space)
        if "words_of" in space:
            space["start"]()
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.path[:] = path_before
        sys.modules["subprocess"] = modules or subprocess
        for name in [name for name in sys.modules if name.partition(".")[0] == "serving"]:
            del sys.modules[name]
    (words,) = started
    return words


def settings_of(words: list[str]) -> dict[str, Any]:
    form, rest = ("serve", words[2:]) if words[0] == "vllm" else ("api_server", words[3:])
    return {name: item.value for name, item in engine(*rest, form=form).settings.items()}


CHOICES: dict[str, list[str]] = {
    "VLLM_MAX_MODEL_LEN": ["13312", ""], "VLLM_DTYPE": ["bfloat16"], "VLLM_LANGUAGE_MODEL_ONLY": ["1", "0", "TRUE", ""],
    "VLLM_QUANTIZATION": ["awq_marlin", " awq ", ""], "VLLM_ENABLE_PREFIX_CACHING": ["1", "No", "maybe", ""],
    "VLLM_SPEC_CONFIG": [entrypoints.compact(entrypoints.SUFFIX), "", " "], "VLLM_ENFORCE_EAGER": ["1", "0"],
    "VLLM_CUDAGRAPH_CAPTURE_SIZES": ["21 42", " 5 ", ""], "VLLM_KV_CACHE_DTYPE": ["fp8", ""],
    "VLLM_EXTRA_ARGS": ["--max-num-seqs 4 --max-model-len '99'", "", "--trust-remote-code"],
    "MODEL_NAME": ["some/name"], "MODEL_PATH": ["DIR/m", "DIR/none"], "VLLM_GPU_MEMORY_UTILIZATION": ["0.5"],
    "EQC_VLLM_MAX_MODEL_LEN": ["16384", "", " 77 "], "EQC_VLLM_MAX_NUM_SEQS": ["8", ""], "EQC_FORCE_EAGER": ["1", "0"],
    "EQC_GPU_MEM_CAP_FRACTION": ["0.30"], "EQC_CHAT_TEMPLATE": ["/t.jinja", ""], "EQC_VLLM_DP_SIZE": ["4", ""],
    "EQC_CUDAGRAPH_MODE": ["PIECEWISE", ""], "EQC_MAMBA_SSM_DTYPE": ["float32"], "EQC_MAMBA_DTYPE": ["float16", ""],
    "EQC_CONFIG_PATH": ["DIR/c.yaml", "DIR/none.yaml", ""],
}  # fmt: skip
LINES = ["model: /yaml", "quant: compressed-tensors", "quant: null", "tokenizer: /t", "trust_remote_code: true",
         "trust_remote_code: false", "chat_template: /y.jinja", "speculative_config: {method: ngram, k: 3}",
         "speculative_config: '{\"method\": \"mtp\"}'"]  # fmt: skip
INNER = ["max_model_len: 100", "enforce_eager: true", "enforce_eager: false", "max_num_seqs: 3", "dtype: half",
         "block_size: 32", "enable_prefix_caching: true", "enable_prefix_caching: false", "kv_cache_dtype: fp8",
         "enable_chunked_prefill: false", "language_model_only: true", "cudagraph_mode: FULL",
         "mamba_ssm_cache_dtype: float32", "attention_backend: FLASH_ATTN"]  # fmt: skip


def once(lines: list[str]) -> list[str]:
    return list({line.partition(":")[0]: line for line in lines}.values())


def random_yaml(chance: random.Random) -> str:
    text = "".join(f"{line}\n" for line in once(chance.sample(LINES, 4)))
    inner = "".join(f"  {line}\n" for line in once(chance.sample(INNER, chance.randint(1, 6))))
    return chance.choice([text, f"{text}vllm_args:\n{inner}", f"{text}vllm_args:\n{inner}", "[]\n"])


@pytest.mark.parametrize("which", ["second", "third"])
def test_a_declared_launcher_makes_the_words_that_it_really_makes(which: str, tmp_path: Path) -> None:
    chance = random.Random(which)
    texts, _ = entrypoints.second() if which == "second" else entrypoints.third()
    script = "opt/program/serve_default.py" if which == "second" else "opt/eqc/serving/app.py"
    names = [name for name in CHOICES if name.startswith("EQC") == (which == "third")]
    for number in range(120):
        folder = tmp_path / str(number)
        files = {**texts, "c.yaml": random_yaml(chance), "m/config.json": "{}"}
        if chance.random() < 0.5:
            files["m/chat_template.jinja"] = "x"
        env = {
            name: chance.choice(CHOICES[name]).replace("DIR", str(folder)) for name in names if chance.random() < 0.6
        }
        if which == "third":
            env["PYTHONPATH"] = f"{folder}/opt/eqc"
        real = run_launcher(files, script, folder, env)
        image = Tree({f"{folder}/{path}": text.encode() for path, text in files.items()}, set())
        seen = ImageFiles(image)  # type: ignore[arg-type]
        start_words = ["python3", f"{folder}/{script}"] if which == "second" else ["python3", "-m", "serving"]
        held = {name: Value(text, Place("ENV")) for name, text in env.items()}
        launch = Launch(tuple(Value(word, PLACE) for word in start_words), held, PLACE, Value("/", PLACE))

        def read(path: str, seen: ImageFiles = seen) -> Value | None:
            text = seen.text(path) if seen.kind(path) == "file" else None
            return None if text is None else Value(text, Place("file", path, 1))

        made = launchers.command(launch, read)
        assert made.why is None, made.why
        told = {name: item.value for name, item in effective(made.form, made.words, lambda _: None).settings.items()}
        really = settings_of(real)
        assert told == {name: really[name] for name in told}, (env, files["c.yaml"])
        assert set(really) - set(told) <= {"port"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("VLLM_DTYPE", "VLLM_OTHER_DTYPE"), "does not read VLLM_DTYPE"),
        (("PORTS = ", 'EXTRA = os.environ.get("VLLM_K", "4")\nPORTS = '), "names VLLM_K"),
        (("return subprocess", 'cmd += ["--max-num-seqs", "4"]\n    return subprocess'), "gives --max-num-seqs"),
        (("import os", "import os ("), "no Python text"),
    ],
)
def test_a_launcher_that_is_not_quite_the_declared_one_is_not_decided(change: tuple[str, str], why: str) -> None:
    files, env = entrypoints.second()
    files = {path: text.replace(*change) for path, text in files.items()}
    result = found(files, {"Entrypoint": ["python3", "/opt/program/serve_default.py"], "Env": env})
    assert result.why is not None
    assert why in result.why.why
    assert result.why.place.path == "/opt/program/serve_default.py"


def test_the_declared_launchers_are_well_formed() -> None:
    keys = {"name", "source", "module", "script", "text", "form", "config", "reads", "options", "fixed", "unless",
            "rules", "unpublished"}  # fmt: skip
    for adapter in launchers.declared():
        assert set(adapter) <= keys, adapter["name"]
        assert adapter["form"] in ("serve", "api_server")
        for rule in adapter["rules"]:
            assert set(rule) <= {"flag", "switch", "words", "from", "as", "when", "or", "else", "folder_with"}, rule


# ---- verdicts

MODELS: dict[str, Content] = {
    "opt/ml/model/config.json": target_config(),
    "opt/ml/model/model.safetensors": target_weights(),
    "opt/ml/dflash-model/config.json": drafter_json(
        recipe(drafter__swa=None, drafter__architecture__draft_block_size=16)
    ),
    "opt/ml/dflash-model/model.safetensors": drafter_weights(),
}


def report_of(
    folder: Path, laid: tuple[dict[str, str], list[str]], entry: list[str], tag: str | None = None, **options: Any
) -> dict[str, Any]:
    files, env = laid
    layers = [make_tar(MODELS), make_tar({path: text.encode() for path, text in files.items()})]
    path = write_layout(folder, layout_blobs(make_config(layers, {"Entrypoint": entry, "Env": env}), layers, tag))
    return audit(oci.open_image(path), **options)


SIXTH = ["bash", "/opt/program/entrypoint.sh"]


def shown(report: dict[str, Any], claim: str) -> list[str]:
    return [f"{item['text']} | {item['path']}" for item in row(report, claim)["evidence"]]


def test_the_sourced_file_decides_k_against_env(tmp_path: Path) -> None:
    laid = entrypoints.sixth(entrypoints.NGRAM, entrypoints.DFLASH)
    report = report_of(
        tmp_path, laid, SIXTH, require=["serve.k=15", "drafter.kind=dflash", "serve.max_model_len=13312"]
    )
    for claim in ("serve.k", "drafter.kind", "serve.max_model_len"):
        assert row(report, claim)["verdict"] == "proved"
    lines = shown(report, "serve.k")
    assert lines[0] == "num_speculative_tokens 15 (line 4) | /opt/program/config.sh"
    assert lines[1].startswith('beats {"method":"ngram"')
    assert lines[1].endswith("(image configuration)")
    assert row(report, "serve.environment[SPECULATIVE_CONFIG]")["verdict"] == "refuted"
    assert row(report, "serve.environment[MAX_MODEL_LEN]")["value"] == "13312"
    assert exit_code(report) == 1


def test_env_decides_where_no_file_is_sourced(tmp_path: Path) -> None:
    laid = entrypoints.sixth(entrypoints.DFLASH, None)
    report = report_of(tmp_path, laid, SIXTH, require=["serve.k=15", "serve.dtype=half"])
    assert row(report, "serve.k")["verdict"] == "proved"
    assert named(report, "refuted") == []


def test_docker_run_is_beaten_by_the_sourced_file_too(tmp_path: Path) -> None:
    laid = entrypoints.sixth(entrypoints.DFLASH, entrypoints.DFLASH)
    run = f"-e SPECULATIVE_CONFIG='{entrypoints.compact(entrypoints.NGRAM)}' -e DTYPE=float16 IMAGE"
    report = report_of(tmp_path, laid, SIXTH, require=["serve.k=15"], run=run)
    assert row(report, "serve.k")["verdict"] == "proved"
    assert any("docker run" in line for line in shown(report, "serve.k"))
    assert row(report, "serve.dtype")["value"] == "float16"


@pytest.mark.parametrize("tag", ["team:dflash-r6v2", "team:dflash-r6v12"])
def test_a_tag_that_says_dflash_over_ngram_in_force_is_refuted_with_its_line(tag: str, tmp_path: Path) -> None:
    laid = entrypoints.sixth(entrypoints.DFLASH, entrypoints.NGRAM)
    report = report_of(tmp_path, laid, SIXTH, tag)
    assert row(report, "drafter.kind")["verdict"] == "refuted"
    assert row(report, "drafter.kind")["value"] == "ngram"
    assert shown(report, "drafter.kind")[0] == "method ngram (line 4) | /opt/program/config.sh"
    found = {claim: row(report, claim)["value"] for claim in named(report, "recorded")}
    assert found["serve.k"] == 20
    assert found["drafter.architecture.prompt_lookup_max"] == 8
    assert exit_code(report) == 1


def test_suffix_decoding_is_read_from_the_proxys_variable(tmp_path: Path) -> None:
    entry = ["python3", "/opt/program/serve_default.py"]
    report = report_of(tmp_path, entrypoints.second(), entry, require=["drafter.kind=suffix", "serve.k=20"])
    assert row(report, "drafter.kind")["verdict"] == "proved"
    assert row(report, "serve.k")["verdict"] == "proved"
    found = {claim: row(report, claim)["value"] for claim in named(report, "recorded")}
    assert found["drafter.architecture.max_spec_factor"] == 3.0
    assert found["serve.dtype"] == "bfloat16"
    assert found["serve.engine.prefix_caching"] is True
    assert found["serve.arguments[cudagraph-capture-sizes]"] == ["21", "42"]


@pytest.mark.parametrize(("variable", "window"), [("1024", 1024), (None, None), ("x", None)])
def test_a_window_that_a_plugin_is_told_is_shown_and_not_proved(
    variable: str | None, window: int | None, tmp_path: Path
) -> None:
    laid = entrypoints.third(**({} if variable is None else {"EQC_DFLASH_SWA_WINDOW": variable}))
    report = report_of(tmp_path, laid, ["python3", "-m", "serving"], require=["drafter.swa.window=1024"])
    assert row(report, "drafter.swa.window")["value"] == window
    assert row(report, "drafter.swa.window")["verdict"] == ("unread" if window else "refuted")
    assert row(report, "serve.k")["value"] == 15
    if window:
        assert "eqc-dflash reads EQC_DFLASH_SWA_WINDOW" in shown(report, "drafter.swa.window")[1]


def test_the_yaml_file_gives_its_lines(tmp_path: Path) -> None:
    report = report_of(tmp_path, entrypoints.third(EQC_VLLM_MAX_MODEL_LEN="16384"), ["python3", "-m", "serving"])
    assert shown(report, "serve.k")[0] == "num_speculative_tokens 15 (line 5) | /opt/eqc/serve.yaml"
    lines = shown(report, "serve.max_model_len")
    assert row(report, "serve.max_model_len")["value"] == 16384
    assert lines[1] == "beats 8704 (line 10) | /opt/eqc/serve.yaml"
    assert lines[2] == "beats 8704 (line 14) | /opt/eqc/serving/app.py"


def test_a_yaml_file_that_is_not_there_means_the_launchers_silent_default(tmp_path: Path) -> None:
    laid = entrypoints.third(EQC_CONFIG_PATH="/opt/eqc/wrong.yaml")
    report = report_of(tmp_path, laid, ["python3", "-m", "serving"], require=["drafter.kind=dflash", "serve.k=15"])
    assert row(report, "drafter.kind")["verdict"] == "refuted"
    assert row(report, "serve.arguments[model]")["value"] == "Qwen/Qwen3.5-4B"
    assert any("takes its own defaults, silently" in line for line in shown(report, "serve.start"))


def test_what_a_script_computes_is_unread_and_the_rest_is_known(tmp_path: Path) -> None:
    script = (
        "#!/bin/bash\nSEQS=$(curl -s http://host/seqs)\n"
        f"exec vllm serve /opt/ml/model --max-num-seqs \"$SEQS\" -sc '{json.dumps(entrypoints.DFLASH)}'\n"
    )
    report = report_of(tmp_path, ({"start.sh": script}, []), ["bash", "/start.sh"],
                       require=["serve.max_num_seqs=8", "serve.k=15"])  # fmt: skip
    assert row(report, "serve.k")["verdict"] == "proved"
    assert row(report, "serve.max_num_seqs")["verdict"] == "unread"
    assert "/start.sh:2" in row(report, "serve.max_num_seqs")["evidence"][0]["text"]
    assert exit_code(report) == 3


def test_two_engines_that_differ_are_not_decided(tmp_path: Path) -> None:
    script = "vllm serve /opt/ml/model --max-model-len 8 --dtype half &\nvllm serve /opt/ml/model --max-model-len 9 " \
             "--dtype half &\nwait\n"  # fmt: skip
    report = report_of(tmp_path, ({"start.sh": script}, []), ["bash", "/start.sh"], require=["serve.max_model_len=8"])
    assert row(report, "serve.max_model_len")["verdict"] == "unread"
    assert row(report, "serve.dtype")["value"] == "half"
    assert row(report, "serve.engines")["value"] == 2
