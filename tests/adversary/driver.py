"""The mini project in qdc's own hands: its front end's memory, code digests, keys, plan, executor and store.

Replaced are only: the table of kinds and the expansion of a recipe (the mini project's own), the reading of a recipe's
fields above YAML, and the process of a stage, which runs here in this one.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from adversary.clock import Clock
from adversary.faults import Killed
from adversary.world import DECLARED, World

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.stage import Context
from qdc.graph.code import code_files
from qdc.graph.instances import Instance
from qdc.graph.table import Kind
from qdc.recipe.load import Loaded
from qdc.recipe.reading import parse_document
from qdc.run import build as build_module
from qdc.run import front as front_module
from qdc.run import worker as worker_module
from qdc.run.build import Build
from qdc.run.settings import Settings
from qdc.store.store import Store

DATA = ("serving/*.py", "serving/*.json", "@templates/Dockerfile.j2")
KINDS = {
    "draw": Kind("draw", "core", "exact", DECLARED["draw"]),
    "shape": Kind("shape", "core", "seeded", DECLARED["shape"]),
    "join": Kind("join", "core", "exact"),
    "toss": Kind("toss", "core", "sampled", lane="io"),
    "pack": Kind("pack", "core", "exact", data=DATA, lane="io"),
}
IDLE = 3000
"""How often a build may look for others' work in vain: some seconds."""
_open, _mkdir, _chmod, _close, _write = os.open, os.mkdir, os.chmod, os.close, os.write


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file, whatever fault the store's own calls meet."""
    with contextlib.suppress(FileExistsError):
        _mkdir(path.parent)
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    _write(descriptor, data)
    _close(descriptor)
    _chmod(path, mode)


def expand(recipe: dict[str, Any], facts: dict[str, Any]) -> list[Instance]:
    """The mini project's stages, inputs first."""
    given: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
        "draw": ("draw", {"count": recipe["count"]}, {"source": f"tree:{facts['sources']['input']}"}),
        **{
            side: ("shape", {"lr": recipe["lr"], "width": recipe["widths"][side]}, {"draw": "draw"})
            for side in ("left", "right")
        },
        "join": ("join", {}, dict(recipe["roles"])),
        "toss": ("toss", {"faces": recipe["faces"]}, {}),
        "pack": ("pack", {"k": recipe["k"]}, {"join": "join", "toss": "toss"}),
    }
    instances = []
    for name, (kind, params, inputs) in given.items():
        row = KINDS[kind]
        packages = {package: facts["versions"][package] for package in row.packages}
        code = facts["code"][kind]
        instances.append(
            Instance(name, kind, params, inputs, code, packages, row.determinism, row.environment, row.lane)
        )
    return instances


def run_stage(module: ModuleType, job: dict[str, Any], context: Context, amid: Callable[[], None]) -> None:
    """What a worker does once its stage is loaded. `amid` happens between the worker's look at the code and the run."""
    worker_module.check_code(job)
    amid()
    module.run(context)
    worker_module.check_data(job)


class Stages:
    """Runs a stage in this process, from the package's files as they are at that moment.

    `before` happens when a stage is about to be loaded, `amid` when it is about to run.
    """

    def __init__(self) -> None:
        self.world: World
        self.before: Callable[[str], None] = lambda name: None
        self.amid: Callable[[str], None] = lambda name: None
        self.done: list[str] = []
        self.idle = 0

    def start(self, name: str, python: str, job: dict[str, Any], work: Path, log: Path, *_: Any, **__: Any) -> Any:
        failure = QdcError("stage.died", f"stage {name} died", exit_code=COULD_NOT)
        return SimpleNamespace(
            name=name,
            job=job,
            log=log,
            seconds=0.0,
            process=SimpleNamespace(returncode=0),
            failure=lambda code: failure,
        )

    def wait_any(self, workers: list[Any], limit_s: float | None = None) -> Any:
        if not workers:
            self.idle += 1
            if self.idle > IDLE:
                raise RuntimeError("the build waits for ever")
            time.sleep(limit_s or 0.0)
            return None
        self.idle = 0
        worker = workers[0]
        self.before(worker.name)
        job = worker.job
        folders = {role: Path(path) for role, path in job["inputs"].items()}
        context = Context(folders, job["digests"], job["params"], Path(job["output"]), Path(job["partial"]))
        module = self._load(f"stages/{job['module']}", {})
        try:
            run_stage(module, job, context, lambda: self.amid(worker.name))
        except QdcError as error:
            refused = error
            worker.process.returncode, worker.failure = refused.exit_code, lambda code: refused
            return worker
        self.done.append(worker.name)
        return worker

    def stop(self, workers: list[Any]) -> None:
        """Stages that were started and not awaited have done nothing."""

    def _load(self, name: str, known: dict[str, ModuleType]) -> ModuleType:
        if name in known:
            return known[name]
        known[name] = module = ModuleType(name)
        world = self.world

        def load(target: str, _globals: Any = None, _locals: Any = None, given: Any = (), level: int = 0) -> Any:
            parts = target.split(".")[1:] if level == 0 else target.split(".")
            if len(parts) == 2:
                return self._load("/".join(parts), known)
            return SimpleNamespace(**{item: self._load("/".join([*parts, item]), known) for item in given})

        def copy(context: Context, file: str, mode: int) -> None:
            put(context.output / file.strip("@"), world.data_path(file).read_bytes(), mode)

        module.__dict__.update(
            __builtins__={**vars(builtins), "__import__": load},
            take=lambda context, role: int((context.inputs[role] / "value").read_text()),
            put=lambda context, value: put(context.output / "value", f"{value}\n".encode()),
            throw=lambda: world.meaning.dice,
            copy=copy,
        )
        exec(compile(world.code_path(name).read_bytes(), name, "exec"), module.__dict__)
        return module


