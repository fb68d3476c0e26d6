"""The build record holds what the content manifest must not, and the committed schemas are the generated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from qdc.core.errors import QdcError
from qdc.manifest import models
from qdc.manifest.record import build_record

H = "0123456789abcdef" * 4
SCHEMA_FOLDER = Path(__file__).parent.parent / "schema"


def stage(**changed: Any) -> dict[str, Any]:
    row = {
        "name": "distill",
        "ran": True,
        "seconds": 12.5,
        "output": H,
        "key": H,
        "inputs": {"teacher": H},
        "code": H,
        "packages": {"torch": "2.13.0"},
        "determinism": "seeded",
        "seed": 42,
        "threads": 2,
        "rows": {"in": 5, "kept": 4, "dropped": {"duplicate": 1}},
    }
    return row | changed


def record(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "build": "20261130-120000-0",
        "recipe_name": "tiny",
        "recipe_file": "recipes/tiny.yaml",
        "recipe_digest": H,
        "recipe": {"serve": {"k": 7}},
        "origins": {"serve.k": "tiny.yaml:70"},
        "accepted": [],
        "stages": [stage()],
        "image": {"name": "tiny:x", "id": f"sha256:{H}"},
        "measurements": [{"metric": "acceptance-length", "value": 5.7}],
        "started": "2026-11-30T12:00:00Z",
        "seconds": 300.0,
        "hardware": {"cores": 2},
        "python": "3.11.7",
    }
    return build_record(**(given | changed))


def test_it_has_the_shape_that_the_schema_describes() -> None:
    models.BuildRecord.model_validate(record())
    assert record()["measurements"] == [{"metric": "acceptance-length", "value": 5.7, "image": f"sha256:{H}"}]
    assert "build" not in record(build=None)


def test_the_models_refuse_what_is_not_described() -> None:
    with pytest.raises(ValidationError):
        models.BuildRecord.model_validate(record() | {"more": 1})
    with pytest.raises(ValidationError):
        models.BuildRecord.model_validate(record(stages=[stage(determinism="perhaps")]))


def test_a_measurement_of_another_image_is_refused() -> None:
    with pytest.raises(QdcError, match="names the image"):
        record(measurements=[{"image": "sha256:" + "0" * 64, "metric": "x", "value": 1}])


def test_a_stage_row_must_say_everything() -> None:
    row = stage()
    del row["code"]
    with pytest.raises(QdcError, match="'distill' lacks code"):
        record(stages=[row])


@pytest.mark.parametrize("name", sorted(models.SCHEMAS))
def test_committed_schemas_are_the_generated_ones(name: str) -> None:
    assert (SCHEMA_FOLDER / name).read_bytes() == models.schema_bytes(name)
