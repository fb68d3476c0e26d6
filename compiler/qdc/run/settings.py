"""User settings: what may differ between two people who build the same product. Never in a key.

From `QDC_*` variables, then `~/.config/qdc/config.yaml`; they say where interpreters and the store are and how
much of the machine to use.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qdc.core.errors import QdcError
from qdc.run.cluster import Cluster, Need, cluster, processes


@dataclass(frozen=True)
class Settings:
    """`train_python`: interpreter with the train environment (absolute, or a name for PATH to find).

    `threads`: CPU threads of a compute stage; one by default, because small models gain little from more and the bits
    of a training may depend on it. `jobs`: compute stages at a time. `training_bytes`: memory that the training device
    has free (`training_memory_gb`, 10^9 bytes), or None: what a recipe's training needs is then printed, not judged.
    `remote`: URL of a store to read from and to push to, or None; it may hold a password, and is never shown whole.
    `executor`: where stages run, this machine (`local`) or a cluster (`ray`), which `cluster` describes. `processes`:
    kind of stage -> processes that one training of it has, a card each where `device` is `cuda`. `device`: where the
    models of stages go.
    """

    train_python: str
    threads: int
    jobs: int
    training_bytes: float | None = None
    remote: str | None = field(default=None, repr=False)
    executor: str = "local"
    cluster: Cluster = field(default_factory=Cluster)
    processes: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"

    def need(self, kind: str) -> Need:
        """What a stage of `kind` reserves of a node of the cluster: where models go on cards, one for each process."""
        from qdc.graph.table import KINDS

        need = self.cluster.need(kind)
        if self.device == "cpu" or need.gpus or not KINDS[kind].has_models:
            return need
        return replace(need, gpus=float(self.processes.get(kind, 1)))


DEVICES = ("cpu", "cuda")
EXECUTORS = ("local", "ray")
KNOWN = ("device", "executor", "jobs", "processes", "ray", "remote", "threads", "train_python", "training_memory_gb")


def config_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "qdc" / "config.yaml"


def settings(executor: str | None = None, address: str | None = None) -> Settings:
    """The settings in force; `executor` and `address` as the command line gives them. Raises QdcError naming the file
    or variable that is wrong."""
    values = _from_file(config_file())
    python = os.environ.get("QDC_TRAIN_PYTHON") or values.get("train_python") or sys.executable
    threads = _count("threads", values, 1)
    jobs = _count("jobs", values, min(2, os.cpu_count() or 1))
    python = os.path.expanduser(str(python))
    python = os.path.abspath(python) if os.sep in python else python
    chosen = executor or os.environ.get("QDC_EXECUTOR") or values.get("executor") or "local"
    if chosen not in EXECUTORS:
        raise QdcError(
            "settings.executor",
            f"there is no executor `{chosen}`",
            hint=f"--executor, QDC_EXECUTOR or `executor` in {config_file()}: {' or '.join(EXECUTORS)}",
        )
    return Settings(
        python,
        threads,
        jobs,
        training_bytes(values),
        remote(values=values),
        chosen,
        cluster(values.get("ray"), address, threads, config_file()),
        processes(values.get("processes"), config_file()),
        device(values),
    )


def device(values: dict[str, Any]) -> str:
    """Where the models of stages go. Raises QdcError for what is neither `cpu` nor `cuda`."""
    given = str(os.environ.get("QDC_DEVICE") or values.get("device") or "cpu")
    if given not in DEVICES:
        raise QdcError(
            "settings.device",
            f"there is no device `{given}`",
            hint=f"QDC_DEVICE or `device` in {config_file()}: {' or '.join(DEVICES)}",
        )
    return given


def remote(given: str | None = None, values: dict[str, Any] | None = None) -> str | None:
    """The remote's URL: `given` (`--remote`), QDC_REMOTE, or the settings file; `none` stands for no remote."""
    if given is None:
        given = os.environ.get("QDC_REMOTE")
    if given is None:
        found = (_from_file(config_file()) if values is None else values).get("remote")
        given = str(found) if found is not None else None
    return given if given and given != "none" else None


def training_bytes(values: dict[str, Any] | None = None) -> float | None:
    """Memory that the training device has free, in bytes, where the settings say so. Raises QdcError."""
    values = _from_file(config_file()) if values is None else values
    given = os.environ.get("QDC_TRAINING_MEMORY_GB") or values.get("training_memory_gb")
    if given is None:
        return None
    try:
        size = float(given) * 1e9
    except (TypeError, ValueError):
        size = 0.0
    if not 0.0 < size < float("inf"):
        raise QdcError(
            "settings.training_memory_gb",
            f"training_memory_gb must be a number over 0, not `{given}`",
            hint=f"correct QDC_TRAINING_MEMORY_GB or {config_file()}",
        )
    return size


def _count(name: str, values: dict[str, Any], default: int) -> int:
    """A setting that is a whole number from 1 up."""
    variable = f"QDC_{name.upper()}"
    given = os.environ.get(variable) or values.get(name) or default
    try:
        count = int(given)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise QdcError(
            f"settings.{name}",
            f"{name} must be a whole number from 1 up, not `{given}`",
            hint=f"correct {variable} or {config_file()}",
        )
    return count


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise QdcError("settings.file", f"cannot read the settings: {str(error).splitlines()[0]}", file=path) from None
    if not isinstance(value, dict) or set(value) - set(KNOWN):
        raise QdcError("settings.file", f"settings are a mapping of {', '.join(KNOWN)}", file=path)
    return value
