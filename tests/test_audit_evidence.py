"""What an audit says of models that others made: scheme, shards, heads, tokens that end answers, drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_audit_images import named, row
from test_audit_others import report_of
from test_formats_compressed_tensors import Tensors, packed_module, plain_module, quantization_config
from test_formats_drafters import EAGLE3, SPECULATORS, ZLAB, changed
from test_formats_images import Content
from test_formats_quantized import AWQ, GPTQ, awq_module, gptq_module

from qdc.formats import safetensors

Report = dict[str, Any]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 16, "vocab_size": 100,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip
LINEARS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")]
EMBEDDING = plain_module("model.embed_tokens", 100, 64)
MAKE = {"compressed-tensors": packed_module, "awq": awq_module, "gptq": gptq_module}
TOLD: dict[str, dict[str, Any]] = {
    "compressed-tensors": quantization_config(4, 32, ["lm_head"]),
    "awq": {**AWQ, "group_size": 32, "modules_to_not_convert": []},
    "gptq": {**GPTQ, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq", "dynamic": {}},
}


def linears(convention: str) -> Tensors:
    tensors = dict(EMBEDDING)
    for name in LINEARS:
        tensors |= MAKE[convention](name, 64, 64, 32)
    return tensors


def target(
    convention: str = "compressed-tensors", told: Any = ..., tensors: Tensors | None = None, **fields: Any
) -> dict[str, Content]:
    """A model folder `m`; `fields` of its config.json."""
    config = {**CONFIG, "quantization_config": TOLD[convention] if told is ... else told, **fields}
    config = {name: value for name, value in config.items() if value is not None}
    return {
        "m/config.json": json.dumps(config).encode(),
        "m/model.safetensors": safetensors.dumps(tensors or linears(convention)),
    }


def audited(folder: Path, files: dict[str, Content], *require: str, **settings: Any) -> Report:
    return report_of(folder, files, settings or {"Entrypoint": ["/start"]}, require=require)


def said(report: Report, claim: str) -> str:
    return " | ".join(item["text"] for item in row(report, claim)["evidence"])


@pytest.mark.parametrize("convention", MAKE)
def test_an_honest_folder_is_proved_in_each_convention(convention: str, tmp_path: Path) -> None:
    symmetric = "false" if convention == "awq" else "true"
    asked = [f"target.quantization.scheme.{text}" for text in ("bits=4", "group_size=32", f"symmetric={symmetric}")]
    report = audited(tmp_path, target(convention), *asked, 'target.quantization.modules={"quantized":4,"plain":1}')
    assert named(report, "refuted") == []
    for claim in asked:
        assert row(report, claim.partition("=")[0])["verdict"] == "proved"
    assert row(report, "target.quantization.modules")["verdict"] == "proved"
    assert row(report, "target.quantization.format")["value"] == convention
    assert row(report, "target.weights")["value"]["files"] == ["model.safetensors"]
    for name in ("architecture", "max_position_embeddings", "rope", "head", "eos", "vocab_size"):
        assert row(report, f"target.{name}")["verdict"] == "recorded", name


LIES: list[tuple[str, dict[str, Any], str, str]] = [
    ("awq", {"bits": 8}, "bits", "config.json says bits 8, the tensors say 4"),
    ("awq", {"group_size": 128}, "group_size", "config.json says group_size 128, the tensors say 32"),
    ("awq", {"zero_point": False}, "symmetric", "config.json says symmetric True, the tensors say False"),
    ("gptq", {"group_size": 64}, "group_size", "config.json says group_size 64, the tensors say 32"),
    ("gptq", {"sym": False}, "symmetric", "config.json says symmetric False, the tensors say True"),
    ("gptq", {"bits": "4"}, "bits", "bits is '4', not a whole number"),
]


@pytest.mark.parametrize(("convention", "lie", "claim", "text"), LIES)
def test_a_config_that_lies_is_shown_beside_the_tensors(
    convention: str, lie: dict[str, Any], claim: str, text: str, tmp_path: Path
) -> None:
    files = target(convention, {**TOLD[convention], **lie})
    id = f"target.quantization.scheme.{claim}"
    unasked = audited(tmp_path / "a", files)
    assert row(unasked, id)["verdict"] == "unread" and text in said(unasked, id)
    value = json.dumps(row(unasked, id)["value"])
    asked = audited(tmp_path / "b", files, f"{id}={value}")
    assert row(asked, id)["verdict"] == "refuted" and text in said(asked, id)


@pytest.mark.parametrize(
    ("convention", "lie", "claim", "text"),
    [
        ("awq", {"quant_method": "gptq"}, "format", "config.json says gptq, the tensors are laid out as awq"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "format", "zero points of 7 are gptq's, config.json says gptq_v2"),
    ],
)
def test_a_convention_is_told_from_the_layout(
    convention: str, lie: dict[str, Any], claim: str, text: str, tmp_path: Path
) -> None:
    report = audited(tmp_path, target(convention, {**TOLD[convention], **lie}))
    found = row(report, f"target.quantization.{claim}")
    assert found["verdict"] == "unread" and text in said(report, f"target.quantization.{claim}")


def test_columns_in_another_order_refute_desc_act_false(tmp_path: Path) -> None:
    tensors = {**EMBEDDING, **gptq_module(LINEARS[0], 64, 64, 32, order=[1, 0] * 32)}
    report = audited(tmp_path, target("gptq", tensors=tensors))
    found = row(report, "target.quantization.act_order")
    assert found["value"] is True and found["verdict"] == "unread"
    assert "config.json says they are not" in said(report, "target.quantization.act_order")


def test_spared_modules_of_awq_are_compared_with_the_file(tmp_path: Path) -> None:
    plain = {name: tensor for name, tensor in linears("awq").items() if not name.startswith(LINEARS[0])}
    plain |= plain_module(LINEARS[0], 64, 64)
    honest = target("awq", {**TOLD["awq"], "modules_to_not_convert": ["layers.0.self_attn"]}, plain)
    assert row(audited(tmp_path / "a", honest), "target.quantization.ignore")["verdict"] == "recorded"
    report = audited(tmp_path / "b", target("awq", tensors=plain))
    assert row(report, "target.quantization.ignore")["verdict"] == "unread"
    assert f"{LINEARS[0]} is neither quantized nor ignored" in said(report, "target.quantization.ignore")


def test_members_of_one_matrix_of_the_engine_must_be_stored_alike(tmp_path: Path) -> None:
    tensors = {**EMBEDDING, **packed_module("model.layers.0.mlp.up_proj", 64, 64, 32)}
    tensors |= packed_module("model.layers.0.mlp.gate_proj", 64, 64, 64)
    report = audited(tmp_path, target(tensors=tensors))
    assert "are one matrix in the engine" in said(report, "target.quantization.fused")


def shards(tensors: Tensors, count: int = 2) -> dict[str, Content]:
    """Shards of the tensors and their index."""
    files: dict[str, Content] = {}
    table = {}
    names = sorted(tensors)
    for number in range(count):
        held = names[number::count]
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        files[f"m/{name}"] = safetensors.dumps({tensor: tensors[tensor] for tensor in held})
        table |= dict.fromkeys(held, name)
    files["m/model.safetensors.index.json"] = json.dumps({"weight_map": table}).encode()
    return files


def sharded() -> dict[str, Content]:
    files = target()
    del files["m/model.safetensors"]
    return files | shards(linears("compressed-tensors"))


BITS = "target.quantization.scheme.bits"


def test_whole_shards_are_proved(tmp_path: Path) -> None:
    assert row(audited(tmp_path, sharded(), f"{BITS}=4"), BITS)["verdict"] == "proved"


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_refutes(index: bool, tmp_path: Path) -> None:
    files = sharded()
    del files["m/model-00002-of-00002.safetensors"]
    if not index:
        del files["m/model.safetensors.index.json"]
    report = audited(tmp_path, files, f"{BITS}=4")
    assert row(report, BITS)["verdict"] == "refuted"
    assert "model-00002-of-00002.safetensors" in said(report, BITS)


def test_a_shard_and_a_tensor_that_the_index_does_not_name_refute(tmp_path: Path) -> None:
    stray = sharded() | {"m/model-00003-of-00002.safetensors": safetensors.dumps(plain_module("x", 2, 2))}
    report = audited(tmp_path / "a", stray, f"{BITS}=4")
    assert "is there, and the index does not name it" in said(report, BITS)
    files = sharded()
    index = json.loads(files["m/model.safetensors.index.json"] or "")
    del index["weight_map"]["model.embed_tokens.weight"]
    files["m/model.safetensors.index.json"] = json.dumps(index).encode()
    report = audited(tmp_path / "b", files, f"{BITS}=4")
    assert row(report, BITS)["verdict"] == "refuted"
    assert "model.embed_tokens.weight is in model-00001" in said(report, BITS)


def test_a_cut_shard_is_unread_and_named(tmp_path: Path) -> None:
    files = sharded()
    name = "m/model-00002-of-00002.safetensors"
    data = files[name]
    assert isinstance(data, bytes)
    report = audited(tmp_path, files | {name: data[:-1]}, f"{BITS}=4")
    assert row(report, BITS)["verdict"] == "unread"
    assert "model-00002-of-00002.safetensors" in said(report, BITS)
    assert row(report, "target.architecture")["verdict"] == "recorded"


def test_pickles_are_noted_and_not_opened(tmp_path: Path) -> None:
    files = target() | {"m/pytorch_model.bin": b"\x80\x02cos\nsystem\n(S'false'\ntR."}
    report = audited(tmp_path, files)
    assert row(report, "target.weights")["value"]["pickles"] == ["pytorch_model.bin"]
    assert "a pickle: not opened" in said(report, "target.weights")


def test_a_model_in_a_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    files: dict[str, Content] = {}
    for path, data in sharded().items():
        name = path.removeprefix("m/")
        files[f"root/hub/models--x/blobs/{name}.blob"] = data
        files[f"root/hub/models--x/snapshots/abc/{name}"] = f"../../blobs/{name}.blob"
    files["root/hub/models--x/snapshots/abc/loop.safetensors"] = "loop.safetensors"
    report = audited(tmp_path, files, f"{BITS}=4", "target.quantization.scheme.group_size=32")
    assert row(report, BITS)["verdict"] == row(report, "target.quantization.scheme.group_size")["verdict"] == "proved"
    assert row(report, BITS)["evidence"][0]["path"].startswith("/root/hub/models--x/blobs/")


def test_a_folder_is_found_behind_a_link(tmp_path: Path) -> None:
    files: dict[str, Content] = {"data": None, "data/m": None, "models": "/data"}
    files |= {path.replace("m/", "data/m/", 1): data for path, data in target().items()}
    files |= {path.replace("m/", "data/n/", 1): data for path, data in target(vocab_size=128).items()}
    report = audited(tmp_path, files, f"{BITS}=4", Entrypoint=["vllm", "serve", "--model", "/models/m"])
    assert row(report, BITS)["verdict"] == "proved"
    assert row(report, "target.vocab_size")["value"] == 100


def test_a_model_of_pickles_alone_is_unread(tmp_path: Path) -> None:
    files = {"m/config.json": target()["m/config.json"], "m/pytorch_model.bin": b"\x80\x02."}
    report = audited(tmp_path, files, f"{BITS}=4")
    assert row(report, BITS)["verdict"] == "unread" and "holds no safetensors file" in said(report, BITS)
    assert row(report, "target.architecture")["verdict"] == "recorded"


@pytest.mark.parametrize(
    ("fields", "more", "value", "verdict"),
    [
        ({}, {}, "tied", "recorded"),
        ({"tie_word_embeddings": None}, {}, "default", "recorded"),
        ({"tie_word_embeddings": False}, plain_module("lm_head", 100, 64), "own", "recorded"),
        ({"tie_word_embeddings": False}, {}, "missing", "unread"),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}, {}, "missing", "unread"),
    ],
)
def test_the_output_head_is_stored_or_tied(
    fields: dict[str, Any], more: Tensors, value: str, verdict: str, tmp_path: Path
) -> None:
    report = audited(tmp_path, target(tensors=linears("compressed-tensors") | more, **fields))
    assert (row(report, "target.head")["value"], row(report, "target.head")["verdict"]) == (value, verdict)


def test_a_promised_mtp_head_must_be_there(tmp_path: Path) -> None:
    report = audited(tmp_path / "a", target(mtp_num_hidden_layers=1))
    assert row(report, "target.mtp")["verdict"] == "unread"
    tensors = linears("compressed-tensors") | plain_module("mtp.layers.0.mlp.up_proj", 4, 4)
    report = audited(tmp_path / "b", target(tensors=tensors, mtp_num_hidden_layers=1))
    assert row(report, "target.mtp")["value"] == 1


def test_rows_of_the_embedding_are_compared_with_the_config(tmp_path: Path) -> None:
    report = audited(tmp_path, target(vocab_size=128))
    assert row(report, "target.vocab_size")["verdict"] == "unread"
    assert "the embedding has 100 rows, config.json says 128" in said(report, "target.vocab_size")


TOKENIZER = {"added_tokens": [{"id": 4, "content": "<|im_end|>", "special": True}, {"id": 2, "content": "</s>"}]}


def with_texts(generation: Any = None, eos: str = "", template: str = "", **fields: Any) -> dict[str, Content]:
    files = target(**fields) | {
        "m/tokenizer.json": json.dumps(TOKENIZER).encode(),
        "m/tokenizer_config.json": json.dumps({"eos_token": eos}).encode(),
        "m/chat_template.jinja": template.encode(),
    }
    if generation is not None:
        files["m/generation_config.json"] = json.dumps({"eos_token_id": generation, "temperature": 0.6}).encode()
    return files


@pytest.mark.parametrize(
    ("files", "verdict", "text"),
    [
        (with_texts(2), "recorded", "generation_config.json: eos_token_id [2]"),
        (with_texts([2, 4]), "recorded", "config.json: eos_token_id [2]"),
        (with_texts(4), "unread", "config.json ends answers at 2, generation_config.json at [4]"),
        (with_texts(2, "<|im_end|>"), "unread", "the tokenizer's eos_token is [4], answers end at [2]"),
        (with_texts(2, template="{{ m }}<|im_end|>"), "unread", "the chat template ends turns with [4]"),
        (with_texts([2, 4], "<|im_end|>", "{{ m }}<|im_end|>"), "recorded", "ends turns with <|im_end|>"),
        (with_texts(200), "refuted", "token 200 has no row: the embedding has 100"),
    ],
)
def test_tokens_that_end_answers_are_laid_beside_each_other(
    files: dict[str, Content], verdict: str, text: str, tmp_path: Path
) -> None:
    report = audited(tmp_path, files)
    assert row(report, "target.eos")["verdict"] == verdict
    assert text in said(report, "target.eos")


def test_claims_of_end_tokens_are_sets(tmp_path: Path) -> None:
    files = with_texts([2, 4])
    asked = ["target.eos=[4,2]", "target.eos.generation_config=[2,4]", "target.eos.config=2"]
    report = audited(tmp_path / "a", files, *asked)
    assert all(row(report, claim.partition("=")[0])["verdict"] == "proved" for claim in asked)
    report = audited(tmp_path / "b", files, "target.eos=[[2]]", "target.eos.config=[2,4]")
    assert row(report, "target.eos")["verdict"] == row(report, "target.eos.config")["verdict"] == "refuted"


def test_texts_have_digests(tmp_path: Path) -> None:
    files = with_texts(2, template="{{ x }}")
    settings = {"eos_token": "", "chat_template": [{"name": "tools", "template": "{{ y }}"}]}
    files["m/tokenizer_config.json"] = json.dumps(settings).encode()
    report = audited(tmp_path, files)
    assert set(row(report, "target.chat_template")["value"]) == {"chat_template.jinja", "tokenizer_config.json:tools"}
    assert set(row(report, "target.tokenizer")["value"]) == {"tokenizer.json", "tokenizer_config.json"}
    assert row(report, "target.generation")["value"] == {"temperature": 0.6}


def drafter(config: dict[str, Any], inputs: int = 192, more: Tensors | None = None) -> dict[str, Content]:
    """The target and a drafter `d`; `inputs` of its `fc`."""
    tensors = plain_module("fc", 64, inputs) | plain_module("norm", 64)
    for layer in range(2):
        tensors |= plain_module(f"layers.{layer}.mlp.gate_proj", 64, 64)
    weights = safetensors.dumps(tensors | (more or {}))
    return target() | {"d/config.json": json.dumps(config).encode(), "d/model.safetensors": weights}


TAPS = "drafter.architecture.taps"


@pytest.mark.parametrize(("config", "convention"), [(ZLAB, "layers"), (SPECULATORS, "hidden-states")])
def test_taps_are_proved_in_one_convention(config: dict[str, Any], convention: str, tmp_path: Path) -> None:
    asked = [f"{TAPS}=[1,8,15]", "drafter.architecture.draft_block_size=16", "drafter.architecture.mask_token_id=3",
             "drafter.swa.window=null", "drafter.architecture.rope_theta=10000.0"]  # fmt: skip
    report = audited(tmp_path, drafter(config), *asked)
    for claim in asked:
        assert row(report, claim.partition("=")[0])["verdict"] == "proved", claim
    assert row(report, "drafter.architecture.convention")["value"] == convention
    assert row(report, "drafter.causal")["value"] is False


def test_hidden_state_numbers_are_not_taps(tmp_path: Path) -> None:
    report = audited(tmp_path, drafter(SPECULATORS), f"{TAPS}=[2,9,16]")
    assert row(report, TAPS)["verdict"] == "refuted"
    assert "aux_hidden_state_layer_ids [2, 9, 16] count hidden states: taps [1, 8, 15]" in said(report, TAPS)


@pytest.mark.parametrize(
    ("files", "claim", "text"),
    [
        (drafter(ZLAB, inputs=128), TAPS, "fc takes 128 inputs, 3 taps of 64 make 192"),
        (drafter(changed(ZLAB, dflash_config__target_layer_ids=[1, 8, 16])), TAPS, "leave the target's layers 0..15"),
        (drafter(changed(ZLAB, dflash_config__target_layer_ids=[8, 1, 15])), TAPS, "do not rise"),
        (drafter(changed(ZLAB, dflash_config__mask_token_id=100)), "drafter.architecture.mask_token_id", "no row"),
        (drafter(changed(ZLAB, num_hidden_layers=3)), "drafter.architecture.layers", "the weights have 2"),
        (drafter(changed(ZLAB, vocab_size=128)), "drafter.vocab_size", "the drafter has 128 tokens, the target 100"),
        (drafter(changed(SPECULATORS, draft_vocab_size=32)), "drafter.architecture.draft_vocab_size", "(d2t)"),
        (drafter(changed(ZLAB, rope_scaling={"rope_theta": 5.0})), "drafter.architecture.rope_theta", "several"),
    ],
)
def test_a_drafter_that_does_not_fit_is_named(files: dict[str, Content], claim: str, text: str, tmp_path: Path) -> None:
    report = audited(tmp_path, files)
    assert row(report, claim)["verdict"] == "unread" and text in said(report, claim)


def test_a_small_head_with_its_map_is_fine(tmp_path: Path) -> None:
    more = plain_module("lm_head", 32, 64) | {"d2t": ("I64", [32], bytes(256))}
    report = audited(tmp_path, drafter(changed(SPECULATORS, draft_vocab_size=32), more=more))
    assert row(report, "drafter.architecture.draft_vocab_size")["verdict"] == "recorded"


def served(speculation: dict[str, Any]) -> dict[str, Any]:
    words = ["vllm", "serve", "--model", "/m", "--speculative-config", json.dumps(speculation)]
    return {"Entrypoint": words}


@pytest.mark.parametrize(
    ("config", "method", "kind", "verdict"),
    [
        (ZLAB, "dflash", "dflash", "proved"),
        (changed(ZLAB, architectures=["DFlash2DraftModel"]), "dflash", "dflash2", "proved"),
        (EAGLE3, "eagle3", "eagle3", "proved"),
        (EAGLE3, "dflash", "dflash", "refuted"),
        (CONFIG, "draft_model", "draft-model", "proved"),
        (CONFIG, "dflash", "dflash", "refuted"),
    ],
)
def test_the_kind_is_what_the_engine_and_the_weights_say(
    config: dict[str, Any], method: str, kind: str, verdict: str, tmp_path: Path
) -> None:
    settings = served({"method": method, "model": "/d", "num_speculative_tokens": 3})
    report = audited(tmp_path, drafter(config), f"drafter.kind={kind}", **settings)
    assert row(report, "drafter.kind")["verdict"] == verdict


def test_mtp_needs_a_head_in_the_target(tmp_path: Path) -> None:
    report = audited(tmp_path, target(), "drafter.kind=mtp", **served({"method": "mtp", "num_speculative_tokens": 2}))
    assert row(report, "drafter.kind")["verdict"] == "refuted"
    assert "the target stores no MTP head" in said(report, "drafter.kind")


@pytest.mark.parametrize(
    ("k", "anchor", "verdict"), [(15, False, "proved"), (16, False, "refuted"), (16, True, "proved")]
)
def test_k_beyond_the_draft_block_is_refuted(k: int, anchor: bool, verdict: str, tmp_path: Path) -> None:
    config = changed(ZLAB, sample_from_anchor=anchor)
    settings = served({"method": "dflash", "model": "/d", "num_speculative_tokens": k})
    assert row(audited(tmp_path, drafter(config), f"serve.k={k}", **settings), "serve.k")["verdict"] == verdict


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"a":1,"a":2}', b"\xff", b"[" * 5000, b'{"weight_map": 5}'])
def test_malformed_files_are_no_crash(name: str, data: bytes, tmp_path: Path) -> None:
    report = audited(tmp_path, with_texts(2) | {f"m/{name}": data})
    assert named(report, "refuted") == []


@pytest.mark.parametrize("value", [None, 5, "x", [], [1, "a"], {"a": {}}, 1 << 80, -1, True, [[1]], 1.5])
@pytest.mark.parametrize(
    "field", [*CONFIG, "text_config", "quantization_config", "mtp_num_hidden_layers", "rope_parameters"]
)
def test_settings_of_any_type_are_no_crash(field: str, value: Any, tmp_path: Path) -> None:
    files = with_texts(2)
    config = json.loads(files["m/config.json"] or "")
    audited(tmp_path, files | {"m/config.json": json.dumps({**config, field: value}).encode()})
