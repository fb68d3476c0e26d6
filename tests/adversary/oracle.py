"""What must rerun, decided from meaning alone, by other means than the engine's.

The oracle knows the mini project's rules (what each stage computes from what), keeps its own ledger of what was made
under which meaning, and looks at the store's files by their documented layout. It imports nothing of qdc.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from adversary.world import DECLARED, Meaning

Files = tuple[tuple[str, int, bytes], ...]
"""(path, mode, content) of a folder, sorted."""
Inputs = dict[str, Files]

KIND = {"draw": "draw", "left": "shape", "right": "shape", "join": "join", "toss": "toss", "pack": "pack"}
"""Stage -> its kind, in an order in which inputs come first."""
CLOSURE = {
    "draw": ("stages/draw", "methods/text", "methods/deep"),
    "shape": ("stages/shape", "methods/text", "methods/deep"),
    "join": ("stages/join", "methods/late"),
    "toss": ("stages/toss",),
    "pack": ("stages/pack", "formats/header"),
}
BYTES = {"pack": ("@templates/Dockerfile.j2", "serving/engines.json", "serving/launch.py")}


def sources(stage: str, meaning: Meaning) -> dict[str, str]:
    """Role -> stage that fills it; the user's folder is `input`."""
    if stage in ("left", "right"):
        return {"draw": "draw"}
    return {"draw": {"source": "input"}, "join": dict(meaning.roles), "pack": {"join": "join", "toss": "toss"}}.get(
        stage, {}
    )


def parameters(stage: str, meaning: Meaning) -> tuple[object, ...]:
    return {
        "draw": (meaning.count,),
        "left": (meaning.lr, meaning.widths["left"]),
        "right": (meaning.lr, meaning.widths["right"]),
        "join": (),
        "toss": (meaning.faces,),
        "pack": (meaning.k,),
    }[stage]


def sense(stage: str, meaning: Meaning, inputs: Inputs) -> str:
    """A digest of all that may matter to a stage's output, and of nothing else."""
    kind = KIND[stage]
    parts = (
        kind,
        parameters(stage, meaning),
        sorted(inputs.items()),
        [(module, meaning.constants[module]) for module in CLOSURE[kind]],
        [(name, meaning.data_text(name)) for name in BYTES.get(kind, ())],
        [(package, meaning.packages[package]) for package in DECLARED[kind]],
    )
    return hashlib.blake2b(repr(parts).encode()).hexdigest()


def number(files: Files) -> int:
    return next(int(content) for path, _, content in files if path == "value")


def make(stage: str, meaning: Meaning, inputs: Inputs) -> Files:
    """What the stage's output is."""
    c = meaning.constants

    def weigh(x: int) -> int:
        return x * (c["methods/deep"] + 1) + c["methods/text"]

    if stage == "draw":
        total = sum(int(content) for _, _, content in inputs["source"])
        value = (weigh(total * meaning.count) + c["stages/draw"]) // 3
    elif stage in ("left", "right"):
        shaped = weigh(number(inputs["draw"])) * meaning.widths[stage]
        value = (shaped + round(meaning.lr * 1e7) + c["stages/shape"]) // 2
    elif stage == "join":
        value = 10 * number(inputs["a"]) + number(inputs["b"]) + c["methods/late"] + c["stages/join"]
    elif stage == "toss":
        value = meaning.dice + c["stages/toss"] + meaning.faces
    else:
        inner = 7 * number(inputs["join"]) + number(inputs["toss"]) + meaning.k
        value = 2 * inner + c["formats/header"] + c["stages/pack"]
    made = [("value", 0o644, f"{value}\n".encode())]
    if stage == "pack":
        for name in BYTES["pack"]:
            made.append((name.strip("@"), 0o755 if name.endswith(".py") else 0o644, meaning.data_text(name)))
    return tuple(sorted(made))


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(files: Files) -> str:
    """What names a folder in the store: SHA-256 of its list of [path, size, mode, SHA-256] as JSON without spaces."""
    listed = [[path, len(content), mode, sha(content)] for path, mode, content in files]
    return sha(json.dumps(listed, separators=(",", ":")).encode())


