"""What may be asked of an image by `--require` and `--recipe`: no lie is proved, no truth refuted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audit_fixtures import build

from qdc.audit.audit import audit
from qdc.audit.images import open_image
from qdc.formats.image import Image

PROVED, REFUTED, RECORDED, UNREAD = "proved", "refuted", "recorded", "unread"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """An untouched image of qdc: K 7, a W4 target and drafter, a window."""
    place, _, name = build.write("qdc-untouched", tmp_path_factory.mktemp("made")).partition(":")
    with open_image(place, name) as image:
        yield image


def verdict(image: Image, require: str, claim: str = "") -> Any:
    """The only verdict about the claim."""
    name = claim or require.partition("=")[0]
    (row,) = [row for row in audit(image, require=[require])["verdicts"] if row["claim"] == name]
    return row


def value(image: Image, claim: str) -> Any:
    return next(row["value"] for row in audit(image)["verdicts"] if row["claim"] == claim)


@pytest.mark.parametrize(
    ("require", "word"),
    [
        ("serve.k=7", PROVED),
        ("serve.k=7.0", PROVED),
        ("serve.k=8", REFUTED),
        ('serve.k="7"', REFUTED),
        ("serve.k=[7]", REFUTED),
        ("serve.k=true", REFUTED),
        ("serve.k=null", REFUTED),
        ('serve.start=["/bin/sh"]', REFUTED),
        ('serve.start=["/usr/bin/python3","/opt/qdc/serving/launcher.py","serve"]', PROVED),
        ("target.quantization.modules={}", REFUTED),
        ('target.quantization.modules={"quantized":true}', REFUTED),
        ('target.quantization.modules={"quantized":"all"}', REFUTED),
        ('target.quantization.modules={"pruned":0}', REFUTED),
        ("target.quantization=null", REFUTED),
        ("drafter.ptq=null", REFUTED),
        ("drafter.swa=null", REFUTED),
        ("files.unnamed=[]", PROVED),
        ('files.unnamed=["x"]', REFUTED),
        ("manifest.digest=x", REFUTED),
        ("serve.tokenizer=x", REFUTED),
        ("image.layers[0].diff_id=x", REFUTED),
        ("serve.weights[/opt/models/target/model.safetensors]=x", REFUTED),
        ("image.id=sha256:00", REFUTED),
        ("serve.no_such_field=3", UNREAD),
    ],
)
def test_a_requirement_is_judged_once(made: Image, require: str, word: str) -> None:
    row = verdict(made, require)
    assert row["verdict"] == word
    assert word != REFUTED or "require claims" in str(row["evidence"][-1]["text"]) or require.startswith("image.id")


@pytest.mark.parametrize("claim", ["manifest.digest", "serve.tokenizer", "image.id", "image.layers[0].diff_id"])
@pytest.mark.parametrize("form", ["sha256:{}", "{}"])
def test_a_digest_may_be_required_with_or_without_its_algorithm(made: Image, claim: str, form: str) -> None:
    digest = str(value(made, claim)).removeprefix("sha256:")
    assert verdict(made, f"{claim}={form.format(digest)}")["verdict"] == PROVED


def test_a_section_is_judged_field_by_field(made: Image) -> None:
    bits = value(made, "target.quantization.scheme.bits")
    report = audit(made, require=[f'target.quantization.scheme={{"bits": {bits}, "group_size": 7}}'])
    found = {row["claim"]: row["verdict"] for row in report["verdicts"]}
    assert found["target.quantization.scheme.bits"] == PROVED
    assert found["target.quantization.scheme.group_size"] == REFUTED
    assert "target.quantization.scheme" not in found


def test_patches_are_named_all_or_refuted(made: Image) -> None:
    names = value(made, "serve.engine.patches")
    assert verdict(made, f"serve.engine.patches={names}".replace("'", '"'))["verdict"] == PROVED
    assert verdict(made, 'serve.engine.patches=["no-such-patch"]')["verdict"] == REFUTED
    assert verdict(made, "serve.engine.patches=[]")["verdict"] == (REFUTED if names else PROVED)


def test_no_drafter_is_refuted_where_one_is_served(made: Image) -> None:
    assert verdict(made, "drafter=null", "drafter.kind")["verdict"] == REFUTED


def test_a_section_that_the_manifest_fills_is_not_absent(tmp_path: Path) -> None:
    """By words alone: what was trained cannot be read in bytes."""
    place, _, name = build.write("qdc-untouched", tmp_path).partition(":")
    with open_image(place, name) as image:
        rows = audit(image)["verdicts"]
        trained = [row["claim"] for row in rows if row["claim"].startswith(("target.qad.", "drafter.training["))]
        for section in {name.partition(".")[0] + "." + name.split(".")[1].partition("[")[0] for name in trained}:
            assert verdict(image, f"{section}=null")["verdict"] == REFUTED
        assert trained


def test_where_a_base_lay_on_the_builders_disk_is_no_claim(made: Image) -> None:
    recipe = {"image": {"base": {"archive": "base.tar"}}, "serve": {"k": 7}}
    rows = {row["claim"]: row["verdict"] for row in audit(made, recipe=recipe)["verdicts"]}
    assert rows["serve.k"] == PROVED
    assert not [claim for claim in rows if claim.startswith("image.base.archive")]
