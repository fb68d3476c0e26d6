"""Tables of facts: every cell has a source, and what stands between two rows or outside of them is read with care."""

from __future__ import annotations

from itertools import pairwise

import pytest

from qdc.serving.engines import required_patches
from qdc.serving.patches import patch_names
from qdc.tables import engines, hardware, patches
from qdc.tables.cells import read


def test_every_cell_of_the_engines_has_a_source() -> None:
    table = read("engines.json")
    seen = 0
    for column, facts in table["columns"].items():
        assert facts["meaning"] and set(facts) <= {"meaning", "source", "strict_first", "cuda", "cpu"}
        for platform in ("cuda", "cpu"):
            for version, given in facts[platform].items():
                assert engines.order(version) is not None
                cell = engines.cell(version, platform, column)
                if given is None:
                    assert cell is None
                else:
                    assert cell is not None and len(cell.source) > 8, (column, platform, version)
                    seen += 1
    assert seen > 200


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_the_versions_are_in_order_and_every_feature_has_each_of_them(platform: str) -> None:
    versions = engines.rows(platform)
    assert all(engines.before(one, other) for one, other in pairwise(versions))
    for column, facts in read("engines.json")["columns"].items():
        lacking = set(versions) - set(facts[platform])
        unknown = {"0.19.0"} if facts[platform] else set(versions)
        assert lacking <= unknown, (column, platform)


@pytest.mark.parametrize(
    ("version", "platform", "column", "value"),
    [
        ("0.21.0", "cuda", "taps", False),
        ("0.22.0", "cuda", "taps", True),
        ("0.24.0", "cuda", "window", False),
        ("0.25.1", "cuda", "window", True),
        ("0.24.0", "cuda", "quantized-drafter-by", "patch"),
        ("0.30.0", "cuda", "quantized-drafter-by", "own"),
        ("0.31.0", "cuda", "quantized-drafter", True),
        ("0.31.0", "cuda", "zero-draft", False),
        ("0.32.0", "cuda", "zero-draft", True),
        ("0.28.0", "cuda", "runner", "list"),
        ("0.29.0", "cuda", "runner", "v2"),
        ("0.32.0", "cpu", "runner", "v1"),
        ("0.30.0", "cpu", "dflash", False),
        ("0.33.0", "cuda", "medusa", False),
        ("0.33.0", "cuda", "rejection", ["standard", "synthetic", "block", "fly"]),
        ("0.19.0", "cuda", "dflash", None),
        ("0.25.1", "cuda", "mixed-window", None),
    ],
)
def test_what_is_known_of_a_version(version: str, platform: str, column: str, value: object) -> None:
    assert engines.known(version, platform) == (version != "0.30.0" or platform != "cpu")
    assert engines.value(version, platform, column) == value


def test_between_two_versions_the_stricter_reading_holds() -> None:
    assert not engines.known("0.25.0", "cuda")
    between = engines.cell("0.25.0", "cuda", "window")
    assert between is not None and between.value is False
    assert "0.24.0" in between.source and "0.25.1" in between.source
    assert engines.value("0.25.0", "cuda", "quantized-drafter-by") == "own"
    assert engines.value("0.28.1", "cuda", "runner") == "list"
    assert engines.value("0.32.1", "cuda", "medusa") is False
    assert engines.value("0.32.1", "cuda", "torch") is None  # one of the two is not established


@pytest.mark.parametrize("version", ["0.18.0", "1.0.0", "latest", ""])
def test_nothing_is_known_outside_of_the_table(version: str) -> None:
    assert not engines.known(version, "cuda")
    assert engines.cell(version, "cuda", "window") is None


def test_no_column_of_a_misspelt_name() -> None:
    with pytest.raises(KeyError):
        engines.cell("0.32.0", "cpu", "windw")


def test_versions_are_ordered_as_releases_are() -> None:
    rising = ["0.9.9", "0.22.1", "0.29.1.dev3", "0.29.1rc1", "0.29.1", "0.29.1.post1", "0.30", "0.30.1+cu130", "1.0.0"]
    assert all(engines.before(one, other) for one, other in pairwise(rising))
    assert not any(engines.before(other, one) for one, other in pairwise(rising))
    assert engines.order("0.30") == engines.order("0.30.0") == engines.order("0.30.0+cu130")
    assert engines.order("0.x") is None and not engines.before("0.x", "1.0.0")


def test_the_first_and_the_last_version_with_a_feature() -> None:
    assert engines.first("cuda", "quantized-drafter") == "0.31.0"
    assert engines.first("cpu", "dflash") == "0.31.0"
    assert engines.last("cuda", "medusa") == "0.32.0"
    assert engines.first("cpu", "xpress") is None


def test_a_patch_provides_something_to_the_versions_that_it_names_alone() -> None:
    both = ["w4-drafter", "swa-above-window", "no-such-patch"]
    assert patches.provided(both, "0.22.1", "cuda") == {"quantized-drafter", "window", "window-above"}
    assert patches.provided(both, "0.25.1", "cuda") == patches.provided(both, "0.22.1", "cuda")
    for version, platform in (("0.21.0", "cuda"), ("0.27.0", "cuda"), ("0.22.1", "cpu")):
        assert patches.provided(both, version, platform) == set()
    assert patches.providing("window", "0.24.0", "cuda") == ["swa-above-window"]
    assert patches.providing("window", "0.27.0", "cuda") == []


def test_every_patch_that_is_written_here_is_in_the_table() -> None:
    assert set(patch_names()) <= set(patches.names())
    for name in required_patches({"vllm": "0.32.0", "platform": "cpu"}, drafts=True):
        patch = patches.row(name)
        assert patch is not None and patch.fits("0.32.0", "cpu") and patch.provides and patch.source


def test_every_card_has_a_source_and_says_what_is_assumed() -> None:
    assert hardware.names()[0] == "a10g" and "cpu" in hardware.names()
    for name in hardware.names():
        card = hardware.row(name)
        assert card is not None and card.name == name
        for cell in (card.sm, card.memory_gb, card.bandwidth_gbs, card.bf16_tflops):
            assert cell.source and (cell.value is None) == (name == "cpu")
            assert not (cell.assumed and cell.value is None)
    a10g = hardware.row("a10g")
    assert a10g is not None and (a10g.sm.value, a10g.memory_gb.value, a10g.bandwidth_gbs.value) == ("8.6", 24, 600)
    assert (a10g.sm.assumed, a10g.bandwidth_gbs.assumed) == (False, True)
    assert hardware.row("a10") is None
    assert hardware.order("8.6") < hardware.order("9.0") < hardware.order("10.0")
