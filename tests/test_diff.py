"""`qdc diff` over recipes, locks, manifests, builds, images and model folders: what each pair has in common."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from audit_fixtures import build, images, models, submissions, tampered
from audit_fixtures.pieces import Fixture, Folder, under
from micro import Micro, qdc
from test_audit_images import Built, recipe

from qdc.cli.diff import render_text
from qdc.core.errors import QdcError
from qdc.manifest.diff.sides import lock_changes, measurement_changes
from qdc.run.compare import COMPARED, compare, open_side
from qdc.store.store import Store

NAMELESS = ("layers:", "image ID")


def changes(tmp_path: Path, a: str, b: str) -> tuple[list[str], dict[str, str]]:
    store = Store(tmp_path / "store")
    with open_side(a, store) as left, open_side(b, store) as right:
        rows, unread = compare(left, right)
    return [row["text"] for row in rows if not row["text"].startswith(NAMELESS)], unread


def pair(tmp_path: Path, a: Fixture | Folder, b: Fixture | Folder) -> tuple[list[str], dict[str, str]]:
    places = []
    for name, made in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        places.append(made.write(tmp_path / name))
    return changes(tmp_path, *places)


def test_images_of_qdc_are_compared_by_their_manifests_first(tmp_path: Path) -> None:
    texts, unread = pair(tmp_path, tampered.untouched(), tampered.fixture(Built(recipe(serve__k=5))))
    assert texts[:3] == ["target unchanged, same weights digest", "drafter unchanged, same weights digest", "K 7 -> 5"]
    files = [text for text in texts[3:] if text.startswith("file")]
    assert [text.split()[1] for text in files] == ["/opt/qdc/manifest.json", "/opt/qdc/serve.json"]
    assert all(text.startswith("Labels[org.opencontainers.") for text in texts[3:] if text not in files)
    assert unread == {}


def test_ngram_becomes_dflash_in_images_that_qdc_did_not_make(tmp_path: Path) -> None:
    texts, _ = pair(tmp_path, images.served(submissions.ngram(20)), images.served(images.speculation()))
    assert texts[:2] == [
        "target unchanged, same weights digest",
        "drafter: n-gram 20 -> DFlash K=15, draft block 16, window 1024",
    ]
    assert texts[2].startswith("drafter weights none -> ")
    assert any(text.startswith("Entrypoint: ") for text in texts)


def test_a_grid_of_another_group_and_a_template_in_words(tmp_path: Path) -> None:
    a, b = images.served(images.speculation()), images.served(images.speculation())
    always = models.TEMPLATE + b"{% if add_generation_prompt %}<think>\n{% endif %}"
    switch = always.replace(b"<think>", b"{% if enable_thinking %}<think>{% endif %}")
    a.layers[1] |= {"models/target/chat_template.jinja": always}
    b.layers[1] = under("models/target", models.target("ct", group=64) | {"chat_template.jinja": switch})
    texts, _ = pair(tmp_path, a, b)
    assert texts[0].startswith("target weights ")
    assert texts[1] == "target: group size 32 -> 64"
    assert any(text.startswith("chat template: think block now conditional, 2 lines") for text in texts)
    assert "file /models/target/config.json changed" in "\n".join(texts)
    assert "model.safetensors changed" not in "\n".join(texts)


def test_packages_files_layers_and_start(tmp_path: Path) -> None:
    a, b = images.served(images.speculation()), images.served(images.speculation(), version="0.33.0")
    info = f"{submissions.SITE}/vllm-0.33.0.dist-info"
    b.layers[0] |= {
        f"{info}/RECORD": b"vllm/new.py,,\nvllm/__init__.py,,\n",
        f"{submissions.SITE}/vllm/new.py": b"x",
        f"{submissions.SITE}/other.py": b"y",
        "bin": "usr/sbin",
    }
    b.settings["Env"].append("OMP_NUM_THREADS=4")
    texts, _ = pair(tmp_path, a, b)
    assert texts[2:] == [
        "engine vLLM 0.32.0 -> 0.33.0",
        "Env[OMP_NUM_THREADS]: none -> 4",
        "package vllm 0.32.0 -> 0.33.0 (python)",
        "file /bin changed, link to usr/bin -> link to usr/sbin, layer 0",
        f"file /{submissions.SITE}/other.py added, 1 B, mode 644, layer 0",
    ]


def test_settings_in_force_are_compared_whatever_gives_them(tmp_path: Path) -> None:
    """n-gram by ENV behind a script, DFlash by a sourced file: the words are those of two recipes."""
    ngram = submissions.sixth(env=submissions.ngram(20), sourced=None)
    dflash = submissions.sixth(env=submissions.ngram(20), sourced=submissions.DFLASH)
    texts, unread = pair(tmp_path, ngram, dflash)
    assert texts[:2] == [
        "target unchanged, same weights digest",
        "drafter: n-gram 20 -> DFlash K=15, draft block 16",
    ]
    assert [text for text in texts if text.startswith("file")] == [
        "file /opt/program/config.sh added, 217 B, mode 755, layer 3"
    ]
    assert unread == {}


def test_an_argument_without_a_field_is_told_by_its_name(tmp_path: Path) -> None:
    a, b = (images.served(images.speculation(), "--kv-cache-dtype", kind) for kind in ("auto", "fp8"))
    texts, _ = pair(tmp_path, a, b)
    assert "serve.arguments.kv-cache-dtype auto -> fp8" in texts


def test_weights_of_a_drafter_that_may_be_used_are_told_as_files(tmp_path: Path) -> None:
    a, b = images.scripted(images.COMPUTED), images.scripted(images.COMPUTED)
    changed = models.drafter()["model.safetensors"]
    b.layers[2] |= {"models/drafter/model.safetensors": changed[:-1] + b"\1"}
    texts, unread = pair(tmp_path, a, b)
    assert [text.split(",")[0] for text in texts] == ["file /models/drafter/model.safetensors changed"]
    assert "drafter.kind" in unread


def test_debian_packages(tmp_path: Path) -> None:
    a, b = images.served(images.speculation()), images.served(images.speculation())
    for made, version in ((a, "2.36-9"), (b, "2.36-10")):
        status = f"Package: libc6\nStatus: install ok installed\nVersion: {version}\n\nPackage: dash\nVersion: 1\n"
        made.layers[0] |= {"var/lib/dpkg/status": status.encode()}
    texts, _ = pair(tmp_path, a, b)
    assert "package libc6 2.36-9 -> 2.36-10 (debian)" in texts


def test_layers_are_shared_or_not_and_the_image_id_is_told_last(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    places = [
        images.served(images.speculation()).write(tmp_path / "a"),
        images.committed(drafter=False).write(tmp_path / "b"),
    ]
    with open_side(places[0], store) as a, open_side(places[1], store) as b:
        rows, _ = compare(a, b)
    assert [row["path"] for row in rows if row["subject"] in ("layer", "image")] == ["image.layers", "image.id"]
    text = next(row["text"] for row in rows if row["path"] == "image.layers")
    assert text.startswith("layers: 3 shared (") and "; others none -> " in text


@pytest.mark.parametrize(
    "id", ["sixth-place", "second-place", "third-place", "qdc-untouched", "k-computed", "folder-cut"]
)
def test_a_thing_does_not_differ_from_itself(id: str, tmp_path: Path) -> None:
    place = build.write(id, tmp_path)
    texts, unread = changes(tmp_path, place, place)
    assert texts == [] and unread == {}


def test_folders_are_compared_by_their_bytes(tmp_path: Path) -> None:
    texts, _ = pair(tmp_path, Folder(models.target("ct", group=32)), Folder(models.target("gptq", group=64)))
    assert texts[0].startswith("target weights ")
    assert "target: group size 32 -> 64" in texts
    assert any(text.startswith("file /config.json changed") for text in texts)


def test_a_folder_against_an_image_compares_the_model_that_both_hold(tmp_path: Path) -> None:
    image = images.served(images.speculation())
    texts, _ = pair(tmp_path, Folder(models.target("ct", group=64)), image)
    assert texts[0].startswith("target weights ") and "target: group size 64 -> 32" in texts
    assert not any("drafter" in text or text.startswith(("file", "K ")) for text in texts)
    (tmp_path / "again").mkdir()
    texts, _ = pair(tmp_path / "again", Folder(models.target("ct", group=32)), image)
    assert texts == []


def test_a_recipe_against_an_image_of_qdc_compares_product_fields(recipes: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    place = tampered.untouched().write(tmp_path / "image")
    texts, _ = changes(tmp_path, str(recipes / "micro.yaml"), place)
    assert any(text.startswith("drafter PTQ: group size ") for text in texts)
    assert not any(text.startswith(("file", "package")) for text in texts)


def test_a_recipe_against_another_image_compares_what_its_bytes_show(recipes: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    place = images.served(images.speculation(12)).write(tmp_path / "image")
    texts, unread = changes(tmp_path, str(recipes / "micro.yaml"), place)
    back, _ = changes(tmp_path, place, str(recipes / "micro.yaml"))
    assert "serve.k 7 -> 12" in texts and "serve.k 12 -> 7" in back
    assert len(texts) == len(back)
    assert "target.qad.schedule.steps" in unread


def test_two_recipes_and_their_locks(recipes: Path, tmp_path: Path) -> None:
    a, b = recipes / "micro.yaml", recipes / "other.yaml"
    b.write_text(a.read_text().replace("k: 7", "k: 5"))
    texts, _ = changes(tmp_path, str(a), str(b))
    assert texts == ["K 7 -> 5"]
    for path, digest, revision in ((a, "a" * 64, "1" * 40), (b, "b" * 64, "2" * 40)):
        source = {
            "identity": {"hf": "x/y", "revision": revision},
            "files": {"config.json": {"size": 3, "sha256": digest}, "README.md": {"size": 1, "sha256": "c" * 64}},
            "facts": {"shapes": digest[0]},
            "licence": "mit",
        }
        path.with_suffix(".lock").write_text(json.dumps({"version": 1, "sources": {"target.base": source}}))
    texts, _ = changes(tmp_path, str(a), str(b))
    assert texts == [
        "K 7 -> 5",
        "lock of target.base: config.json aaaaaaaaaaaa -> bbbbbbbbbbbb",
        f"lock of target.base: revision {'1' * 40} -> {'2' * 40}",
    ]
    texts, _ = changes(tmp_path, str(a.with_suffix(".lock")), str(b))
    assert len(texts) == 2


def test_sources_that_only_one_lock_has() -> None:
    source = {"identity": {"hf": "x"}, "files": {"a": {"size": 1, "sha256": "a" * 64}}, "facts": None, "licence": None}
    (row,) = lock_changes({}, {"target.base": source})
    assert row["text"] == "lock of target.base: none -> 1 files"
    assert list(lock_changes({"x": "a" * 64}, {"x": "a" * 64})) == []


def test_measurements_say_whether_their_intervals_overlap() -> None:
    def rows(value: float, low: float | None, high: float | None) -> list[dict[str, Any]]:
        named = {"what": "acceptance", "subject": "drafter", "metric": "length", "n": 64, "image": "x"}
        return [{**named, "value": value, "low": low, "high": high}]

    for b, words in (
        (rows(3.6, 3.5, 3.8), "3.2 (3 to 3.4) -> 3.6 (3.5 to 3.8); the intervals do not overlap"),
        (rows(3.4, 3.2, 3.8), "3.2 (3 to 3.4) -> 3.4 (3.2 to 3.8); the intervals overlap"),
        (rows(3.4, None, None), "3.2 (3 to 3.4) -> 3.4"),
        ([], "3.2 (3 to 3.4) -> none"),
    ):
        (row,) = measurement_changes(rows(3.2, 3.0, 3.4), b)
        assert row["text"] == f"measured acceptance of drafter, length: {words}"
    assert list(measurement_changes(rows(1, 0, 2), rows(1, 0, 2))) == []


def test_what_has_nothing_in_common_says_what_can_be_compared(recipes: Path, tmp_path: Path) -> None:
    lock = recipes / "micro.lock"
    lock.write_text(json.dumps({"version": 1, "sources": {}}))
    place = build.write("layered", tmp_path)
    with pytest.raises(QdcError, match="nothing in common") as caught:
        changes(tmp_path, str(lock), place)
    assert caught.value.hint == f"a lock can be compared with {COMPARED['lock']}"
    assert caught.value.exit_code == 2


def test_kinds_that_can_be_compared_are_not_refused(recipes: Path, tmp_path: Path) -> None:
    """Each pair of a recipe, its lock, a manifest, an image of qdc, another image and a folder."""
    for name in ("qdc", "other", "folder"):
        (tmp_path / name).mkdir()
    image = tampered.untouched()
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(Built().read("opt/qdc/manifest.json"))
    (recipes / "micro.lock").write_text(json.dumps({"version": 1, "sources": {}}))
    sides = {
        "recipe": str(recipes / "micro.yaml"), "lock": str(recipes / "micro.lock"), "manifest": str(manifest),
        "image": image.write(tmp_path / "qdc"), "other": images.served(None).write(tmp_path / "other"),
        "folder": Folder(models.target("ct")).write(tmp_path / "folder"),
    }  # fmt: skip
    refused = set()
    for a, b in itertools.combinations_with_replacement(sides, 2):
        try:
            changes(tmp_path, sides[a], sides[b])
        except QdcError as error:
            assert error.id == "diff.kinds", error
            refused.add((a, b))
    assert refused == {("lock", "other"), ("lock", "folder")}


def test_builds_are_compared_in_place(micro: Micro, tmp_path: Path) -> None:
    edited = micro.build("--set", "serve.k=4")
    first, second, store = micro.first["build"], edited["build"], ("--store", str(micro.store))
    done = qdc("diff", first, second, "--json", *store)
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)["changes"]
    texts = [row["text"] for row in rows]
    assert texts[:3] == ["target unchanged, same weights digest", "drafter unchanged, same weights digest", "K 7 -> 4"]
    assert {row["subject"] for row in rows} >= {"file", "layer", "image"}
    archive = micro.export(second, tmp_path / "second.tar")
    same = qdc("diff", second, f"archive:{archive}", *store)
    assert (same.returncode, same.stdout) == (0, "no difference\n"), same.stdout + same.stderr
    against = qdc("diff", str(micro.recipe), second, *store)
    assert against.returncode == 1 and "K 7 -> 4" in against.stdout.splitlines()


def test_wrong_names_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    (tmp_path / "b.json").write_text("{")
    for a, words in (
        ("a.json", "no manifest"),
        ("b.json", "not JSON"),
        ("none.lock", "no such file"),
        ("@1", "builds"),
    ):
        done = qdc("diff", a, a, "--store", str(tmp_path / "store"), cwd=tmp_path)
        assert done.returncode in (2, 4) and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


@pytest.mark.parametrize("name", ["ngram-to-dflash", "another-k", "another-group"])
def test_what_a_person_reads(name: str, tmp_path: Path) -> None:
    """The whole text, as tests/golden/diff-*.txt has it: AUDIT_GOLDEN=1 writes it anew."""
    a, b = {
        "ngram-to-dflash": (
            submissions.sixth(env=submissions.ngram(20), sourced=None),
            submissions.sixth(env=submissions.ngram(20), sourced=submissions.DFLASH),
        ),
        "another-k": (tampered.untouched(), tampered.fixture(Built(recipe(serve__k=5)))),
        "another-group": (
            images.scripted(images.COMPUTED),
            images.served(images.speculation(), target=models.target("gptq", group=64)),
        ),
    }[name]
    places = []
    for side, made in (("a", a), ("b", b)):
        (tmp_path / side).mkdir()
        places.append(made.write(tmp_path / side))
    store = Store(tmp_path / "store")
    with open_side(places[0], store) as left, open_side(places[1], store) as right:
        rows, unread = compare(left, right)
    text = render_text(rows, unread, not rows) + "\n"
    text = re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", text)  # They change with the serving code in the image, as sizes do.
    text = re.sub(r"\d+\.\d+ kB", "SIZE", text)
    golden = Path(__file__).parent / "golden" / f"diff-{name}.txt"
    if os.environ.get("AUDIT_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
