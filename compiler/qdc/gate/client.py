"""Runs beside the server (in its container or its network): reads batches of HTTP requests on stdin, answers on stdout.

    python3 -c "<this file>" PORT
One line in: {"requests": [{"method", "path", "body", "timeout_s"}], "concurrency": n}; `body` is a JSON value or null.
Lines out, as the answers arrive: {"index", "status", "seconds", "body": base64}, then {"done": n}. Status 0: no whole
answer within `timeout_s` (`body` says why). The method LISTENING is no request: its body is the JSON list of the TCP
ports on which somebody listens here. Standard library of any Python from 3.7 on; knows nothing of qdc, so that it can
be sent as text.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LOCK = threading.Lock()
LARGEST = 64 << 20
LISTEN = "0A"


def say(value: dict[str, Any]) -> None:
    with LOCK:
        print(json.dumps(value), flush=True)


def ask(port: int, index: int, request: dict[str, Any]) -> None:
    """One request to 127.0.0.1:`port`; says its answer."""
    started = time.monotonic()
    try:
        if request["method"] == "LISTENING":
            status, data = 200, json.dumps(listening()).encode()
        else:
            status, data = fetch(port, request, request.get("timeout_s", 60))
    except (OSError, http.client.HTTPException, ValueError) as error:
        status, data = 0, repr(error).encode()
    seconds = round(time.monotonic() - started, 4)
    say({"index": index, "status": status, "seconds": seconds, "body": base64.b64encode(data).decode()})


def fetch(port: int, request: dict[str, Any], timeout_s: float) -> tuple[int, bytes]:
    """Status and body. Raises OSError or HTTPException, at the latest after `timeout_s`, however slowly it drips."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    late = threading.Event()
    try:
        connection.connect()
        line = connection.sock

        def give_up() -> None:
            late.set()
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            body = None if request.get("body") is None else json.dumps(request["body"])
            connection.request(request["method"], request["path"], body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read(LARGEST + 1)
        except (OSError, http.client.HTTPException):
            if late.is_set():
                raise TimeoutError(f"no whole answer within {timeout_s:g} s") from None
            raise
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"no whole answer within {timeout_s:g} s")
        if response.length and len(data) <= LARGEST:
            raise http.client.IncompleteRead(data, response.length)
        if len(data) > LARGEST:
            raise OSError(f"the answer has more than {LARGEST} bytes")
        return response.status, data
    finally:
        connection.close()


def listening() -> list[int]:
    """TCP ports with a listener in this network."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name) as table:
                rows = [line.split() for line in table][1:]
        except OSError:
            continue
        found |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}
    return sorted(found)


def main() -> None:
    port = int(sys.argv[1])
    for line in sys.stdin:
        batch = json.loads(line)
        with ThreadPoolExecutor(batch["concurrency"]) as pool:
            for index, request in enumerate(batch["requests"]):
                pool.submit(ask, port, index, request)
        say({"done": len(batch["requests"])})


if __name__ == "__main__":
    main()
