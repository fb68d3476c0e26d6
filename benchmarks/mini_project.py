"""The adversary's mini project as other tools see it: what each stage depends on, and how one stage is run.

Two small programs go into the project's folder: `run.py` runs a stage (the same code for every tool), `told.py` says in
Python what the stages depend on, for tools whose own files are Python.
"""

from __future__ import annotations

from adversary.oracle import BYTES, CLOSURE, KIND
from adversary.world import DECLARED

PARAMETERS = {"draw": ["count"], "left": ["lr", "widths.left"], "right": ["lr", "widths.right"], "toss": ["faces"]}
PARAMETERS |= {"join": [], "pack": ["k"]}
PACKAGES = "compiler/qdc/environments/packages.json"
RUN = '''"""Runs one stage: `run.py STAGE [INPUT ...]`; also reads the recipe."""
import builtins, json, os, re, signal, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parent
KIND = @KIND@

def number(text):
    text = text.strip()
    if text.isdigit():
        return int(text)
    return float(text) if re.fullmatch("[0-9]*[.]?[0-9]*([eE][-+]?[0-9]+)?", text) else text

def recipe():
    value = {}
    for line in (ROOT / "recipes/mini.yaml").read_text().splitlines():
        name, _, text = line.partition(": ")
        inner = dict(part.split(": ") for part in text.strip("{}").split(", ")) if text.startswith("{") else None
        value[name] = number(text) if inner is None else {key: number(item) for key, item in inner.items()}
    return value

def data_path(name):
    return ROOT / name[1:] if name.startswith("@") else ROOT / "compiler/qdc" / name

def write(path, data, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)

def load_module(name, known):
    if name in known:
        return known[name]
    known[name] = module = ModuleType(name)
    def load(target, _globals=None, _locals=None, given=(), level=0):
        parts = target.split(".")[1:] if level == 0 else target.split(".")
        if len(parts) == 2:
            return load_module("/".join(parts), known)
        return SimpleNamespace(**{item: load_module("/".join([*parts, item]), known) for item in given})
    module.__dict__.update(
        __builtins__={**vars(builtins), "__import__": load},
        take=lambda context, role: int((context.inputs[role] / "value").read_text()),
        put=lambda context, value: write(context.output / "value", f"{value}\\n".encode()),
        throw=lambda: 0,
        copy=lambda context, name, mode: write(context.output / name.strip("@"), data_path(name).read_bytes(), mode),
    )
    exec(compile((ROOT / f"compiler/qdc/{name}.py").read_bytes(), name, "exec"), module.__dict__)
    return module

def main(stage, given):
    values = recipe()
    values["width"] = values["widths"].get(stage)
    roles = {"draw": {"source": "recipes/input"}, "left": {"draw": "out/draw"}, "right": {"draw": "out/draw"},
             "join": {role: f"out/{name}" for role, name in values["roles"].items()},
             "toss": {}, "pack": {"join": "out/join", "toss": "out/toss"}}[stage]
    if given:
        roles = {role: str(Path(path).parent) for role, path in zip(roles, given)}
    context = SimpleNamespace(params=values, inputs={role: ROOT / path for role, path in roles.items()},
                              output=ROOT / "out" / stage)
    with (ROOT / "ran.log").open("a") as log:
        log.write(stage + "\\n")
    if os.environ.get("KILL_AT") == stage:
        write(context.output / "value", b"")
        for process in (os.getsid(0), os.getppid(), os.getpid()):
            os.kill(process, signal.SIGKILL)
    load_module(f"stages/{KIND[stage]}", {}).run(context)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
'''


def code(stage: str) -> list[str]:
    return [f"compiler/qdc/{module}.py" for module in CLOSURE[KIND[stage]]]


def data(stage: str) -> list[str]:
    return [name[1:] if name.startswith("@") else f"compiler/qdc/{name}" for name in BYTES.get(KIND[stage], ())]


def made(stage: str) -> list[str]:
    """The files of a stage's output."""
    return [f"out/{stage}/value", *(f"out/{stage}/{name.strip('@')}" for name in BYTES.get(KIND[stage], ()))]


TOLD = """
import json
from pathlib import Path
from run import recipe
ROOT = Path(__file__).resolve().parent
CODE, DATA, MADE, DECLARED, PARAMETERS = @TOLD@

def inputs(stage):
    values = recipe()
    files = sorted(path for path in (ROOT / "recipes/input").rglob("*") if path.is_file())
    roles = {"draw": [str(path.relative_to(ROOT)) for path in files],
             "left": ["out/draw/value"], "right": ["out/draw/value"], "toss": [],
             "join": [f"out/{values['roles'][role]}/value" for role in "ab"],
             "pack": ["out/join/value", "out/toss/value"]}
    return roles[stage]

def parameters(stage):
    values, packages = recipe(), json.loads((ROOT / "@PACKAGES@").read_text())
    found = {}
    for name in PARAMETERS[stage]:
        value = values
        for part in name.split("."):
            value = value[part]
        found[name] = value
    return found | {name: packages[name] for name in DECLARED[stage]}
"""


def told() -> str:
    """Python that says what every stage depends on."""
    tables = [
        {stage: code(stage) for stage in KIND},
        {stage: data(stage) for stage in KIND},
        {stage: made(stage) for stage in KIND},
        {stage: list(DECLARED[KIND[stage]]) for stage in KIND},
        PARAMETERS,
    ]
    return TOLD.replace("@TOLD@", repr(tables)).replace("@PACKAGES@", PACKAGES)


def runner() -> str:
    """Python that runs one stage."""
    return RUN.replace("@KIND@", repr(KIND))
