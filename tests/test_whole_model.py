"""A published Qwen3.5 is whole, the product is its language model: taking it, and serving it where only wholes are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stage_harness import run_stage
from target_chain import IGNORE, PACK, SCHEME, Chain, build

from qdc.core.errors import QdcError
from qdc.formats import qwen35, safetensors
from qdc.methods import qwen

torch.set_num_threads(1)
COPY = {"copy": True, "chat_template": None}
VISION = {**qwen35._NO_VISION, "out_hidden_size": 32, "hidden_size": 16, "intermediate_size": 16}
SIDECARS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return build(tmp_path_factory.mktemp("chain"))


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def published(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain's model as transformers itself writes a whole one, in two files, with an MTP head as the hub has it."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    base, folder = chain.out["base"], tmp_path_factory.mktemp("published")
    text = {key: value for key, value in read(base / "config.json").items() if key != "architectures"}
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config = Qwen3_5Config(text_config={**text, "mtp_num_hidden_layers": 1}, vision_config=VISION)
    config.tie_word_embeddings = True
    torch.manual_seed(3)
    model = Qwen3_5ForConditionalGeneration(config)
    given = {qwen35.whole_name(name): tensor for name, tensor in qwen.read_weights(base).items()}
    missing, unknown = model.load_state_dict(given, strict=False)
    assert not unknown and all(name.startswith("model.visual.") or name == "lm_head.weight" for name in missing)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.zeros(32, 64, dtype=torch.bfloat16)}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, part in halves.items():
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
    index = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for name in SIDECARS:
        (folder / name).write_bytes((base / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def taken(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_stage("base", {"source": published}, COPY, tmp_path_factory.mktemp("taken"))


def test_the_language_model_of_a_published_checkpoint_is_taken(chain: Chain, published: Path, taken: Path) -> None:
    ours, given = qwen.read_weights(taken), qwen.read_weights(chain.out["base"])
    assert set(ours) - {"lm_head.weight"} == set(given) and all(torch.equal(ours[name], given[name]) for name in given)
    config = read(taken / "config.json")
    assert config["architectures"] == ["Qwen3_5ForCausalLM"] and "vision_config" not in config
    assert not [key for key in config if key.startswith("mtp_")]
    assert not {"mrope_section", "mrope_interleaved"} & set(config["rope_parameters"])
    left = read(taken / "left_out.json")
    assert "mtp.fc" in left and any(name.startswith("model.visual.") for name in left) and len(left) > 5
    index = read(taken / "model.safetensors.index.json")["weight_map"]
    assert set(index) == set(ours) and set(index.values()) == {path.name for path in taken.glob("*.safetensors")}


def test_it_says_what_transformers_says_of_the_whole(published: Path, taken: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    whole = Qwen3_5ForConditionalGeneration.from_pretrained(published, dtype=torch.float32).eval()
    ids = torch.randint(0, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = whole(input_ids=ids).logits
        ours = qwen.forward(qwen.load_model(taken), ids)
    assert torch.allclose(theirs, ours, atol=1e-4)


def test_patterns_name_modules_as_the_given_model_has_them(taken: Path, tmp_path: Path) -> None:
    params: dict[str, Any] = {"method": "rtn", "scheme": SCHEME, "calibration": None}
    whole = [*IGNORE, "re:.*visual.*", r"re:^mtp\.", "model.language_model.layers.0.mlp.up_proj"]
    made = run_stage("quantize", {"base": taken}, {**params, "ignore": whole}, tmp_path / "grid")
    found = read(made / "grid.json")
    assert "model.layers.0.mlp.up_proj" in found["ignored"] and not [n for n in found["ignored"] if "visual" in n]
    packed = run_stage("pack-target", {"base": taken, "grid": made}, {**PACK, "ignore": whole}, tmp_path / "packed")
    assert read(packed / "proof.json")["census"]["quantized"] == found["modules"]
    for odd in ("re:.*vision_tower.*", "model.layers.0.mlp.up_proj"):
        with pytest.raises(QdcError, match="names no module"):
            run_stage("quantize", {"base": taken}, {**params, "ignore": [*IGNORE, odd]}, tmp_path / odd[-9:])


def test_a_wrapped_target_has_the_same_tensors_under_a_whole_models_names(chain: Chain, tmp_path: Path) -> None:
    source = chain.out["target"]
    wrapped = run_stage("wrap-target", {"target": source}, {}, tmp_path)
    before, after = load_file(source / "ct/model.safetensors"), load_file(wrapped / "ct/model.safetensors")
    assert {qwen35.whole_name(name) for name in before} == set(after)
    assert all(torch.equal(tensor, after[qwen35.whole_name(name)]) for name, tensor in before.items())
    assert all(name.startswith("model.language_model.") for name in after)
    text, whole = read(source / "ct/config.json"), read(wrapped / "ct/config.json")
    assert whole["architectures"] == ["Qwen3_5ForConditionalGeneration"] and whole["model_type"] == "qwen3_5"
    ignored = whole["quantization_config"]["ignore"]
    assert ignored == [*map(qwen35.whole_name, text["quantization_config"]["ignore"]), "re:.*visual.*"]
    assert len(ignored) > 1
    assert "quantization_config" not in whole["text_config"]
    again = qwen35.text_of(whole)
    assert again == {key: value for key, value in text.items() if key != "quantization_config"}
    assert (wrapped / "proof.json").read_bytes() == (source / "proof.json").read_bytes()
    for name in SIDECARS:
        assert (wrapped / "ct" / name).read_bytes() == (source / "ct" / name).read_bytes()


@pytest.mark.parametrize("fault", ["no text_config", "a foreign tensor", "an FP32 matrix", "a missing layer"])
def test_a_whole_model_that_is_none_is_refused(published: Path, tmp_path: Path, fault: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in published.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    first = source / "model-00001-of-00002.safetensors"
    tensors = load_file(first)
    if fault == "no text_config":
        config = read(source / "config.json")
        del config["text_config"]
        (source / "config.json").write_text(json.dumps(config))
    elif fault == "a foreign tensor":
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(1, dtype=torch.bfloat16)
    elif fault == "an FP32 matrix":
        name = next(name for name, tensor in tensors.items() if tensor.dim() == 2 and "language_model" in name)
        tensors[name] = tensors[name].float()
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    save_file(tensors, first)
    words = {
        "no text_config": "without a text_config",
        "a foreign tensor": "is no tensor of a Qwen3_5ForConditionalGeneration",
        "an FP32 matrix": "not BF16",
        "a missing layer": "missing tensors",
    }
    with pytest.raises(QdcError, match=words[fault]):
        run_stage("base", {"source": source}, COPY, tmp_path / "out")


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
DTYPES = st.sampled_from(["U8", "BF16", "I32", "F64"])


@settings(max_examples=100)
@given(st.dictionaries(NAMES, st.tuples(DTYPES, st.integers(0, 9)), max_size=6), st.data())
def test_a_copy_under_other_names_has_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[str, int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("copy")
    given = {
        name: (dtype, [count], bytes((index + at) % 256 for at in range(count * safetensors.BITS[dtype] // 8)))
        for index, (name, (dtype, count)) in enumerate(shapes.items())
    }
    safetensors.write(folder / "a", given, {"format": "pt"})
    kept = [name for name in given if data.draw(st.booleans())]
    count = safetensors.copy(folder / "a", folder / "b", {name: f"x.{name}" for name in kept})
    header = safetensors.read_header(folder / "b")
    assert count == len(kept) and set(header.tensors) == {f"x.{name}" for name in kept}
    assert header.metadata == {"format": "pt"} and header.length % 8 == 0
    for name in kept:
        tensor = header.tensors[f"x.{name}"]
        held = (folder / "b").read_bytes()[tensor.offset : tensor.offset + tensor.size]
        assert (tensor.dtype, list(tensor.shape), held) == given[name]
    if len(kept) > 1:
        with pytest.raises(QdcError, match="the same name"):
            safetensors.copy(folder / "a", folder / "c", dict.fromkeys(kept, "one"))
