"""The content manifest depends on contents alone, and refuses what tells of the builder."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.manifest import content
from qdc.manifest.models import ContentManifest

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

H = "0123456789abcdef" * 4
PRODUCT: dict[str, Any] = {
    "target": {
        "quantization": {
            "method": "rtn",
            "scheme": {"bits": 4, "group_size": 32, "symmetric": True},
            "ignore": ["lm_head"],
        },
        "qad": {"trainable": "quantized-weights", "optimizer": {"lr": 1e-4}, "schedule": {"steps": 60}},
    },
    "drafter": {
        "architecture": {"kind": "dflash", "draft_block_size": 8, "taps": [0, 1, 2]},
        "training": [{"name": "pretrain", "steps": 300}, {"name": "finetune", "steps": 150}],
        "ptq": {"method": "gptq", "scheme": {"bits": 4, "group_size": 128, "symmetric": True}},
        "swa": {"window": 64, "semantics": "symmetric-per-query", "apply": "always"},
    },
    "serve": {
        "engine": {
            "vllm": "0.32.0",
            "platform": "cpu",
            "prefix_caching": False,
            "patches": ["amx-permission", "expand-sampling", "gdn-short-verify", "torchvision-ops"],
        },
        "k": 7,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "dtype": "bfloat16",
        "chat_template": "templates/chatml.jinja",
    },
    "deploy": {"hardware": "cpu", "contract": "adaptfm"},
    "image": {"base": {"oci": "/home/someone/base"}},
}


def serve_json(k: int = 7) -> dict[str, Any]:
    speculation = {"method": "dflash", "model": "/opt/models/drafter", "num_speculative_tokens": k}
    return {
        "schema": 1,
        "engine": {"name": "vllm", "version": "0.32.0", "platform": "cpu"},
        "arguments": ["--max-model-len", "128", "--speculative-config", json.dumps(speculation), "--enforce-eager"],
        "environment": {"OMP_NUM_THREADS": "1"},
        "weights": [
            {"path": "/opt/models/target/model.safetensors", "size": 10, "sha256": H},
            {"path": "/opt/models/drafter/model.safetensors", "size": 5, "sha256": "b" * 64},
        ],
        "patches": [{"name": "gdn-short-verify", "digest": H}],
    }


def manifest(**changed: Any) -> dict[str, Any]:
    given_: dict[str, Any] = {
        "name": "tiny",
        "product": PRODUCT,
        "lock": {},
        "artifact_digests": {"target": H},
        "target_facts": {
            "census": {"quantized": ["a"]},
            "scheme": {"bits": 4, "group_size": 32, "symmetric": True},
            "proof": {"scales": True},
            "trainable": "quantized-weights",
        },
        "drafter_facts": {"taps": [0, 1, 2], "calibration": {"conversations": 64}},
        "serve": serve_json(),
        "template_digest": H,
        "tokenizer_digest": "sha256:" + H,
        "packages_digest": H,
        "accepted": [{"rule": "DRF06", "because": "x"}],
        "licences": ["Apache-2.0"],
        "files": {"/opt/qdc/serving/launcher.py": H},
    }
    return content.content_manifest(**(given_ | changed))


def test_it_has_the_shape_that_the_schema_describes() -> None:
    document = manifest()
    ContentManifest.model_validate(document)
    assert document["serving"]["tokenizer"] == H
    assert document["files"] == {"opt/qdc/serving/launcher.py": H}
    assert document["recipe"]["serve"]["chat_template"] == f"sha256:{H}"
    ContentManifest.model_validate(manifest(drafter_facts=None))


def test_where_the_builder_kept_things_does_not_matter() -> None:
    elsewhere = copy.deepcopy(PRODUCT)
    elsewhere["image"]["base"]["oci"] = "/mnt/other"
    elsewhere["serve"]["chat_template"] = "renamed.jinja"
    assert canonical.dumps(manifest(product=elsewhere)) == canonical.dumps(manifest())
    assert "someone" not in canonical.dumps(manifest()).decode()


def test_the_digest_of_itself_is_left_out() -> None:
    assert manifest(serve={**serve_json(), "manifest_digest": H}) == manifest()


def test_inputs_are_not_changed_and_not_shared() -> None:
    before = copy.deepcopy(PRODUCT)
    document = manifest()
    document["recipe"]["serve"]["k"] = 99
    document["serving"]["environment"]["X"] = "y"
    assert before == PRODUCT
    assert manifest()["recipe"]["serve"]["k"] == 7


@pytest.mark.parametrize("field", ["started", "hostname", "image_id", "threads", "seconds"])
def test_facts_of_the_builder_are_refused(field: str) -> None:
    with pytest.raises(QdcError, match=f"target.proof.{field} tells of the builder"):
        manifest(
            target_facts={"census": [], "scheme": {}, "trainable": [], "proof": {"deep": 1, field: "x"}},
        )


def test_malformed_inputs_are_named() -> None:
    with pytest.raises(QdcError, match="template"):
        manifest(template_digest="abc")
    with pytest.raises(QdcError, match="lack census"):
        manifest(target_facts={"scheme": {}, "proof": [], "trainable": []})
    with pytest.raises(QdcError, match="not a JSON value"):
        manifest(lock={"x": float("nan")})


@given(st.permutations(list(PRODUCT)))
def test_the_order_of_fields_does_not_matter(order: list[str]) -> None:
    assert canonical.dumps(manifest(product={key: PRODUCT[key] for key in order})) == canonical.dumps(manifest())


def test_the_digest_is_that_of_the_file() -> None:
    import hashlib

    assert content.manifest_digest(manifest()) == hashlib.sha256(canonical.pretty(manifest())).hexdigest()


def test_making_a_manifest_imports_no_pydantic() -> None:
    code = "import sys, qdc.manifest.content, qdc.manifest.diff, qdc.manifest.record; print('pydantic' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "compiler"}
    )
    assert answer.stdout.strip() == "False"
