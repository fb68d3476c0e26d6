"""Runs beside the server (in its container): reads batches of HTTP requests on stdin, answers on stdout.

    python3 -c "<this file>" PORT
One line in: {"requests": [{"method", "path", "body", "timeout_s"}], "concurrency": n}; `body` is a JSON value or null.
Lines out, as the answers arrive: {"index", "status", "seconds", "body": base64}, then {"done": n}. Status 0: no
answer (`body` says why). Standard library only; knows nothing of qdc, so that it can be sent as text.
"""

from __future__ import annotations

import base64
import http.client
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LOCK = threading.Lock()


def say(value: dict[str, Any]) -> None:
    with LOCK:
        print(json.dumps(value), flush=True)


def ask(port: int, index: int, request: dict[str, Any]) -> None:
    """One request to 127.0.0.1:`port`; says its answer."""
    started = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=request.get("timeout_s", 60))
    try:
        body = None if request.get("body") is None else json.dumps(request["body"])
        connection.request(request["method"], request["path"], body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, data = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        status, data = 0, repr(error).encode()
    finally:
        connection.close()
    seconds = round(time.monotonic() - started, 4)
    say({"index": index, "status": status, "seconds": seconds, "body": base64.b64encode(data).decode()})


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
