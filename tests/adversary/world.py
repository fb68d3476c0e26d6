"""A small but true project on disk: a package with stages and helpers, data files, a lock, a recipe, input files.

`Meaning` is all that can matter to an output. Comments, spellings, times and places are the world's alone: an edit of
them changes files and no meaning. This module knows neither qdc nor who judges it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

CODE = {
    "stages/draw": """
from qdc.core.say import say
from qdc.methods.text import weigh

def run(context):
    files = sorted(path for path in context.inputs["source"].rglob("*") if path.is_file())
    total = sum(int(path.read_text()) for path in files)
    say(total)
    put(context, (weigh(total * context.params["count"]) + CONST) // 3)
""",
    "stages/shape": """
from ..methods.text import weigh

def run(context):
    params = context.params
    put(context, (weigh(take(context, "draw")) * params["width"] + round(params["lr"] * 1e7) + CONST) // 2)
""",
    "stages/join": """
def run(context):
    from qdc.methods.late import extra
    put(context, extra(10 * take(context, "a") + take(context, "b")) + CONST)
""",
    "stages/toss": """
def run(context):
    put(context, throw() + CONST + context.params["faces"])
""",
    "stages/pack": """
from qdc.formats.header import stamp

def run(context):
    put(context, stamp(7 * take(context, "join") + take(context, "toss") + context.params["k"]) + CONST)
    copy(context, "serving/launch.py", 0o755)
    copy(context, "serving/engines.json", 0o644)
    copy(context, "@templates/Dockerfile.j2", 0o644)
""",
    "methods/deep": """
def scale(x):
    return x * (CONST + 1)
""",
    "methods/text": """
from qdc.methods import deep

def weigh(x):
    return deep.scale(x) + CONST
""",
    "methods/late": """
def extra(x):
    return x + CONST
""",
    "methods/loose": """
def unused(x):
    return x - CONST
""",
    "formats/header": """
def stamp(x):
    return 2 * x + CONST
""",
    "core/say": """
def say(x):
    return x + CONST
""",
}
"""Module -> what it does; each has its own CONST, from 0 to 9."""

OUTSIDE = ("core/say", "methods/loose")
"""Modules that no output may depend on."""
DATA = {
    "serving/launch.py": "# launch {}\nprint('serve')\n",
    "serving/engines.json": '{{"engine": "0.{}.0"}}\n',
    "@templates/Dockerfile.j2": "FROM scratch\nLABEL n={}\n",
}
PACKAGES = {"torchy": "2.1.0", "jsony": "1.0.0", "unused": "3.0.0"}
DECLARED = {"draw": ("jsony",), "shape": ("torchy",), "join": (), "toss": (), "pack": ()}
"""Kind of stage -> packages that matter to it."""


@dataclass
class Meaning:
    """`inputs`: name -> (content, executable). `roles`: who is `a` and who `b` of the join. `dice`: next throw."""

    constants: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CODE, 1))
    data: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DATA, 1))
    packages: dict[str, str] = field(default_factory=lambda: dict(PACKAGES))
    inputs: dict[str, tuple[str, bool]] = field(
        default_factory=lambda: {"one": ("11", False), "sub/two": ("22", False), "three": ("33", False)}
    )
    lr: float = 2e-6
    count: int = 2
    k: int = 7
    faces: int = 6
    widths: dict[str, int] = field(default_factory=lambda: {"left": 3, "right": 5})
    roles: dict[str, str] = field(default_factory=lambda: {"a": "left", "b": "right"})
    dice: int = 0

    def data_text(self, name: str) -> bytes:
        return DATA[name].format(self.data[name]).encode()


class World:
    """The files of `root`, and what they mean. Files are rewritten in place: the inode stays."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "compiler" / "qdc"
        self.recipe = root / "recipes" / "mini.yaml"
        self.inputs = root / "recipes" / "input"
        self.store = root / "store"
        self.meaning = Meaning()
        self.notes: dict[str, tuple[int, int, int]] = {}
        self.spelling = "2e-6"
        self.order = 0
        for name in CODE:
            self.write_code(name)
        for room in ("stages", "methods", "formats", "core", "serving"):
            self.put(self.package / room / "__init__.py", b"")
        for name in DATA:
            self.write_data(name)
        self.write_lock()
        self.write_recipe()
        for name in self.meaning.inputs:
            self.write_input(name)
        self.put(root / "README.md", b"A mini project.\n")

    def put(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def code_path(self, name: str) -> Path:
        return self.package / f"{name}.py"

    def data_path(self, name: str) -> Path:
        return self.root / name[1:] if name.startswith("@") else self.package / name

    def write_code(self, name: str) -> None:
        """The module, with as many comments and other docstrings and in the style that `notes` say."""
        comment, doc, style = self.notes.get(name, (0, 0, 0))
        constant = self.meaning.constants[name]
        lines = [f'"""Words about it, version {doc}."""']
        if comment:
            lines.append(f"# note {comment}")
        lines.append(f"CONST = {constant}" if style % 2 == 0 else f"CONST = (\n    {constant}  # styled {style}\n)")
        body = CODE[name]
        if doc:
            body = body.replace("):\n", f'):\n    """Does it, version {doc}."""\n', 1)
        if style:
            body = body.replace("\n\n", "\n" * (2 + style)).replace(" + CONST", "  +  (CONST)")
        self.put(self.code_path(name), ("\n".join(lines) + "\n" + body).encode())

    def write_data(self, name: str) -> None:
        self.put(self.data_path(name), self.meaning.data_text(name))

    def write_lock(self) -> None:
        text = "".join(f"{name}=={version} \\\n    --hash=x\n" for name, version in self.meaning.packages.items())
        for name in ("train", "serve"):
            self.put(self.package / "environments" / f"{name}.lock", text.encode())

    def write_recipe(self) -> None:
        meaning = self.meaning
        fields = [
            f"lr: {self.spelling}",
            f"count: {meaning.count}",
            f"k: {meaning.k}",
            f"faces: {meaning.faces}",
            "widths: {" + ", ".join(f"{name}: {width}" for name, width in self.turned(meaning.widths)) + "}",
            "roles: {" + ", ".join(f"{role}: {name}" for role, name in self.turned(meaning.roles)) + "}",
        ]
        at = self.order % len(fields)
        self.put(self.recipe, ("name: mini\n" + "\n".join(fields[at:] + fields[:at]) + "\n").encode())

    def turned(self, value: dict[str, object]) -> list[tuple[str, object]]:
        return list(reversed(value.items())) if self.order % 2 else list(value.items())

    def write_input(self, name: str) -> None:
        text, executable = self.meaning.inputs[name]
        self.put(self.inputs / name, text.encode())
        os.chmod(self.inputs / name, 0o755 if executable else 0o644)

    def move(self, root: Path) -> None:
        """The store goes to another path."""
        os.rename(self.store, root)
        self.store = root
