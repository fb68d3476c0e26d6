"""What each contract asks, and that serve.json and the start settings of an image follow it."""

from __future__ import annotations

import json
from typing import Any, get_args

import image_fixtures as fixtures
import pytest

from qdc.core.errors import QdcError
from qdc.image.config import labels, oci_config
from qdc.image.layers import Layer
from qdc.recipe.serving import Deploy
from qdc.serving import patches, render
from qdc.serving.contracts import contract, names


def serve(name: str) -> dict[str, Any]:
    product = {"name": "tiny", **fixtures.product(), "deploy": {"hardware": "cpu", "contract": name}}
    files = {"model.safetensors": {"size": 1, "sha256": "a" * 64}}
    digests = {patch: patches.patch_digest(patch) for patch in render.patches_of(product["serve"]["engine"])}
    return render.serve_config(product, target_files=files, drafter_files=files, patches=digests)


def test_a_recipe_may_ask_for_every_contract_and_for_no_other() -> None:
    assert set(names()) == set(get_args(Deploy.model_fields["contract"].annotation))
    with pytest.raises(QdcError) as caught:
        contract("kserve")
    assert "sagemaker" in str(caught.value.hint)


@pytest.mark.parametrize("name", names())
def test_every_field_of_a_contract_has_a_source(name: str) -> None:
    asked = contract(name)
    fields = {field for field in asked.__dataclass_fields__ if field not in ("name", "sources")}
    assert set(asked.sources) == fields and all(asked.sources.values())
    assert asked.ping.startswith("/") and all(len(route.split()) == 2 for route in asked.routes)


@pytest.mark.parametrize(
    ("name", "port", "arguments", "ping"),
    [("adaptfm", 8080, ["serve"], "/ping"), ("sagemaker", 8080, ["serve"], "/ping"), ("openai", 8000, [], "/health")],
)
def test_an_image_starts_and_listens_as_its_contract_says(
    name: str, port: int, arguments: list[str], ping: str
) -> None:
    made = serve(name)
    assert made["arguments"][made["arguments"].index("--port") + 1] == str(port)
    assert (made["contract"]["name"], made["contract"]["ping"]) == (name, ping)
    recipe = {"name": "tiny", **fixtures.product(), "deploy": {"hardware": "cpu", "contract": name}}
    marks = labels(recipe, manifest_digest="3" * 64, recipe_digest="4" * 64)
    layers = [Layer("base", "1" * 64, 10, None, "layer.tar")]
    config = json.loads(oci_config(layers, marks, name, {"NVIDIA_VISIBLE_DEVICES": "all"}))["config"]
    assert (config["Cmd"], config["ExposedPorts"]) == (arguments, {f"{port}/tcp": {}})
    assert config["Labels"]["io.qdc.contract"] == name
    assert "NVIDIA_VISIBLE_DEVICES=all" in config["Env"]


def test_only_what_the_contract_says_differs() -> None:
    first, other = serve("adaptfm"), serve("openai")
    port = first["arguments"].index("--port") + 1
    other["arguments"][port] = first["arguments"][port]
    assert first["contract"]["routes"] != other["contract"]["routes"]
    assert {**other, "contract": first["contract"]} == first


def test_the_contest_takes_a_compressed_archive_of_20_gb() -> None:
    asked = contract("adaptfm")
    assert asked.size_limit is not None
    assert (asked.size_limit.bytes, asked.size_limit.of, asked.archive) == (20e9, "docker-save-gzip", "image.tar.gz")
