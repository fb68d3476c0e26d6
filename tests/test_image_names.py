"""Image names and configs: valid for Docker, bounded, and made of nothing but the product."""

from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from qdc.core.files import sha256_bytes
from qdc.image.config import image_name, labels, oci_config, summary
from qdc.image.layers import Layer

REFERENCE = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
NUMBER = st.integers(min_value=1, max_value=10**9)
SCHEME = st.fixed_dictionaries({"bits": NUMBER, "group_size": NUMBER, "symmetric": st.booleans()})
RECIPE = st.fixed_dictionaries(
    {
        "target": st.fixed_dictionaries(
            {
                "quantization": st.none() | st.fixed_dictionaries({"scheme": SCHEME}),
                "qad": st.none() | st.fixed_dictionaries({"schedule": st.fixed_dictionaries({"steps": NUMBER})}),
            }
        ),
        "drafter": st.none()
        | st.fixed_dictionaries(
            {
                "architecture": st.fixed_dictionaries({"kind": st.text(max_size=40), "draft_block_size": NUMBER}),
                "ptq": st.none() | st.fixed_dictionaries({"method": st.text(max_size=40), "scheme": SCHEME}),
                "swa": st.none() | st.fixed_dictionaries({"window": NUMBER}),
            }
        ),
        "serve": st.fixed_dictionaries({"k": st.none() | NUMBER}),
        "deploy": st.fixed_dictionaries({"hardware": st.text(max_size=40)}),
    }
)
TINY = {
    "name": "tiny",
    "target": {
        "quantization": {"scheme": {"bits": 4, "group_size": 32, "symmetric": True}},
        "qad": {"schedule": {"kind": "cosine", "steps": 60}},
    },
    "drafter": {
        "architecture": {"kind": "dflash", "draft_block_size": 8},
        "ptq": {"method": "gptq", "scheme": {"bits": 4, "group_size": 128, "symmetric": True}},
        "swa": {"window": 64},
    },
    "serve": {"k": 7, "engine": {"vllm": "0.32.0"}},
    "deploy": {"hardware": "cpu"},
}


@given(name=st.text(max_size=200), recipe=RECIPE, digest=st.binary(min_size=32, max_size=32))
def test_any_name_is_a_short_lower_case_docker_reference(name: str, recipe: dict[str, object], digest: bytes) -> None:
    found = image_name(name, summary(recipe), digest.hex())
    assert len(found) <= 128 and found == found.lower()
    assert REFERENCE.fullmatch(found)
    assert re.search(rf"[:-]{digest.hex()[:12]}$", found)


def test_parts_stand_in_fixed_order_and_absent_ones_are_omitted() -> None:
    assert summary(TINY) == "w4g32-qad60-dflash8k7-gptq128-swa64-cpu"
    assert summary({**TINY, "drafter": None}) == "w4g32-qad60-cpu"
    assert summary(TINY, steps=40) == "w4g32-qad40-dflash8k7-gptq128-swa64-cpu"
    without = {**TINY, "target": {**TINY["target"], "qad": None}}  # type: ignore[dict-item]
    assert summary(without) == "w4g32-dflash8k7-gptq128-swa64-cpu"
    assert image_name("tiny", summary(TINY), "ab" * 32).startswith("tiny:w4g32-qad60-dflash8k7-gptq128-swa64-cpu-abab")


def test_the_config_names_layers_start_and_labels_and_a_fixed_time() -> None:
    layers = [Layer("base", "1" * 64, 10, None, "layer.tar"), Layer("weights", "2" * 64, 10, None, "layer.tar")]
    data = oci_config(layers, labels(TINY, manifest_digest="3" * 64, recipe_digest="4" * 64))
    config = json.loads(data)
    assert config["rootfs"]["diff_ids"] == ["sha256:" + "1" * 64, "sha256:" + "2" * 64]
    assert config["config"]["Entrypoint"] == ["/usr/bin/python3", "/opt/qdc/serving/launcher.py"]
    assert config["config"]["Cmd"] == ["serve"] and config["config"]["ExposedPorts"] == {"8080/tcp": {}}
    assert config["config"]["Labels"]["io.qdc.manifest.digest"] == "sha256:" + "3" * 64
    assert config["config"]["Labels"]["io.qdc.k"] == "7" and config["config"]["Labels"]["io.qdc.window"] == "64"
    assert config["created"] == "2020-01-01T00:00:00Z" == config["history"][0]["created"]
    assert len(config["history"]) == 2
    other = oci_config(layers[::-1], labels(TINY, manifest_digest="3" * 64, recipe_digest="4" * 64))
    assert sha256_bytes(other) != sha256_bytes(data)
