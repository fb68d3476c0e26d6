"""The adversary's mini project in the form of DVC, Snakemake, redun and doit, and in qdc's own machinery.

Every tool is told the same of every stage: the files of its code and of what that imports, its data files, its input
files by role, its parameters, and the versions of the packages that matter to it. A stage is the same Python code for
all. Used by benchmarks/freshness.py, which judges.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from adversary.driver import Outcome as Built
from adversary.oracle import KIND, Expected, Files, digest_of
from adversary.trial import Trial
from adversary.world import DECLARED, Meaning, World
from mini_project import PACKAGES, PARAMETERS, code, data, made, runner, told
from null_build import environment
from peers import peer, versions

from qdc import __version__
from qdc.core.errors import QdcError
from qdc.run.keep import keep


@dataclass
class Outcome:
    """`ran`: stages that ran, with repeats. `refused`: what the tool said where it did not come to its end."""

    ran: list[str] = field(default_factory=list)
    refused: str = ""


class PeerWorld(World):
    """The world, with the locked versions also where other tools can read them one by one."""

    def write_lock(self) -> None:
        super().write_lock()
        self.put(self.root / PACKAGES, json.dumps(self.meaning.packages).encode())


class Peer(ABC):
    """One tool in a folder of its own: `form` writes its files, `command` builds, `kept` accepts an output."""

    name = ""
    waits = True

    def __init__(self, place: Path) -> None:
        self.python = peer(self.name, [self.name])
        self.version = versions(self.python)[self.name]
        self.root, self.saved = place / self.name / "project", place / self.name / "saved"
        self.world: World = PeerWorld(self.root)
        (self.root / "run.py").write_text(runner())
        self.form()
        first = self.build()
        if first.refused or sorted(first.ran) != sorted(KIND):
            raise SystemExit(f"{self.name}: the first build ran {first.ran}: {first.refused}")
        shutil.copytree(self.root, self.saved, symlinks=True)
        self.fresh = copy.deepcopy(self.world)
        time.sleep(1.1)

    def reset(self) -> None:
        """The project as it was after its first build; times too."""
        shutil.rmtree(self.world.root, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self.saved), str(self.root)], check=True)
        self.world = copy.deepcopy(self.fresh)

    def close(self) -> None:
        shutil.rmtree(self.saved.parent, ignore_errors=True)

    @property
    def meaning(self) -> Meaning:
        return self.world.meaning

    def binary(self, name: str) -> str:
        return str(self.python.with_name(name))

    def shell(self, stage: str, given: str = "") -> str:
        return f"{self.python} -S run.py {stage} {given}".rstrip()

    @abstractmethod
    def form(self) -> None:
        """Write the project's files as the tool wants them."""

    @abstractmethod
    def command(self) -> list[str]:
        """What a user types to build."""

    def kept(self, stage: str) -> list[str] | None:
        return None

    def start(self, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(),
            cwd=self.world.root,
            env=environment() | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def build(self, at_once: int = 1, **more: str) -> Outcome:
        log = self.world.root / "ran.log"
        before = len(log.read_text().split()) if log.exists() else 0
        running = [self.start(**more) for _ in range(at_once)]
        said = [process.communicate()[0] for process in running]
        failed = [text for process, text in zip(running, said, strict=True) if process.returncode != 0]
        ran = log.read_text().split()[before:] if log.exists() else []
        return Outcome(ran, cause(failed[0]) if failed else "")

    def kill_in(self, stage: str) -> Outcome:
        """A build that dies, with all of its processes, while `stage` has an empty output file."""
        return self.build(KILL_AT=stage)

    def keep(self, stage: str) -> bool:
        command = self.kept(stage)
        if command is None:
            return False
        subprocess.run(command, cwd=self.world.root, env=environment(), check=True, capture_output=True)
        return True

    def move(self) -> None:
        there = self.root.with_name("moved")
        shutil.rmtree(there, ignore_errors=True)
        os.rename(self.root, there)
        for name in ("root", "package", "recipe", "inputs"):
            old: Path = getattr(self.world, name)
            setattr(self.world, name, there / old.relative_to(self.root))

    def output(self, stage: str) -> Path:
        return self.world.root / "out" / stage / "value"

    def wrong_outputs(self, expected: Expected) -> list[str]:
        return [stage for stage in KIND if self._files(stage) != {(p, c) for p, _, c in expected.outputs[stage]}]

    def _files(self, stage: str) -> set[tuple[str, bytes]]:
        base = self.world.root / "out" / stage
        return {(path.relative_to(base).as_posix(), path.read_bytes()) for path in base.rglob("*") if path.is_file()}


def cause(text: str) -> str:
    """The line of a tool's output that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in ("error", "lock", "incomplete"))]
    return (telling or lines or ["it ended"])[0][:160]


class Dvc(Peer):
    name = "dvc"

    def form(self) -> None:
        subprocess.run([self.binary("dvc"), "init", "-q", "--no-scm"], cwd=self.root, env=environment(), check=True)
        reads = {"draw": ["recipes/input"], "left": ["out/draw"], "right": ["out/draw"], "toss": []}
        reads |= {"join": ["out/left", "out/right"], "pack": ["out/join", "out/toss"]}
        stages = {}
        for stage in KIND:
            recipe = [*PARAMETERS[stage], *(["roles"] if stage == "join" else [])]
            params = [{"recipes/mini.yaml": recipe}] if recipe else []
            params += [{PACKAGES: list(DECLARED[KIND[stage]])}] if DECLARED[KIND[stage]] else []
            deps = [*code(stage), *data(stage), *reads[stage]]
            stages[stage] = {"cmd": self.shell(stage), "deps": deps, "params": params, "outs": [f"out/{stage}"]}
        (self.root / "dvc.yaml").write_text(json.dumps({"stages": stages}, indent=1))

    def command(self) -> list[str]:
        return [self.binary("dvc"), "repro"]

    def kept(self, stage: str) -> list[str] | None:
        return [self.binary("dvc"), "commit", "-f", stage]


class Snakemake(Peer):
    name = "snakemake"

    def form(self) -> None:
        inputs = {"draw": "source=INPUT", "left": 'draw="out/draw/value"', "right": 'draw="out/draw/value"', "toss": ""}
        inputs["join"] = ", ".join(f"{role}=f\"out/{{config['roles']['{role}']}}/value\"" for role in "ab")
        inputs["pack"] = 'join="out/join/value", toss="out/toss/value"'
        lines = ["import json", "from pathlib import Path", 'configfile: "recipes/mini.yaml"']
        lines += [f'PACKAGES = json.loads(Path("{PACKAGES}").read_text())']
        lines += ['INPUT = sorted(str(path) for path in Path("recipes/input").rglob("*") if path.is_file())']
        lines += ['rule all:\n    input: "out/pack/value"']
        for stage in KIND:
            params = [
                f"the_{name.split('.')[-1]}=config{''.join(f'[{p!r}]' for p in name.split('.'))}"
                for name in PARAMETERS[stage]
            ]
            params += [f"the_{name}=PACKAGES[{name!r}]" for name in DECLARED[KIND[stage]]]
            given = [part for part in (inputs[stage], f"the_code={code(stage)}") if part]
            given += [f"the_data={data(stage)}"] if data(stage) else []
            lines += [
                f"rule {stage}:",
                f"    input: {', '.join(given)}",
                f"    output: {', '.join(map(repr, made(stage)))}",
            ]
            lines += [f"    params: {', '.join(params)}"] if params else []
            lines += [f"    shell: {self.shell(stage, '{input.a} {input.b}' if stage == 'join' else '')!r}"]
        (self.root / "Snakefile").write_text("\n".join(lines) + "\n")

    def command(self) -> list[str]:
        return [self.binary("snakemake"), "--cores", "1"]

    def kept(self, stage: str) -> list[str] | None:
        return [self.binary("snakemake"), "--cores", "1", "--touch"]


class Doit(Peer):
    name = "doit"

    def form(self) -> None:
        (self.root / "told.py").write_text(told())
        (self.root / "dodo.py").write_text(f"""
from doit.tools import config_changed
from told import CODE, DATA, MADE, inputs, parameters

def task_stage():
    for stage in {list(KIND)!r}:
        given = inputs(stage)
        values = parameters(stage) | ({{"a": given[0], "b": given[1]}} if stage == "join" else {{}})
        yield {{
            "name": stage,
            "actions": [{self.shell("{}")!r}.format(stage)],
            "file_dep": [*CODE[stage], *DATA[stage], *given],
            "targets": MADE[stage],
            "uptodate": [config_changed(values)],
        }}
""")

    def command(self) -> list[str]:
        return [self.binary("doit")]

    def kept(self, stage: str) -> list[str] | None:
        return [self.binary("doit"), "reset-dep", f"stage:{stage}"]


class Redun(Peer):
    name = "redun"

    def form(self) -> None:
        (self.root / "told.py").write_text(told())
        (self.root / "workflow.py").write_text(f"""
import subprocess
from redun import File, task
from told import CODE, DATA, MADE, inputs, parameters

redun_namespace = "mini"

@task()
def make(stage, code, data, given, values):
    subprocess.run({self.shell("{}")!r}.format(stage), shell=True, check=True)
    return [File(name) for name in MADE[stage]]

@task(cache=False)
def main():
    done = {{}}
    for stage in {list(KIND)!r}:
        names = inputs(stage)
        given = [done[name.split("/")[1]][0] if name.startswith("out/") else File(name) for name in names]
        code, data = ([File(name) for name in table[stage]] for table in (CODE, DATA))
        done[stage] = make(stage, code, data, given, parameters(stage))
    return done["pack"]
""")

    def command(self) -> list[str]:
        return [self.binary("redun"), "run", "workflow.py", "main"]


class Qdc:
    """qdc's front end, keys, plan, executor and store, as in the tests."""

    name, version = "qdc", __version__

    def __init__(self, place: Path) -> None:
        self.trial: Trial | None = None

    def close(self) -> None:
        if self.trial is not None:
            self.trial.close()

    def reset(self) -> None:
        self.close()
        self.trial = Trial()
        self.trial.settle()
        self.trial.clock.advance()

    @property
    def running(self) -> Trial:
        assert self.trial is not None
        return self.trial

    @property
    def world(self) -> World:
        return self.running.world

    @property
    def meaning(self) -> Meaning:
        return self.world.meaning

    def build(self, at_once: int = 1) -> Outcome:
        self.running.clock.advance()
        before = len(self.running.engine.stages.done)
        if at_once > 1 and (errors := self.running.engine.builders(at_once)):
            return Outcome(self.running.engine.stages.done[before:], str(errors[0]))
        for _ in range(3):
            self.built = self.running.engine.build()
            if not (isinstance(self.built.error, QdcError) and self.built.error.id == "store.damaged"):
                break
        said = str(self.built.error or "")
        return Outcome(self.running.engine.stages.done[before:], said)

    def kill_in(self, stage: str) -> Outcome:
        """A process of its own, ended by SIGKILL while `stage` has an empty output file."""
        child = os.fork()
        if child == 0:

            def die(name: str) -> None:
                if name == stage:
                    os.kill(os.getpid(), signal.SIGKILL)

            self.running.engine.stages.before = die
            self.running.engine.build()
            os._exit(0)
        os.waitpid(child, 0)
        self.running.clock.advance()
        return Outcome()

    def keep(self, stage: str) -> bool:
        with self.running.engine.ready():
            store, build, _ = self.running.engine.open()
            return bool(keep(store, build.plan, [stage], "the output is the same"))

    def move(self) -> None:
        self.world.move(self.world.root / "elsewhere")

    def output(self, stage: str) -> Path:
        files: Files = self.running.last.outputs[stage]
        return self.running.disk.path(next(content for path, _, content in files if path == "value"))

    def wrong_outputs(self, expected: Expected) -> list[str]:
        built: Built = self.built
        damaged = self.running.disk.damaged()
        wrong = []
        for stage in KIND:
            files = expected.outputs[stage]
            lost = any(not self.running.disk.has(content) for _, _, content in files)
            flipped = any(self.running.disk.path(content).name in damaged for _, _, content in files)
            if built.outputs.get(stage) != digest_of(files) or lost or flipped:
                wrong.append(stage)
        return wrong


CONTESTANTS: tuple[Callable[[Path], Peer | Qdc], ...] = (Qdc, Dvc, Snakemake, Redun, Doit)
