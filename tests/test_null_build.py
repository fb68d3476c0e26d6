"""A recipe that names a folder: nothing in it is read while stat shows no change, and every change is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folder_project import STAGES, project
from hypothesis import given, settings
from hypothesis import strategies as st
from micro import ROOT, Micro, qdc

from qdc.core.errors import QdcError
from qdc.formats import qwen35
from qdc.run.front import front
from qdc.store.store import Store

HEAVY = ["yaml", "pydantic", "rich", "jinja2", "importlib.metadata", "torch", "numpy", "docker", "fsspec"]
HEAVY += ["qdc.graph.code", "qdc.store.intake", "subprocess", "tempfile", "concurrent.futures"]
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": ["linear_attention", "full_attention"],
    "attention": {"heads": 2, "kv_heads": 1, "head_dim": 32},
    "linear_attention": {"key_heads": 1, "value_heads": 2, "head_dim": 64, "conv_kernel": 4},
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "init_range": 0.2,
}


def checkpoint(folder: Path) -> Path:
    """Headers of a small model over zeros, and what lies beside them: enough to read a recipe."""
    config = qwen35.text_config(ARCHITECTURE, 64, {"pad": 0, "eos": 2})
    header, end = {}, 0
    for name, shape in qwen35.tensor_shapes(config).items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(end))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "sub" / "notes.txt").write_text("0123456789")
    return folder


def truth(folder: Path) -> str:
    """The tree's digest, said once more: SHA-256 of [path, size, mode, SHA-256] of each file, sorted."""
    rows = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            data = path.read_bytes()
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            rows.append([str(path.relative_to(folder)), len(data), mode, hashlib.sha256(data).hexdigest()])
    return hashlib.sha256(json.dumps(sorted(rows), separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def seen(recipe: Path, store: Path) -> str:
    """The digest that the reader of the recipe gives to its folder."""
    base = next(item for item in front(recipe, [], Store(store)).instances if item.name == "base")
    return base.inputs["source"].removeprefix("tree:")


def flip(path: Path) -> None:
    """Another last byte; the size stays."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def flip_and_set_back(path: Path) -> None:
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    """Another file of the same size and times takes its place."""
    status, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def swap(path: Path) -> None:
    """Two files of the same size change places."""
    one, two = path.with_name("one"), path.with_name("two")
    if not one.exists():
        one.write_text("1" * 10)
        two.write_text("2" * 10)
    spare = path.with_name("spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)


def link(path: Path) -> None:
    """A link to a file elsewhere takes the file's place."""
    outside = path.parents[2] / "outside"
    outside.write_bytes(path.read_bytes() + b"x")
    path.unlink()
    path.symlink_to(outside)


def new_folder(path: Path) -> None:
    (path.parent / "deep" / "er").mkdir(parents=True, exist_ok=True)
    (path.parent / "deep" / "er" / "file").write_text(str(time.time_ns()))


def whole_folder(path: Path) -> None:
    """Another folder takes the place of the one above the file."""
    copy = path.parents[1] / "copied"
    shutil.copytree(path.parent, copy)
    shutil.rmtree(path.parent)
    copy.rename(path.parent)
    flip(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "flip, times set back": flip_and_set_back,
    "append": lambda path: path.write_bytes(path.read_bytes() + b"+"),
    "shorten": lambda path: os.truncate(path, path.stat().st_size // 2),
    "replace": replace,
    "swap": swap,
    "link": link,
    "touch": lambda path: os.utime(path),
    "executable": lambda path: path.chmod(path.stat().st_mode ^ 0o111),
    "rename": lambda path: path.rename(path.with_name(f"{path.name}~")),
    "new file": lambda path: path.with_name(f"n{time.time_ns()}").write_text("new"),
    "new empty file": lambda path: path.with_name(f"e{time.time_ns()}").touch(),
    "new folder": new_folder,
    "empty folder": lambda path: (path.parent / f"d{time.time_ns()}").mkdir(),
    "whole folder": whole_folder,
    "nothing": lambda path: None,
}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.booleans()), min_size=1, max_size=4))
def test_every_change_that_stat_shows_is_noticed(tmp_path_factory: Any, history: list[tuple[str, bool]]) -> None:
    """Whether the files are older than a clock tick by then, or not."""
    folder = tmp_path_factory.mktemp("n")
    recipe = project(folder / "p")
    base, store = checkpoint(recipe.parent / "base"), folder / "store"
    notes = base / "sub" / "notes.txt"
    assert seen(recipe, store) == truth(base)
    for change, rest in history:
        if rest:
            time.sleep(0.06)
            assert seen(recipe, store) == truth(base)
        if notes.exists():
            CHANGES[change](notes)
        assert seen(recipe, store) == truth(base), change


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_each_change_is_noticed_in_files_that_were_known_by_their_stat(tmp_path: Path, change: str) -> None:
    recipe = project(tmp_path / "p")
    base, store = checkpoint(recipe.parent / "base"), tmp_path / "store"
    swap(base / "sub" / "notes.txt")
    time.sleep(0.06)
    before = seen(recipe, store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdc.run.front._read", lambda *_: pytest.fail("the recipe was read again"))
        assert seen(recipe, store) == before == truth(base)
    CHANGES[change](base / "sub" / "notes.txt")
    after = seen(recipe, store)
    assert after == truth(base)
    assert (after == before) == (change in ("touch", "empty folder", "nothing"))


def test_a_folder_that_changes_while_the_recipe_is_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its headers would be of one state, and its digest of another."""
    recipe = project(tmp_path / "p")
    base, store = checkpoint(recipe.parent / "base"), tmp_path / "store"
    time.sleep(0.06)

    def meanwhile(loaded: Any) -> list[Any]:
        flip(base / "model.safetensors")
        return []

    with monkeypatch.context() as patch:
        patch.setattr("qdc.rules.check.require", meanwhile)
        with pytest.raises(QdcError, match="changed while it was read"):
            front(recipe, [], Store(store))
    assert seen(recipe, store) == truth(base)


def test_a_folder_whose_copy_the_store_lost_is_taken_in_again(tmp_path: Path) -> None:
    recipe = project(tmp_path / "p")
    checkpoint(recipe.parent / "base")
    time.sleep(0.06)
    store = Store(tmp_path / "store")
    digest = seen(recipe, store.root)
    tree = store.tree(digest)
    assert tree is not None
    for damage in (Path.unlink, lambda path: (path.chmod(0o644), os.truncate(path, 1))):
        damage(store.object_path(tree.entries[-1].sha256))
        assert seen(recipe, store.root) == digest and store.has_tree(digest)


class Given:
    """A build on a checkpoint in a folder, made once."""

    def __init__(self, folder: Path, micro: Micro) -> None:
        made = next(stage for stage in micro.first["stages"] if stage["name"] == "base")
        Store(micro.store).link_out(made["output"], folder / "made")
        self.recipe = project(folder / "p", folder / "made")
        self.store = Store(folder / "p" / "artifacts")
        self.first = self.build()

    def build(self, *more: str) -> Any:
        done = qdc("build", str(self.recipe), "--store", str(self.store.root), "--json", *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, micro: Micro) -> Given:
    return Given(tmp_path_factory.mktemp("given"), micro)


def test_a_null_build_on_a_folder_imports_and_reads_nothing_heavy(built: Given) -> None:
    assert {stage["name"] for stage in built.first["stages"]} == STAGES
    assert all(stage["ran"] for stage in built.first["stages"])
    built.build()
    code = f"""
import sys
from qdc.cli import main
given = ["build", {str(built.recipe)!r}, "--store", {str(built.store.root)!r}, "--quiet"]
code = main(given)
before = int(open("/proc/self/io").read().split()[1])
code = code or main(given)
print("READ", int(open("/proc/self/io").read().split()[1]) - before)
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
sys.exit(code)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "compiler")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "nothing to do: all 7 stages are fresh" in done.stdout and "LOADED []" in done.stdout
    weights = (built.recipe.parent / "base" / "model.safetensors").stat().st_size
    assert int(done.stdout.split("READ ")[1].split()[0]) < 200_000 < weights


def test_weights_are_kept_once(built: Given) -> None:
    """The objects are the different contents of all trees, each once; a given base is not written a second time."""
    trees = [built.store.tree(path.stem) for path in (built.store.root / "trees").glob("*.json")]
    contents = {entry.sha256: entry.size for tree in trees if tree for entry in tree.entries}
    objects = [path for path in (built.store.root / "objects").rglob("*") if path.is_file()]
    assert {path.name: path.stat().st_size for path in objects} == contents
    outputs = {stage["name"]: built.store.tree(stage["output"]) for stage in built.first["stages"]}
    given = (built.recipe.parent / "base" / "model.safetensors").read_bytes()
    entry = outputs["base"].find("model.safetensors")  # type: ignore[union-attr]
    assert entry is not None and entry.sha256 == hashlib.sha256(given).hexdigest()


def test_a_change_of_one_serving_value_writes_little(built: Given) -> None:
    before = sum(path.stat().st_size for path in built.store.root.rglob("*") if path.is_file())
    answer = built.build("--set", "serve.max_num_seqs=2")
    assert [stage["name"] for stage in answer["stages"] if stage["ran"]] == ["image"]
    assert sum(path.stat().st_size for path in built.store.root.rglob("*") if path.is_file()) - before < 200_000
