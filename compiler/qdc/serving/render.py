"""serve.json: everything that the launcher needs to start the engine, rendered from the product fields.

Pure functions. Every engine argument and environment variable that takes effect is written out, so that the content
manifest shows it. What an engine version calls things is in engines.json, what is asked of the image in
contracts.json; nothing here compares versions. Knows no files: callers give sizes and digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.serving.contracts import Contract, contract
from qdc.serving.engines import engine_row, required_patches
from qdc.tables import engines as table

SCHEMA = 1
HOST = "0.0.0.0"
TARGET_FOLDER = "/opt/models/target"
DRAFTER_FOLDER = "/opt/models/drafter"
SERVING_FOLDER = "/opt/qdc/serving"
PATCHES_FOLDER = "/opt/qdc/patches"
SITE_FOLDER = "/opt/qdc/site"
MIDDLEWARE = "middleware.Middleware"
MANIFEST_MODES = ("full", "digest")
PACKED = "compressed-tensors"
"""The quantization method of everything that is packed here."""

FileFacts = Mapping[str, Mapping[str, Any]]
Json = dict[str, Any]

_FIELDS: dict[str, Any] = {
    "dtype": None,
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "gpu_memory_utilization": None,
    "kv_cache_dtype": "auto",
    "state_dtype": "auto",
    "attention_backend": None,
}
"""Fields of `serve` that become one argument each, in order; the value that leaves the engine its own choice."""


def patches_of(engine: Mapping[str, Any]) -> list[str]:
    """Names of the patches in the image, sorted: those that the recipe declares."""
    return sorted(set(engine["patches"]))


def drafter_kind(drafter: Mapping[str, Any] | None) -> str | None:
    """The kind of a recipe's drafter; None when nothing drafts."""
    if not drafter:
        return None
    kind = str(drafter["kind"] if "kind" in drafter else drafter["architecture"]["kind"])
    return None if kind == "none" else kind


