"""HTTP in front of the engine's own server, inside its process: health, manifest, the contract's entry point.

An ASGI middleware that the engine's server loads by name (`--middleware middleware.Middleware`).
  GET /ping           200 after one real completion has succeeded and while the engine is well; else 503 and why; so
                      does the path that the contract names for it
  GET /manifest       the content manifest, byte for byte; when the launcher altered or dropped something, the same
                      document with `altered` and `dropped` added
  POST /invocations   to /v1/chat/completions if the body has `messages`, else to /v1/completions; a boolean
                      `thinking` becomes `chat_template_kwargs.enable_thinking`; the model's name may be left out
Everything else passes through untouched. Refuses to start unless every declared engine patch is in place.
Standard library only; knows the launcher's QDC_STATE and nothing of qdc.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GROUP = "vllm.general_plugins"
WARM_UP = {"prompt": "Hello", "max_tokens": 16, "temperature": 0.0}
WARM_UP_ATTEMPTS = 3


def check_patches(names: list[str]) -> None:
    """Raises RuntimeError unless each named patch is an entry point of the engine's and in place in this process."""
    found = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    for name in names:
        if name not in found:
            raise RuntimeError(f"qdc: the engine patch {name} was not found by the engine")
        if not sys.modules[found[name].load().__module__].is_in_place():
            raise RuntimeError(f"qdc: the engine patch {name} is not in place")


def manifest_body(state: dict[str, Any], document: bytes) -> bytes:
    """What GET /manifest answers, given the bytes of manifest.json."""
    runtime = {key: state[key] for key in ("altered", "dropped") if state[key]}
    if state["manifest"] == "digest":
        value: dict[str, Any] = {"manifest_digest": "sha256:" + hashlib.sha256(document).hexdigest()}
    elif runtime:
        value = json.loads(document)
    else:
        return document
    return (json.dumps({**value, **runtime}, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def invocation(body: bytes, model: str) -> tuple[str, bytes]:
    """The path and body of the engine's own that a body of /invocations stands for. Raises ValueError."""
    request = json.loads(body)
    if not isinstance(request, dict):
        raise ValueError("the body is not a JSON object")
    request.setdefault("model", model)
    if "messages" not in request:
        if "prompt" not in request:
            raise ValueError("the body has neither `messages` nor `prompt`")
        request.pop("thinking", None)
        return "/v1/completions", json.dumps(request).encode()
    if "thinking" in request:
        thinking = request.pop("thinking")
        if not isinstance(thinking, bool):
            raise ValueError("`thinking` is not true or false")
        request["chat_template_kwargs"] = {
            **(request.get("chat_template_kwargs") or {}),
            "enable_thinking": thinking,
        }
    return "/v1/chat/completions", json.dumps(request).encode()


class Middleware:
    """See the module's text. `app` is the engine's own server."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.state: dict[str, Any] = json.loads(os.environ["QDC_STATE"])
        check_patches(self.state["patches"])
        self.manifest = manifest_body(self.state, Path(self.state["manifest_path"]).read_bytes())
        self.warm = False
        self.reason = "the engine is starting"
        self.warming: asyncio.Task[None] | None = None
        self.application: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        # what the server's framework put into the scope on the way here; own requests to it need the same
        self.application = {key: scope[key] for key in ("app", "state") if key in scope}
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._warm_at_start(send))
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        elif path in ("/ping", self.state["contract"]["ping"]):
            await self._ping(send)
        elif path == "/manifest" and scope["method"] in ("GET", "HEAD"):
            await respond(send, 200, self.manifest)
        elif path in ("/invocations", self.state["contract"]["invocations"]) and scope["method"] == "POST":
            await self._invoke(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _warm_at_start(self, send: Send) -> Send:
        async def watched(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                self._start_warming()

        return watched

    def _start_warming(self) -> None:
        if self.warming is None or (self.warming.done() and not self.warm):
            self.warming = asyncio.create_task(self._warm_up())

    async def _warm_up(self) -> None:
        body = json.dumps({**WARM_UP, "model": self.state["served_model_name"]}).encode()
        for _ in range(WARM_UP_ATTEMPTS):
            status, answer = await self._ask("POST", "/v1/completions", body)
            if status == 200 and json.loads(answer)["usage"]["completion_tokens"] > 0:
                self.warm = True
                print("qdc: ready, one completion has succeeded", file=sys.stderr, flush=True)
                return
            self.reason = f"the first completion failed with status {status}"
            print(f"qdc: {self.reason}: {answer[:300]!r}", file=sys.stderr, flush=True)
            await asyncio.sleep(1.0)

    async def _ping(self, send: Send) -> None:
        if not self.warm:
            self._start_warming()
            await respond_json(send, 503, {"status": "starting", "why": self.reason})
            return
        status, _ = await self._ask("GET", "/health", b"")
        if status == 200:
            await respond_json(send, 200, {"status": "ok"})
        else:
            await respond_json(send, 503, {"status": "broken", "why": f"the engine's health is {status}"})

    async def _invoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            path, body = invocation(await read_body(receive), self.state["served_model_name"])
        except ValueError as error:
            await respond_json(send, 400, {"error": {"message": str(error), "code": 400}})
            return
        await self.app(internal_scope("POST", path, body, scope), once(body, receive), send)

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """One request to the engine's own server, without a socket: (status, body); (599, why) if it raised."""
        answer: dict[str, Any] = {"status": 599, "body": b""}

        async def collect(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer["status"] = message["status"]
            elif message["type"] == "http.response.body":
                answer["body"] += message.get("body", b"")

        try:
            await self.app(internal_scope(method, path, body, own=self.application), once(body), collect)
        except Exception as error:
            return 599, repr(error).encode()
        return answer["status"], answer["body"]


def internal_scope(
    method: str, path: str, body: bytes, outer: Scope | None = None, *, own: Scope | None = None
) -> Scope:
    """An ASGI scope for `path`: that of the request `outer`, else one of our own with the entries of `own`."""
    replaced = (b"content-length", b"content-type", b"transfer-encoding")
    headers = [pair for pair in (outer["headers"] if outer else []) if pair[0].lower() not in replaced]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    base: Scope = (
        dict(outer)
        if outer
        else {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "root_path": "",
            **(own or {}),
        }
    )
    return {
        **base,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }


def once(body: bytes, then: Receive | None = None) -> Receive:
    """A receive that gives `body` and after that what `then` gives (without it, waits for ever)."""
    left = [body]

    async def receive() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        if then is not None:
            return await then()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the client went away")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def respond_json(send: Send, status: int, value: dict[str, Any]) -> None:
    await respond(send, status, json.dumps(value).encode())


async def respond(send: Send, status: int, body: bytes) -> None:
    """A whole JSON answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
