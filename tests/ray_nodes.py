"""A Ray cluster on this machine's loopback, in a process of its own, whose nodes can be lost; and stages of one line.

`python ray_nodes.py FOLDER` reads a command a line ({"add": options}, {"lose": number}, ...), answers each with a line,
and ends the cluster, by its own processes' ids, when its input ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE = """
import qdc.graph.table, qdc.run.process, qdc.stages
qdc.stages.__path__.append({folder!r})
qdc.graph.table.KINDS["probe"] = qdc.graph.table.Kind("probe", "train", "exact", parallel=True)
qdc.run.process.SOURCE_ROOT = f"{{qdc.run.process.SOURCE_ROOT}}{pathsep}{folder}"
"""
STAGE = """
import os, sys, time
from pathlib import Path
def run(context):
    if context.params.get("trace") and context.rank == 0:
        with open(context.params["trace"], "a") as trace:
            trace.write(context.params["name"] + "\\n")
    exec(context.params["code"], {**globals(), "context": context, "output": context.output})
"""


def probes(folder: Path) -> Path:
    """A folder for PYTHONPATH with the stage kind `probe`, which runs the code in its parameters."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder), pathsep=os.pathsep))
    (folder / "probe.py").write_text(STAGE)
    return folder


class Nodes:
    """The cluster, from a test's side. Each node has a store of its own."""

    def __init__(self, folder: Path, *more: Path, cpus: int = 2) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "compiler", *more)))}
        environment = {name: value for name, value in environment.items() if not name.startswith(("AWS_", "QDC_"))}
        self.log = (folder / "cluster.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.count = -1
        self.address = self.add(num_cpus=cpus)["address"]

    def _say(self, value: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(value), file=self.process.stdin, flush=True)
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError((self.folder / "cluster.log").read_text())

    def add(self, environment: dict[str, str] | None = None, **options: Any) -> Any:
        """Start a node (the first is the head); `number` in the answer names it."""
        self.count += 1
        variables = {"QDC_NODE_STORE": str(self.folder / f"node{self.count}"), **(environment or {})}
        return {**self._say({"add": {"env_vars": variables, **options}}), "number": self.count}

    def lose(self, number: int) -> None:
        """Kill a node's processes."""
        self._say({"lose": number})

    def behead(self) -> None:
        """Kill what the cluster's address leads to."""
        self._say({"behead": True})

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.log.close()


def serve(folder: Path) -> None:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Where Ray notes the latest cluster of this machine; it does not make the folder itself.
    Path("/tmp/ray").mkdir(exist_ok=True)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes = []
    with tempfile.TemporaryDirectory(prefix="qdcray", dir="/tmp") as temporary:
        for line in sys.stdin:
            command = json.loads(line)
            if "add" in command:
                given = {"num_gpus": 0, "memory": 4_000_000_000, "object_store_memory": 80_000_000, **command["add"]}
                head = {"include_dashboard": False, "temp_dir": temporary} if not nodes else {}
                nodes.append(cluster.add_node(node_ip_address="127.0.0.1", **given, **head))
            elif "behead" in command:
                cluster.head_node.kill_gcs_server(check_alive=False)
            else:
                cluster.remove_node(nodes[command["lose"]], allow_graceful=False)
            print(json.dumps({"address": cluster.address if "add" in command else None}), flush=True)
        cluster.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
