"""A recipe of a published checkpoint with a store of its own, and a stand-in hub that has the checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import Hub, serving

from qdc.cli import main
from qdc.formats import safetensors
from qdc.formats.qwen35 import scratch_facts
from qdc.recipe.reading import scan_document
from qdc.report.answers import checked
from qdc.store.store import Store

MODEL, REVISION = "someone/small", "1234567890abcdef1234567890abcdef12345678"
DATASET, DATA_REVISION = "someone/questions", "abcdef1234567890abcdef1234567890abcdef12"
TOKEN = "hf_" + "Planted" * 5
WEIGHTS = "model-00002-of-00002.safetensors"


def checkpoint(root: Path) -> dict[str, bytes]:
    """A checkpoint with the shapes of micro's target: two shards, an index, a tokenizer, and files nobody needs."""
    micro = scan_document((root / "recipes/micro.yaml").read_bytes(), "micro").data
    facts = scratch_facts(micro["target"]["base"]["scratch"])
    sizes = {name: 2 * _product(tensor.shape) for name, tensor in facts.tensors.items()}
    shards: dict[str, dict[str, Any]] = {"model-00001-of-00002.safetensors": {}, WEIGHTS: {}}
    for index, (name, tensor) in enumerate(sorted(facts.tensors.items())):
        data = hashlib.shake_128(name.encode()).digest(sizes[name])
        shards[sorted(shards)[index % 2]][name] = ("BF16", tensor.shape, data)
    files = {shard: safetensors.dumps(tensors) for shard, tensors in shards.items()}
    where = {name: shard for shard, tensors in shards.items() for name in tensors}
    special = {0: "<|pad|>", 1: "<|im_start|>", 2: "<|im_end|>", 3: "<|mask|>"}
    vocabulary = {special.get(id, f"t{id}"): id for id in range(512)}
    added = [{"id": id, "content": text, "special": True} for id, text in special.items()]
    config = {**(facts.config or {}), "eos_token_id": 2, "pad_token_id": 0}
    documents = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [2], "pad_token_id": 0},
        "model.safetensors.index.json": {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where},
        "tokenizer.json": {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": added},
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
    }
    files |= {name: json.dumps(value).encode() for name, value in documents.items()}
    files["README.md"] = b"---\nlicense: apache-2.0\n---\n# Small\n"
    return files | {"pytorch_model.bin": b"pickle", "modeling.py": b"import os", "onnx/model.safetensors": b"no"}


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value

    @property
    def error(self) -> dict[str, Any]:
        value: dict[str, Any] = self.answer["error"]
        return value


@dataclass
class Project:
    """A recipe with a store; `environment`: beside what the stand-in hub needs."""

    folder: Path
    hub: Hub
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def lock(self) -> Path:
        return self.folder / "recipe.lock"

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    def write(self, base: dict[str, Any], **more: Any) -> None:
        root = Path(__file__).resolve().parents[1]
        value = scan_document((root / "recipes/micro.yaml").read_bytes(), "micro").data
        value["target"]["base"] = base
        value["data"] |= more
        value["name"] = "small"
        (self.folder / "templates").mkdir(exist_ok=True)
        (self.folder / "templates/chatml.jinja").write_bytes((root / "recipes/templates/chatml.jinja").read_bytes())
        self.recipe.write_text(yaml.safe_dump(value, sort_keys=False))

    def run(self, *options: str, **environment: str) -> Done:
        """`qdc lock --json` as a process of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PIP_"))}
        given = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.folder / "hf"), "PIP_CONFIG_FILE": os.devnull}
        given |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **self.environment, **environment}
        command = [sys.executable, "-m", "qdc", "lock", str(self.recipe), "--store", str(self.store.root), "--json"]
        done = subprocess.run([*command, *options], env=kept | given, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr
        made = Done(done.returncode, done.stdout, done.stderr)
        checked("lock" if done.returncode < 2 else "error", made.answer)
        return made

    def locked(self, *options: str) -> dict[str, Any]:
        """Run it, and read the lock's sources."""
        done = self.run(*options)
        assert done.code == 0, done.err
        value: dict[str, Any] = json.loads(self.lock.read_bytes())["sources"]
        return value

    def place(self, field: str, section: str = "base") -> tuple[int, int]:
        """Line and column of the value of `field` in a section of the recipe."""
        lines = self.recipe.read_text().splitlines()
        start = next(number for number, line in enumerate(lines) if line.strip() == f"{section}:")
        number = next(index for index in range(start, len(lines)) if lines[index].strip().startswith(f"{field}:"))
        return number + 1, lines[number].index(": ") + 3

    def qdc(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
        """A verb in this process, which has no hub."""
        store = ["--store", str(self.store.root)] if words[0] != "validate" else []
        code = main([*words, str(self.recipe), *store, "--json"])
        answer = json.loads(capsys.readouterr().out)
        checked("error" if "error" in answer else words[0], answer)
        return code, answer


def prompts(splits: list[str]) -> dict[str, Any]:
    return {"hf_dataset": DATASET, "revision": DATA_REVISION, "splits": splits, "count": 5, "seed": 1}


@contextmanager
def filled(root: Path) -> Iterator[Hub]:
    """A hub with a model and a data set."""
    with serving() as made:
        made.repositories["models", MODEL] = {REVISION: checkpoint(root)}
        data = {
            f"data/{split}-0000{part}-of-00002.parquet": f"{split}{part}".encode() * 50
            for split in ("chat", "chats", "math")
            for part in (0, 1)
        }
        made.repositories["datasets", DATASET] = {
            DATA_REVISION: {**data, "README.md": b"---\nlicense: cc-by-4.0\n---\n"}
        }
        yield made


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    with filled(root) as made:
        yield made


@pytest.fixture
def project(tmp_path: Path, hub: Hub) -> Project:
    made = Project(tmp_path, hub)
    made.write({"hf": MODEL, "revision": REVISION})
    return made