class Disk:
    """The store as files: `objects/sha256/<2 hex>/<64 hex>`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, content: bytes) -> Path:
        name = sha(content)
        return self.root / "objects" / "sha256" / name[:2] / name

    def has(self, content: bytes) -> bool:
        """Whether an object of that name and size is there: what a look without reading shows."""
        path = self.path(content)
        return path.is_file() and path.stat().st_size == len(content)

    def damaged(self) -> set[str]:
        """Names of objects that hold something else than their name says."""
        objects = (self.root / "objects" / "sha256").glob("*/*")
        return {path.name for path in objects if sha(path.read_bytes()) != path.name}


@dataclass
class Entry:
    """One record: an output under a sense; `n` grows with every record that is added."""

    n: int
    output: Files


@dataclass
class Expected:
    """`must`: sense -> stage, of those that must run; `found`: those among them that only reading an object can
    show; `outputs`: stage -> files; `senses`: stage -> sense."""

    must: dict[str, str] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)
    outputs: dict[str, Files] = field(default_factory=dict)
    senses: dict[str, str] = field(default_factory=dict)


class Oracle:
    """The ledger of one store. `shown`: names of objects that were written to with a time that shows it."""

    def __init__(self) -> None:
        self.ledger: dict[str, list[Entry]] = {}
        self.chosen: dict[str, int] = {}
        self.lost_trees: set[Files] = set()
        self.shown: set[str] = set()
        self.added = 0

    def expect(self, meaning: Meaning, disk: Disk) -> Expected:
        """What a build must run now. Where a stage that runs reads a damaged object, what made that runs too."""
        damaged = disk.damaged()
        absent = damaged & self.shown
        first = self._pass(meaning, disk, absent)
        expected = first
        while True:
            read = {
                sha(content)
                for stage in expected.must.values()
                for source in sources(stage, meaning).values()
                for _, _, content in expected.outputs[source]
            }
            if not (read & damaged) - absent:
                break
            absent |= read & damaged
            expected = self._pass(meaning, disk, absent)
        expected.found = set(expected.must) - set(first.must)
        return expected

    def _pass(self, meaning: Meaning, disk: Disk, absent: set[str]) -> Expected:
        given = tuple(sorted((n, 0o755 if x else 0o644, t.encode()) for n, (t, x) in meaning.inputs.items()))
        outputs: dict[str, Files] = {"input": given}
        expected = Expected(outputs=outputs)
        for stage in KIND:
            inputs = {role: outputs[source] for role, source in sources(stage, meaning).items()}
            key = sense(stage, meaning, inputs)
            expected.senses[stage] = key
            held = self.held(key, disk, absent)
            if held is None and key not in expected.must:
                expected.must[key] = stage
            outputs[stage] = held if held is not None else make(stage, meaning, inputs)
        return expected

    def held(self, key: str, disk: Disk, absent: Iterable[str] = ()) -> Files | None:
        """The output that counts under a sense: the chosen or first whole one."""
        chosen = self.chosen.get(key)
        for entry in sorted(self.ledger.get(key, []), key=lambda entry: (entry.n != chosen, entry.n)):
            contents = [content for _, _, content in entry.output]
            whole = all(disk.has(content) and sha(content) not in absent for content in contents)
            if whole and entry.output not in self.lost_trees:
                return entry.output
        return None

    def made(self, key: str, output: Files) -> None:
        """A record was added, with its output whole in the store, because none had its output: it counts from now on,
        whatever comes back of the others."""
        self.lost_trees.discard(output)
        entries = self.ledger.setdefault(key, [])
        if all(entry.output != output for entry in entries):
            self.added += 1
            entries.append(Entry(self.added, output))
        self.chosen[key] = next(entry.n for entry in entries if entry.output == output)