@dataclass
class Outcome:
    """`states`: stage -> state in the first plan; `ran`: stages whose run ended, in order, with repeats; `recorded`:
    those whose record was written; `outputs`: stage -> tree digest of a build that came to its end."""

    states: dict[str, str] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    error: BaseException | None = None


class Listener:
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def planned(self, plan: Any) -> None:
        self.outcome.states = {stage.instance.name: stage.state for stage in plan.stages}

    def started(self, name: str) -> None: ...
    def progress(self, name: str, done: int, total: int, note: str) -> None: ...

    def finished(self, name: str, seconds: float, output: str) -> None:
        self.outcome.recorded.append(name)


class Engine:
    """qdc on one world. Each build has a new Store, as each process has."""

    def __init__(self, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock
        self.stages = Stages()
        self.stages.world = world

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Within, qdc is on this world."""
        with replaced(self._parts()), self.clock.running():
            yield

    def _parts(self) -> list[tuple[str, str, Any]]:
        package, root = self.world.package, self.world.root
        return [
            ("qdc.graph.code", "KINDS", KINDS),
            ("qdc.graph.code", "code_files", lambda only=None: code_files(package, only)),
            ("qdc.graph.code", "resource", lambda name: root / name),
            ("qdc.graph.locks", "FOLDER", package / "environments"),
            ("qdc.graph.expand", "expand", expand),
            ("qdc.graph.support", "unsupported", lambda recipe: []),
            ("qdc.recipe.load", "load", load),
            ("qdc.rules.check", "require", lambda loaded: []),
            ("qdc.rules.check", "require_lock", lambda loaded, state: None),
            ("qdc.sources.lock", "state", lambda loaded: None),
            ("qdc.sources.lock", "trees", lambda loaded: {}),
            ("qdc.sources.facts", "attach", lambda loaded: loaded),
            ("qdc.graph.signature", "PACKAGE", package),
            ("qdc.run.attempt", "KINDS", KINDS),
            *(("qdc.run.process", name, getattr(self.stages, name)) for name in ("start", "wait_any", "stop")),
            ("qdc.run.build", "LOOK_AGAIN_S", 0.001),
            ("qdc.run.keep", "KINDS", KINDS),
        ]

    def open(self) -> tuple[Store, Build, Outcome]:
        """A store, a build of the recipe as it is now, and where its outcome will be."""
        store, outcome = Store(self.world.store), Outcome()
        read = front_module.front(self.world.recipe, [], store)
        asked, listener = Settings("python", 1, 2), Listener(outcome)
        build = build_module.Build(store, asked, read.instances, listener, signature=read.signature)
        return store, build, outcome

    def build(self) -> Outcome:
        """One `qdc build`. Its error or death, if any, is in the outcome."""
        with self.ready():
            before, outcome = len(self.stages.done), Outcome()
            try:
                _, build, outcome = self.open()
                outcome.outputs = {ran.name: ran.output for ran in build.run()}
            except (Exception, Killed) as error:
                outcome.error = error
            finally:
                outcome.ran = self.stages.done[before:]
            return outcome

    def builders(self, count: int) -> list[BaseException]:
        """So many builds at once, each on its own thread with its own Store; their errors."""
        errors: list[BaseException] = []

        def build() -> None:
            try:
                self.open()[1].run()
            except BaseException as error:
                errors.append(error)

        with self.ready():
            threads = [threading.Thread(target=build) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        return errors

    def plan(self) -> dict[str, tuple[str, str | None]]:
        """`qdc plan`: stage -> state and key."""
        with self.ready():
            _, build, _ = self.open()
            return {stage.instance.name: (stage.state, stage.key) for stage in build.plan().stages}


def load(path: Path, sets: list[str] | None = None) -> Loaded:
    """The mini recipe, read by qdc's reader of YAML."""
    document = parse_document(path.read_bytes(), str(path))
    read = {str(path.resolve()): document.sha256}
    folders = {"input": path.resolve().parent / "input"}
    return Loaded(document.data, None, document, path.parent, "", folders=folders, read=read)  # type: ignore[arg-type]


@contextlib.contextmanager
def replaced(parts: list[tuple[str, str, Any]]) -> Iterator[None]:
    """Within, (module, name) is another thing."""
    old = []
    for module, name, value in parts:
        place = importlib.import_module(module)
        old.append((place, name, getattr(place, name)))
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in reversed(old):
            setattr(place, name, value)
