"""A Ray cluster: reached within bounded time, held against this qdc, and asked what its nodes have.

The only module that starts or joins a cluster. What is wrong with one is a QdcError with exit code 4.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.run.about import about, differences
from qdc.run.cluster import Cluster, Need

REACH_S, JOIN_S, ANSWER_S = 5.0, 40.0, 60.0
"""To connect and hear a first answer; to join; to hear from every node."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How an HTTP/2 client begins (RFC 9113, 3.4): Ray's head speaks gRPC, which is HTTP/2, and answers with SETTINGS."""
_HINT = "--address HOST:PORT, QDC_RAY_ADDRESS or `ray: {address: ...}` in config.yaml: as `ray start --head` prints it"


def load(cluster: Cluster) -> Any:
    """The package ray, which takes its settings when it is imported. Raises QdcError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    # Else Ray ends the whole process when a head is silent for a minute; the executor looks after that itself.
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "86400"  # noqa: SIM112
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if cluster.address is None or place(cluster.address)[0] in LOOPBACK:
        # Ray takes this machine's outer address for itself, unless it is told that there is no cluster.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError:
        raise QdcError(
            "ray.package",
            "the executor `ray` needs the package ray, which is not installed",
            exit_code=COULD_NOT,
            hint="pip install 'qdc[ray]'",
        ) from None
    return ray


def place(address: str) -> tuple[str, int]:
    """Host and port of an address. Raises QdcError where it is none."""
    host, mark, port = address.rpartition(":")
    if not mark or not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise QdcError("ray.address", f"`{address}` is no address of a cluster", exit_code=COULD_NOT, hint=_HINT)
    return host.strip("[]"), int(port)


def reach(address: str) -> None:
    """Raises QdcError unless something at the address answers as a Ray head does."""
    host, port = place(address)
    try:
        with socket.create_connection((host, port), REACH_S) as stream:
            stream.settimeout(REACH_S)
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            stream.sendall(_PREFACE)
            head = stream.recv(9)
    except TimeoutError:
        head = b""
    except OSError as error:
        raise QdcError(
            "ray.unreachable",
            f"no cluster answers at {address}: {error.strerror or error}",
            exit_code=COULD_NOT,
            hint=_HINT,
        ) from None
    if head[3:4] != b"\x04":
        raise QdcError("ray.not-ray", f"what answers at {address} is not Ray", exit_code=COULD_NOT, hint=_HINT)


def join(cluster: Cluster) -> tuple[Any, str]:
    """Connect this process to the cluster, or to one of its own on this machine; returns ray and the head's address."""
    ray = load(cluster)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    if cluster.address is not None:
        reach(cluster.address)
    given: dict[str, Any] = {"address": cluster.address or "local", "namespace": "qdc", "log_to_driver": False}
    if cluster.address is None:
        given |= {"include_dashboard": False, "object_store_memory": 100_000_000}
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(**given, configure_logging=False)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    with _muted():
        if cluster.address is None:
            connect()  # The processes of a cluster of its own end with the thread that started them.
        else:
            thread.start()
            thread.join(JOIN_S)
    if thread.is_alive() or failed:
        why = words(failed[0]) if failed else f"it let this machine wait for more than {JOIN_S:.0f} s"
        raise QdcError(
            "ray.join",
            f"cannot join the cluster at {cluster.address or 'this machine'}: {why}",
            exit_code=COULD_NOT,
            hint="a build runs on a machine of the cluster; Ray and Python there must be the versions here "
            f"(ray {ray.__version__}), and the address the one that its nodes use",
        )
    with contextlib.suppress(KeyError, AttributeError):
        # What happens to workers comes with their tasks; Ray would print it among the answer, on stdout.
        sys.modules["ray._private.worker"].print_to_stdstream = lambda *given, **named: None  # type: ignore[attr-defined]
    with contextlib.suppress(ValueError):
        # Its own handler prints a stack; the build's tasks end with the build, however it ends.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return ray, str(ray.get_runtime_context().gcs_address)


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Ray's core writes to the error stream itself while it tries to reach a cluster; what counts is said once."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__


def alive(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def compare(ray: Any) -> None:
    """Raises QdcError where a node's qdc, locks or Python are not this one's, with what differs."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = alive(ray)
    asked = [
        ray.remote(_teller())
        .options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        )
        .remote()
        for node in nodes
    ]
    wrong = []
    for node, answer in zip(nodes, asked, strict=True):
        name = node["NodeManagerHostname"] + f" ({node['NodeManagerAddress']})"
        try:
            said = ray.get(answer, timeout=ANSWER_S)
        except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
            continue  # It has gone since; the stages will not find it either.
        except ray.exceptions.RayError as error:
            wrong.append(f"{name} does not answer: {words(error)}")
            continue
        differs = differences(about(), said) if "files" in said else [said["why"]]
        wrong += [f"{name}: {'; '.join(differs)}"] if differs else []
    if wrong:
        raise QdcError(
            "ray.mismatch",
            f"the cluster's nodes are not like this machine: {' | '.join(wrong)}",
            exit_code=COULD_NOT,
            hint="install the same qdc, with its locked environment, on every node",
        )


def _teller() -> Any:
    """What a node is asked. A function in a function is sent whole, so that a node without qdc can answer too."""

    def tell() -> dict[str, Any]:
        try:
            from qdc.run.about import about
        except ImportError as error:
            try:
                import qdc
            except ImportError:
                return {"why": "qdc is not installed"}
            return {"why": f"qdc {getattr(qdc, '__version__', '?')}: {error}"}
        return about()

    return tell


def lacking(ray: Any, needs: Iterable[tuple[str, Need]]) -> str | None:
    """Why a stage can run on no node that is there, for the first such of (stage, need); None where all can."""
    nodes = [node["Resources"] for node in alive(ray)]
    for name, need in needs:
        wanted = {"CPU": need.cpus, "GPU": need.gpus, "memory": need.memory}
        if not any(all(node.get(what, 0.0) >= amount for what, amount in wanted.items()) for node in nodes):
            have = [Need(node.get("CPU", 0.0), node.get("GPU", 0.0), node.get("memory", 0.0)) for node in nodes]
            there = "; ".join(dict.fromkeys(map(str, have))) or "no nodes"
            return f"stage {name} needs {need} of one node, and the cluster's nodes have {there}"
    return None


def too_little(why: str) -> QdcError:
    return QdcError(
        "ray.resources",
        why,
        exit_code=COULD_NOT,
        hint="start larger nodes, or correct `ray: {needs: ...}` in config.yaml",
    )


def need_remote(url: str | None) -> str:
    """The remote's URL; QdcError where none is named or every process would have one of its own."""
    if url is None or url.startswith("memory:"):
        raise QdcError(
            "ray.remote",
            "the executor `ray` moves what stages make through a remote store that all nodes reach, and none is named",
            exit_code=WRONG_USE,
            hint="--remote URL, QDC_REMOTE, or `remote: URL` in config.yaml",
        )
    return url
