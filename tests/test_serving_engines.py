"""What each engine version is told for each kind of drafter, from the recipes of published submissions: golden files.

tests/golden/serve/KIND.json groups the versions that are told the same; a version where the recipe cannot work has
the findings that say why. `GOLDEN=write` writes them anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hub_facts
import pytest

from qdc.core.errors import QdcError
from qdc.graph.support import unsupported
from qdc.recipe.load import load
from qdc.rules.check import check
from qdc.serving import engines as told
from qdc.serving import render
from qdc.tables import engines, patches
from qdc.tables.cells import read

HERE = Path(__file__).parent
EAGLE3 = (
    f"drafter={{architecture: {{kind: eagle3}}, checkpoint: {{hf: example/Qwen3.5-4B-EAGLE3, revision: {'ab' * 20}}}}}"
)
KINDS: dict[str, tuple[str, list[str]]] = {
    "dflash": ("qwen35-4b-2026", []),
    "dflash-published": ("qwen35-4b-dflash-public", ["serve.engine.patches=[]", "serve.dtype=bfloat16", "accept=[]"]),
    "ngram": ("qwen35-4b-ngram", []),
    "suffix": ("qwen35-4b-suffix", []),
    "mtp": ("qwen35-4b-mtp", []),
    "eagle3": ("qwen35-4b-mtp", [EAGLE3]),
    "none": ("qwen35-4b-mtp", ["drafter=null", "serve.k=null"]),
}
FILES = {"model.safetensors": {"size": 10, "sha256": "a" * 64}}
GPU = engines.rows("cuda")


def settings(kind: str, version: str) -> list[str]:
    """`--set` of the version, with the word that it has for standard rejection and the patches written for it."""
    methods = engines.value(version, "cuda", "rejection") or ["standard"]
    made = [f'serve.engine.vllm="{version}"', f"serve.rejection={methods[0]}"]
    if kind == "dflash":
        lacking = ("quantized-drafter", "window")
        fitting = [name for thing in lacking for name in patches.providing(thing, version, "cuda")]
        made.append(f"serve.engine.patches=[{', '.join(fitting)}]")
    return made


def rendered(kind: str, version: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """`{serve: serve.json with VERSION for the version}`, or `{refused: findings}`."""
    recipe, sets = KINDS[kind]
    loaded = load(HERE.parent / "recipes" / f"{recipe}.yaml", [*sets, *settings(kind, version), *more])
    facts = hub_facts.facts_for(loaded)
    if kind == "eagle3":
        del facts["drafter.checkpoint"]  # they are of a DFlash drafter
    found = check(replace(loaded, facts=facts))
    errors = sorted({f"{item.rule}: {item.message}" for item in found if item.severity == "error"})
    if errors:
        return {"refused": errors}
    product = {
        "name": loaded.data["name"],
        **{part: loaded.data[part] for part in ("target", "drafter", "serve", "deploy")},
    }
    engine = product["serve"]["engine"]
    weights = told.engine_row(engine)["speculation"]["kinds"].get(render.drafter_kind(product["drafter"]) or "", {})
    digests = {name: f"{index + 1:064x}" for index, name in enumerate(render.patches_of(engine))}
    made = render.serve_config(
        product, target_files=FILES, drafter_files=FILES if weights.get("weights") else None, patches=digests
    )
    made["engine"]["version"] = "VERSION"
    return {"serve": made}


@cache
def golden(kind: str) -> list[dict[str, Any]]:
    """The groups of a golden file, made anew from what is rendered."""
    groups: list[dict[str, Any]] = []
    for version in GPU:
        made = rendered(kind, version)
        same = next((group for group in groups if {**group, "versions": 0} == {"versions": 0, **made}), None)
        if same is None or "refused" in made:
            groups.append({"versions": [version], **made})
        else:
            same["versions"].append(version)
    return groups


def value_of(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_version_is_told_what_the_golden_file_says(kind: str) -> None:
    place = HERE / "golden" / "serve" / f"{kind}.json"
    shown = json.dumps(golden(kind), indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("GOLDEN") == "write":
        place.parent.mkdir(exist_ok=True)
        place.write_text(shown)
    assert json.loads(shown) == json.loads(place.read_text())
    assert sorted(version for group in golden(kind) for version in group["versions"]) == sorted(GPU)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_types_and_caches_are_said_in_every_version(kind: str) -> None:
    served = [group["serve"] for group in golden(kind) if "serve" in group]
    assert served, "no version serves it"
    for made in served:
        arguments = made["arguments"]
        speculation = json.loads(value_of(arguments, "--speculative-config")) if kind != "none" else {}
        step = 1 + speculation.get("num_speculative_tokens", 0)
        sizes = json.loads(value_of(arguments, "--compilation-config"))["cudagraph_capture_sizes"]
        seqs = int(value_of(arguments, "--max-num-seqs"))
        assert sizes == [step * count for count in range(1, seqs + 1)]
        assert value_of(arguments, "--dtype") in ("bfloat16", "float16")
        assert value_of(arguments, "--mamba-ssm-cache-dtype") in ("auto", "float32")
        assert value_of(arguments, "--kv-cache-dtype") == "auto"
        assert value_of(arguments, "--quantization") == "compressed-tensors"
        assert value_of(arguments, "--max-num-batched-tokens") == "2048", "the engine's own depends on the card"
        assert float(value_of(arguments, "--gpu-memory-utilization")) == 0.9
        assert "--no-enable-prefix-caching" in arguments and "--enforce-eager" not in arguments
        assert made["environment"]["HF_HUB_OFFLINE"] == "1"
        names = [part for part in arguments if part.startswith("--")]
        assert len(names) == len(set(names))


CPU = {
    "dflash": [],
    "ngram": ["drafter={architecture: {kind: ngram, prompt_lookup_min: 2, prompt_lookup_max: 4}}"],
    "none": ["drafter=null", "serve.k=null"],
}


def test_the_cpu_build_is_told_what_its_golden_file_says() -> None:
    made = {}
    for kind, sets in CPU.items():
        product = load(HERE.parent / "recipes" / "micro.yaml", [*sets, "evaluate.acceptance=null"]).data
        digests = {name: f"{index + 1:064x}" for index, name in enumerate(product["serve"]["engine"]["patches"])}
        weights = FILES if kind == "dflash" else None
        made[kind] = render.serve_config(product, target_files=FILES, drafter_files=weights, patches=digests)
    place = HERE / "golden" / "serve-cpu.json"
    if os.environ.get("GOLDEN") == "write":
        place.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    assert made == json.loads(place.read_text())


def test_a_packed_target_is_wrapped_for_an_engine_that_lacks_its_class() -> None:
    recipe = load(HERE.parent / "recipes" / "qwen35-4b-2026.yaml").data
    for version, wrapped in (("0.19.0", True), ("0.25.1", True), ("0.27.1", False), ("0.32.0", False)):
        engine = {**recipe["serve"]["engine"], "vllm": version}
        assert "serve.engine.vllm" not in dict(unsupported({**recipe, "serve": {**recipe["serve"], "engine": engine}}))
        assert ("--language-model-only" in told.engine_row(engine)["flags"]) == wrapped
        assert (engines.value(version, "cuda", "text-target") is False) == wrapped


def test_without_its_drafter_an_image_has_a_graph_for_every_number_of_sequences() -> None:
    made = next(group["serve"] for group in golden("dflash") if "serve" in group)
    change = made["without_drafter"]
    assert change["remove"] == ["--speculative-config"]
    assert json.loads(change["set"]["--compilation-config"]) == {"cudagraph_capture_sizes": list(range(1, 9))}


def test_the_drafter_has_its_attention_kernels_and_its_quantization() -> None:
    made = next(group["serve"] for group in golden("dflash") if "0.32.0" in group["versions"])
    assert json.loads(value_of(made["arguments"], "--speculative-config")) == {
        "attention_backend": "FLASH_ATTN",
        "method": "dflash",
        "model": "/opt/models/drafter",
        "num_speculative_tokens": 15,
        "quantization": "compressed-tensors",
        "rejection_sample_method": "standard",
    }
    own = rendered("dflash", "0.32.0", ("serve.attention_backend=FLASHINFER",))["serve"]
    assert json.loads(value_of(own["arguments"], "--speculative-config"))["attention_backend"] == "FLASHINFER"
    assert value_of(own["arguments"], "--attention-backend") == "FLASHINFER"


def test_fields_of_the_recipe_reach_the_engine() -> None:
    more = (
        "serve.engine.runner=v2",
        "serve.eager=true",
        "serve.max_num_batched_tokens=4096",
        "serve.state_dtype=bfloat16",
    )
    made = rendered("mtp", "0.33.0", more)["serve"]
    assert made["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "--enforce-eager" in made["arguments"] and "--compilation-config" not in made["arguments"]
    assert "--compilation-config" not in made["without_drafter"]["set"]
    assert value_of(made["arguments"], "--max-num-batched-tokens") == "4096"
    assert value_of(made["arguments"], "--mamba-ssm-cache-dtype") == "bfloat16"
    cached = rendered("none", "0.33.0", ("serve.engine.prefix_caching=true", "serve.cudagraph_capture_sizes=[1, 2, 8]"))
    assert "--enable-prefix-caching" in cached["serve"]["arguments"]
    assert json.loads(value_of(cached["serve"]["arguments"], "--compilation-config")) == {
        "cudagraph_capture_sizes": [1, 2, 8]
    }


def test_a_version_that_cannot_is_an_error_with_the_evidence() -> None:
    serve = load(HERE.parent / "recipes" / "qwen35-4b-2026.yaml", ['serve.engine.vllm="0.19.0"']).data
    found = dict(render.refusals(serve["serve"], serve["drafter"]))
    assert "wheel:vllm" in found["drafter.architecture.kind"]
    with pytest.raises(QdcError, match="no drafter of kind `dflash`") as caught:
        render.serve_config(serve, target_files=FILES, drafter_files=FILES, patches={})
    assert caught.value.id == "serving.drafter"
    with pytest.raises(QdcError, match="no facts") as caught:
        told.engine_row({"vllm": "0.26.0", "platform": "cuda"})
    assert "vllm 0.25.1 cuda" in str(caught.value.hint)


def test_every_version_that_is_known_can_be_told_something_and_by_whom() -> None:
    for platform in ("cuda", "cpu"):
        for version in engines.rows(platform):
            engine = {"vllm": version, "platform": platform}
            row = told.engine_row(engine)
            assert {"module", "options", "values", "speculation", "arguments", "environment"} <= set(row)
            assert all(len(source) > 20 for source in told.sources(engine))
    assert {name for name in read("engines.json")["columns"] if name in ("dflash", "dspark", "xpress")} <= set(
        told.engine_row({"vllm": "0.33.0", "platform": "cuda"})["speculation"]["kinds"]
    )
