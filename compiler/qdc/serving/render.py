"""serve.json: everything that the launcher needs to start the engine, rendered from the product fields.

Pure functions; standard library and core only. Every engine argument and environment variable that takes effect is
written out, so that the content manifest shows it. What differs between engine versions is in engines.json, from
runs of those versions; nothing here compares versions. Knows no files: callers give sizes and digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError

SCHEMA = 1
PORT = 8080
TARGET_FOLDER = "/opt/models/target"
DRAFTER_FOLDER = "/opt/models/drafter"
SERVING_FOLDER = "/opt/qdc/serving"
PATCHES_FOLDER = "/opt/qdc/patches"
SITE_FOLDER = "/opt/qdc/site"
MIDDLEWARE = "middleware.Middleware"
MANIFEST_MODES = ("full", "digest")

FileFacts = Mapping[str, Mapping[str, Any]]


def engine_row(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about one engine version on one platform. Raises QdcError `serving.engine` if there are none.

    `engine`: the recipe's `serve.engine`, `{vllm: VERSION, platform: cpu | cuda, ...}`.
    """
    name = f"vllm {engine.get('vllm')} {engine.get('platform')}"
    rows = _engines()
    if name not in rows:
        raise QdcError("serving.engine", f"no facts about the engine {name!r}", hint="known: " + ", ".join(rows))
    row: dict[str, Any] = json.loads(json.dumps(rows[name]))
    return row


def required_patches(engine: Mapping[str, Any], drafts: bool) -> dict[str, str]:
    """Patch -> why the engine does not serve rightly without it. `drafts`: whether a drafter is served."""
    row = engine_row(engine)
    return {**row["required_patches"], **(row["required_with_drafter"] if drafts else {})}


def patches_of(engine: Mapping[str, Any]) -> list[str]:
    """Names of the patches in the image, sorted: those that the recipe declares."""
    return sorted(set(engine["patches"]))


def serve_config(
    product: Mapping[str, Any],
    *,
    target_files: FileFacts,
    drafter_files: FileFacts | None,
    patches: Mapping[str, str],
    manifest_mode: str = "full",
) -> dict[str, Any]:
    """serve.json as a JSON value; write it with `canonical.pretty`.

    `product`: the recipe's resolved product fields `name`, `serve`, `deploy` and (or null) `drafter`.
    `target_files`, `drafter_files`: path in the model folder -> {"size": bytes, "sha256": 64 hex}; only the
    *.safetensors are kept (the launcher checks them). `drafter_files` is None when no model drafts.
    `patches`: name -> digest (`qdc.serving.patches.patch_digest`) of exactly `patches_of(serve.engine)`.
    `manifest_mode`: whether GET /manifest shows the content manifest ("full") or its digest ("digest").
    Raises QdcError `serving.*` where the fields do not fit the engine.
    """
    serve, engine = product["serve"], product["serve"]["engine"]
    row = engine_row(engine)
    if manifest_mode not in MANIFEST_MODES:
        raise QdcError("serving.manifest-mode", f"manifest mode {manifest_mode!r} is not one of {MANIFEST_MODES}")
    if sorted(patches) != patches_of(engine):
        wanted, given = ", ".join(patches_of(engine)), ", ".join(sorted(patches))
        raise QdcError("serving.patches", f"the image needs the patches {wanted}; digests were given of {given}")
    missing = sorted(set(required_patches(engine, bool(product.get("drafter")))) - set(patches))
    if missing:
        raise QdcError("serving.patches", f"the engine needs the patches {', '.join(missing)}, which are not declared")
    environment = dict(row["environment"])
    environment["VLLM_PLUGINS"] = ",".join(sorted(patches))
    return {
        "schema": SCHEMA,
        "engine": {
            "name": "vllm",
            "version": engine["vllm"],
            "platform": engine["platform"],
            "module": row["module"],
        },
        "served_model_name": product["name"],
        "host": "0.0.0.0",
        "port": PORT,
        "arguments": _arguments(product["name"], serve, row, _speculation(product, row, drafter_files)),
        "without_drafter": row["without_drafter"],
        "environment": environment,
        "python_path": [SERVING_FOLDER, *(f"{PATCHES_FOLDER}/{name}" for name in sorted(patches)), SITE_FOLDER],
        "weights": _weights(TARGET_FOLDER, target_files) + _weights(DRAFTER_FOLDER, drafter_files or {}),
        "patches": [{"name": name, "digest": patches[name]} for name in sorted(patches)],
        "contract": {
            "name": product.get("deploy", {}).get("contract"),
            "ping": "/ping",
            "invocations": "/invocations",
        },
        "manifest": manifest_mode,
    }


@cache
def _engines() -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((Path(__file__).parent / "engines.json").read_text())
    return rows


def _speculation(
    product: Mapping[str, Any], row: Mapping[str, Any], drafter_files: FileFacts | None
) -> dict[str, Any] | None:
    """vLLM's --speculative-config, or None when nothing drafts."""
    drafter = product.get("drafter")
    if not drafter:
        if drafter_files:
            raise QdcError("serving.drafter", "drafter files were given, but the recipe has no drafter")
        return None
    kind = drafter["kind"] if "kind" in drafter else drafter["architecture"]["kind"]
    if kind == "none":
        return None
    if kind not in row["speculation"]:
        raise QdcError("serving.drafter", f"this engine cannot serve a drafter of kind {kind!r}")
    config: dict[str, Any] = {
        "method": row["speculation"][kind],
        "num_speculative_tokens": product["serve"]["k"],
    }
    if drafter_files:
        config["model"] = DRAFTER_FOLDER
    elif kind == "dflash":
        raise QdcError("serving.drafter", "a dflash drafter needs its weights in the image")
    return config


def _arguments(
    name: str, serve: Mapping[str, Any], row: Mapping[str, Any], speculation: Mapping[str, Any] | None
) -> list[str]:
    """Every argument of the engine's server, in one fixed order."""
    prefix_caching = serve["engine"].get("prefix_caching", False)
    options = {
        "--model": TARGET_FOLDER,
        "--tokenizer": TARGET_FOLDER,
        "--chat-template": f"{TARGET_FOLDER}/chat_template.jinja",
        "--served-model-name": name,
        "--host": "0.0.0.0",
        "--port": str(PORT),
        "--dtype": serve["dtype"],
        "--max-model-len": str(serve["max_model_len"]),
        "--max-num-seqs": str(serve["max_num_seqs"]),
        **row["arguments"],
        "--middleware": MIDDLEWARE,
    }
    if speculation is not None:
        options["--speculative-config"] = canonical.dumps(dict(speculation)).decode()
    flags = [*row["flags"], "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"]
    return [part for option in options.items() for part in option] + flags


def _weights(folder: str, files: FileFacts) -> list[dict[str, Any]]:
    return [
        {
            "path": f"{folder}/{path}",
            "size": files[path]["size"],
            "sha256": files[path]["sha256"].removeprefix("sha256:"),
        }
        for path in sorted(files)
        if path.endswith(".safetensors")
    ]
