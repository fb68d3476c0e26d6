"""A stand-in engine that speaks the contract, right or wrong as told: `stub_engine.py serve [--without-drafter]`.

Behaviour comes as JSON in /srv/behaviour.json or in the file named by STUB_BEHAVIOUR; without any it is a good engine.
Tokens are words; an answer follows from the request alone. Standard library only: it runs in images and on the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIMIT = 256
EOS = 2
DEFAULTS: dict[str, Any] = {
    "port": 8080,
    "host": "127.0.0.1",
    "model": "stub",
    "accepted": 2.0,  # of each draft
    "decay": 1.0,  # factor on `accepted` with each request
    "ping": 200,  # or 500, "hang"
    "pings_before_ready": 1,
    "garbage": None,  # "text", "shape", "drip", "endless", "http"
    "status": 200,  # of every answer
    "wrong": False,  # other text with speculation
    "runaway": False,  # with speculation, the same words until the limit
    "slow_s": 0.0,  # for each request that is under way
    "crash_at": None,  # request in the middle of whose answer the process ends
    "exit": None,  # [status, last words] instead of serving
    "memory_mb": 0,
    "metrics": True,
    "own_routes": True,  # /tokenize and token IDs, as vLLM has them
    "manifest": None,
    "thinks_on_invocations": False,  # a default in one route only
}


class Engine:
    """State of one server."""

    def __init__(self, behaviour: dict[str, Any], drafts: bool) -> None:
        self.how = {**DEFAULTS, **behaviour}
        self.drafts_on = drafts
        self.drafts = self.accepted = 0.0
        self.requests = self.under_way = 0
        self.pings = self.how["pings_before_ready"]
        self.lock = threading.Lock()
        self.held = b"x" * (self.how["memory_mb"] << 20)

    def prompt(self, body: dict[str, Any]) -> int:
        texts = [message["content"] for message in body["messages"]] if "messages" in body else [body["prompt"]]
        return sum(2 + len(text.split()) for text in texts) + (3 if body.get("thinking") else 0)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self.prompt(body)
        seed = hashlib.sha256(json.dumps(body.get("messages") or body["prompt"]).encode()).digest()
        ids = [10 + byte for byte in seed[: 16 + seed[0] % 8]] + [EOS]
        room = min(LIMIT - prompt, body.get("max_tokens", LIMIT))
        if body.get("ignore_eos"):
            ids = (ids * 20)[:room]
        if self.how["runaway"] and self.drafts_on:
            ids = ([20, 21, 22] * LIMIT)[:room]
        if self.how["wrong"] and self.drafts_on and len(ids) > 4:
            ids[3] += 7
        ids = ids[:room]
        with self.lock:
            if self.drafts_on:
                accepted = self.how["accepted"] * self.how["decay"] ** self.requests
                steps = -(-len(ids) // (1 + accepted))
                self.drafts += steps
                self.accepted += steps * accepted
            self.requests += 1
        text = " ".join(f"w{id}" for id in ids)
        choice: dict[str, Any] = {"finish_reason": "length" if ids[-1:] != [EOS] else "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        if self.how["own_routes"] and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs") and "messages" in body:
            choice["logprobs"] = {"content": [{"top_logprobs": [_top(id, 16.0), _top(id + 1, 14.0)]} for id in ids]}
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}


def _top(id: int, logit: float) -> dict[str, Any]:
    return {"token": f"token_id:{id}", "logprob": logit}


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        how = self.engine.how
        if self.path in ("/ping", "/health"):
            self.engine.pings -= 1
            if how["ping"] == "hang":
                time.sleep(3600)
            ready = self.engine.pings < 0
            self.reply(how["ping"] if ready or how["ping"] != 200 else 503, b'{"why": "as told"}')
        elif self.path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": how["model"], "max_model_len": LIMIT}]}).encode())
        elif self.path == "/metrics" and how["metrics"]:
            lines = ""
            if self.engine.drafts_on:
                for name, value in (("drafts", self.engine.drafts), ("accepted_tokens", self.engine.accepted)):
                    lines += f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}\n'
            self.reply(200, lines.encode())
        elif self.path == "/manifest" and how["manifest"]:
            with open(how["manifest"], "rb") as stream:
                self.reply(200, stream.read())
        else:
            self.reply(404, b"{}")

    def do_POST(self) -> None:
        engine, how = self.engine, self.engine.how
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            known = how["own_routes"]
            self.reply(200 if known else 404, json.dumps({"count": engine.prompt(body)} if known else {}).encode())
            return
        if how["thinks_on_invocations"] and self.path == "/invocations":
            body.setdefault("thinking", True)
        with engine.lock:
            engine.under_way += 1
            number = engine.requests
        time.sleep(how["slow_s"] * engine.under_way)
        data = json.dumps(engine.answer(body)).encode()
        with engine.lock:
            engine.under_way -= 1
        if how["crash_at"] is not None and number >= how["crash_at"]:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:20])
            self.wfile.flush()
            print("stub: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(139)
        self.spoil(how["garbage"], how["status"], data)

    def spoil(self, garbage: str | None, status: int, data: bytes) -> None:
        """The answer, or what is none."""
        if garbage == "text":
            self.reply(200, b"\xff\xfe<html>not JSON")
        elif garbage == "shape":
            self.reply(200, b'{"choices": [], "usage": {"completion_tokens": "many"}}')
        elif garbage == "http":
            self.wfile.write(b"\x00\x01\x02 this is no HTTP\r\n\r\n")
            self.close_connection = True
        elif garbage in ("drip", "endless"):
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" " * (1 << 20 if garbage == "endless" else 1))
                self.wfile.flush()
                time.sleep(0.0 if garbage == "endless" else 0.2)
        else:
            self.reply(status, data)


def read_behaviour() -> dict[str, Any]:
    path = os.environ.get("STUB_BEHAVIOUR", "/srv/behaviour.json")
    if not os.path.exists(path):
        return {}
    with open(path) as stream:
        value: dict[str, Any] = json.load(stream)
    return value


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def main() -> None:
    behaviour = read_behaviour()
    if behaviour.get("exit"):
        status, words = behaviour["exit"]
        print(words, file=sys.stderr, flush=True)
        sys.exit(status)
    engine = Engine(behaviour, "--without-drafter" not in sys.argv)
    handler = type("Bound", (Handler,), {"engine": engine})
    with Server((engine.how["host"], engine.how["port"]), handler) as server:
        print(f"stub: listening on {server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