def refusals(serve: Mapping[str, Any], drafter: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """(recipe path, why) of all that this engine cannot be told, with the evidence. Raises QdcError `serving.engine`
    if nothing is known of the engine.

    `serve`, `drafter`: the recipe's resolved sections; absent fields have their defaults.
    """
    row, engine = engine_row(serve["engine"]), serve["engine"]
    name = f"vLLM {engine['vllm']} on {engine['platform']}"
    found = []
    for field, own in _FIELDS.items():
        value, values = serve.get(field, own), row["values"].get(field)
        if value is None or (value == own and field not in row["options"]):
            continue
        if field not in row["options"]:
            found.append((f"serve.{field}", f"{name} has no `{field}`"))
        elif values is not None and value not in values:
            found.append((f"serve.{field}", f"{name} takes {field} {', '.join(values)}, not {value}"))
    for path, value, values in (
        ("serve.engine.runner", engine.get("runner"), row["values"]["runner"]),
        ("serve.engine.prefix_caching", _word(engine.get("prefix_caching", False)), row["values"]["prefix_caching"]),
    ):
        if value is not None and value not in values:
            found.append((path, f"{name} was not found to serve with `{path.rpartition('.')[2]}: {value}`"))
    if serve.get("cudagraph_capture_sizes") is not None and "graphs" not in row:
        found.append(("serve.cudagraph_capture_sizes", f"{name} has no CUDA graphs"))
    return found + _drafter_refusals(name, serve, drafter, row)


def _drafter_refusals(
    name: str, serve: Mapping[str, Any], drafter: Mapping[str, Any] | None, row: Json
) -> list[tuple[str, str]]:
    kind, engine = drafter_kind(drafter), serve["engine"]
    if kind is None:
        return []
    known = table.cell(engine["vllm"], engine["platform"], kind) if kind in table.columns() else None
    path = "drafter.architecture.kind"
    if known is not None and known.value is False:
        return [(path, f"{name} has no drafter of kind `{kind}` ({known.source})")]
    if kind not in row["speculation"]["kinds"]:
        return [(path, f"{name} was not found to serve a drafter of kind `{kind}`")]
    methods = table.cell(engine["vllm"], engine["platform"], "rejection")
    wanted = serve.get("rejection", "standard")
    if methods is not None and wanted not in methods.value:
        why = f"{name} has no rejection method `{wanted}`, only {', '.join(methods.value)} ({methods.source})"
        return [("serve.rejection", why)]
    return []


def serve_config(
    product: Mapping[str, Any],
    *,
    target_files: FileFacts,
    drafter_files: FileFacts | None,
    patches: Mapping[str, str],
    manifest_mode: str = "full",
) -> Json:
    """serve.json as a JSON value; write it with `canonical.pretty`.

    `product`: the recipe's resolved product fields `name`, `serve`, `deploy`, `target` and (or null) `drafter`.
    `target_files`, `drafter_files`: path in the model folder -> {"size": bytes, "sha256": 64 hex}; only the
    *.safetensors are kept (the launcher checks them). `drafter_files` is None when no model drafts.
    `patches`: name -> digest (`qdc.serving.patches.patch_digest`) of exactly `patches_of(serve.engine)`.
    `manifest_mode`: whether GET /manifest shows the content manifest ("full") or its digest ("digest").
    Raises QdcError `serving.*` where the fields do not fit the engine.
    """
    serve, engine, drafter = product["serve"], product["serve"]["engine"], product.get("drafter")
    row = engine_row(engine)
    if manifest_mode not in MANIFEST_MODES:
        raise QdcError("serving.manifest-mode", f"manifest mode {manifest_mode!r} is not one of {MANIFEST_MODES}")
    for path, why in refusals(serve, drafter):
        raise QdcError("serving.drafter" if path.startswith("drafter") else "serving.engine", f"{path}: {why}")
    _check_patches(engine, drafter, patches)
    asked = contract(product["deploy"]["contract"])
    speculation = _speculation(product, row, drafter_files)
    graphs = row.get("graphs")
    return {
        "schema": SCHEMA,
        "engine": {
            "name": "vllm",
            "version": engine["vllm"],
            "platform": engine["platform"],
            "module": row["module"],
        },
        "served_model_name": product["name"],
        "arguments": _arguments(product, asked, row, speculation),
        "without_drafter": {
            "remove": [row["speculation"]["argument"]],
            "set": {
                **row["without_drafter"],
                **({graphs["argument"]: _graphs(serve, graphs, 1)} if graphs and not serve.get("eager") else {}),
            },
        },
        "environment": {
            **row["environment"],
            **(row["values"]["runner"][engine["runner"]] if engine.get("runner") else {}),
            "VLLM_PLUGINS": ",".join(sorted(patches)),
        },
        "python_path": [SERVING_FOLDER, *(f"{PATCHES_FOLDER}/{name}" for name in sorted(patches)), SITE_FOLDER],
        "weights": _weights(TARGET_FOLDER, target_files) + _weights(DRAFTER_FOLDER, drafter_files or {}),
        "patches": [{"name": name, "digest": patches[name]} for name in sorted(patches)],
        "contract": asked.served(),
        "manifest": manifest_mode,
    }


def _check_patches(engine: Mapping[str, Any], drafter: Mapping[str, Any] | None, patches: Mapping[str, str]) -> None:
    if sorted(patches) != patches_of(engine):
        wanted, given = ", ".join(patches_of(engine)), ", ".join(sorted(patches))
        raise QdcError("serving.patches", f"the image needs the patches {wanted}; digests were given of {given}")
    missing = sorted(set(required_patches(engine, drafter_kind(drafter) is not None)) - set(patches))
    if missing:
        raise QdcError("serving.patches", f"the engine needs the patches {', '.join(missing)}, which are not declared")


def _speculation(product: Mapping[str, Any], row: Json, drafter_files: FileFacts | None) -> Json | None:
    """The engine's speculative configuration, or None when nothing drafts."""
    serve, drafter = product["serve"], product.get("drafter")
    kind = drafter_kind(drafter)
    if kind is None or drafter is None:
        if drafter_files:
            raise QdcError("serving.drafter", "drafter files were given, but the recipe has no drafter")
        return None
    names, how = row["speculation"], row["speculation"]["kinds"][kind]
    if serve.get("k") is None:
        raise QdcError("serving.drafter", "`serve.k` is missing: the engine proposes that many tokens a step")
    made: Json = {"method": how["method"], names["k"]: serve["k"], **how.get("constants", {})}
    shape = drafter.get("architecture") or drafter
    made |= {key: shape[field] for field, key in how.get("fields", {}).items() if shape.get(field) is not None}
    if bool(how.get("weights")) != bool(drafter_files):
        needs = "needs its weights in the image" if how.get("weights") else "has no weights of its own"
        raise QdcError("serving.drafter", f"a drafter of kind {kind} {needs}")
    if drafter_files:
        made[names["model"]] = DRAFTER_FOLDER
        if drafter.get("ptq"):
            made[names["quantization"]] = PACKED
    backend = serve.get("attention_backend") or how.get("attention_backend")
    if drafter_files and backend and "attention_backend" in names:
        made[names["attention_backend"]] = backend
    if table.value(serve["engine"]["vllm"], serve["engine"]["platform"], "rejection") is not None:
        made[names["rejection"]] = serve.get("rejection", "standard")
    return made


def _arguments(product: Mapping[str, Any], asked: Contract, row: Json, speculation: Json | None) -> list[str]:
    """Every argument of the engine's server, in one fixed order."""
    serve = product["serve"]
    options = {
        "--model": TARGET_FOLDER,
        "--tokenizer": TARGET_FOLDER,
        "--chat-template": f"{TARGET_FOLDER}/chat_template.jinja",
        "--served-model-name": product["name"],
        "--host": HOST,
        "--port": str(asked.port),
    }
    for field, own in _FIELDS.items():
        value = serve.get(field, own)
        value = row["defaults"].get(field) if value is None else value
        if value is not None and field in row["options"]:
            options[row["options"][field]] = str(row["values"].get(field, {}).get(value, value))
    if (product.get("target") or {}).get("quantization"):
        options[row["quantization"]] = PACKED
    options |= {**row["arguments"], "--middleware": MIDDLEWARE}
    if speculation is not None:
        options[row["speculation"]["argument"]] = canonical.dumps(speculation).decode()
    if "graphs" in row and not serve.get("eager"):
        step = 1 + serve["k"] if speculation is not None else 1
        options[row["graphs"]["argument"]] = _graphs(serve, row["graphs"], step)
    switches = [
        row["values"]["eager"][_word(serve.get("eager", False))],
        *row["flags"],
        row["values"]["prefix_caching"][_word(serve["engine"].get("prefix_caching", False))],
    ]
    return [part for option in options.items() for part in option] + [switch for switch in switches if switch]


def _graphs(serve: Mapping[str, Any], names: Mapping[str, str], step: int) -> str:
    """The token counts with a CUDA graph. `step`: tokens that a sequence has in a decode batch, 1 + K with drafts.

    The recipe's own list is for its drafter: without one, every number of sequences has a graph.
    """
    given = serve.get("cudagraph_capture_sizes") if step > 1 or serve.get("k") is None else None
    sizes = given or [step * count for count in range(1, serve["max_num_seqs"] + 1)]
    return canonical.dumps({names["sizes"]: sizes}).decode()


def _word(value: bool) -> str:
    return "true" if value else "false"


def _weights(folder: str, files: FileFacts) -> list[Json]:
    return [
        {
            "path": f"{folder}/{path}",
            "size": files[path]["size"],
            "sha256": files[path]["sha256"].removeprefix("sha256:"),
        }
        for path in sorted(files)
        if path.endswith(".safetensors")
    ]
