"""The content manifest: what an image holds, and nothing about who made it, when, or where.

A pure function of stage outputs and product fields, so that equal contents give an equal image on any day,
folder and machine. It knows no store, no stage keys and no image ID (the image contains this document).
Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError

SCHEMA = 1
_HEX = re.compile(r"[0-9a-f]{64}")
LOCAL_SOURCES = ("path", "oci", "archive")
_BUILDER_FACTS = frozenset(
    [
        "started",
        "finished",
        "seconds",
        "wall_s",
        "elapsed",
        "user",
        "username",
        "hostname",
        "cwd",
        "threads",
        "key",
        "keys",
        "image_id",
        "measurements",
        "prompts_text",
    ]
)
_TARGET_FACTS = ("census", "scheme", "proof", "trainable")


def content_manifest(
    *,
    name: str,
    product: Mapping[str, Any],
    lock: Mapping[str, Any],
    artifact_digests: Mapping[str, str],
    target_facts: Mapping[str, Any],
    drafter_facts: Mapping[str, Any] | None,
    serve: Mapping[str, Any],
    template_digest: str,
    tokenizer_digest: str,
    packages_digest: str,
    accepted: Sequence[Mapping[str, Any]] = (),
    licences: Sequence[Any] = (),
    files: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content manifest as a JSON value; write it with `canonical.pretty`.

    `product`: the resolved product fields of the recipe (`target`, `drafter`, `serve`, `deploy`, `image`).
    `artifact_digests`: role -> tree digest of the stage output that the image was made from.
    `target_facts`: `census`, `scheme`, `proof`, `trainable` (and more) as the packing stage proved them.
    `drafter_facts`: `architecture`, `taps`, `training`, `ptq`, `calibration` as they really were, or None.
    `serve`: the whole serve.json; its `manifest_digest`, if any, is left out (it would name this document).
    `files`: path in the image -> SHA-256 of every small file beside the weights that the image stage wrote
    (launcher, middleware, patches, model configurations, template, tokenizer; not serve.json, not this one).
    Digests are 64 hex digits, with or without `sha256:`. Raises QdcError `manifest.*` on a malformed digest,
    on a value that is not JSON, and on a field that tells of the builder.
    """
    missing = [fact for fact in _TARGET_FACTS if fact not in target_facts]
    if missing:
        raise QdcError("manifest.target-facts", f"the target's facts lack {', '.join(missing)}", exit_code=4)
    template = _digest(template_digest, "template")
    recipe = product_fields(product, template)
    serving = {field: value for field, value in serve.items() if field != "manifest_digest"}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "name": name,
        "recipe": recipe,
        "recipe_digest": canonical.digest(recipe),
        "lock": dict(lock),
        "artifacts": {role: _digest(value, f"artifact {role}") for role, value in artifact_digests.items()},
        "target": dict(target_facts),
        "drafter": None if drafter_facts is None else dict(drafter_facts),
        "serving": {
            **serving,
            "template": template,
            "tokenizer": _digest(tokenizer_digest, "tokenizer"),
            "packages": _digest(packages_digest, "packages"),
        },
        "files": {path.lstrip("/"): _digest(value, f"file {path}") for path, value in (files or {}).items()},
        "accepted": [dict(rule) for rule in accepted],
        "licences": list(licences),
    }
    _refuse_builder_facts(document)
    return _json(document)


def product_fields(product: Mapping[str, Any], template_digest: str | None = None) -> dict[str, Any]:
    """The product fields without what only the builder's disk knows.

    A local source (`path`, `oci`, `archive`: text) becomes `true`, because its bytes are named by an artifact
    digest; `serve.chat_template` becomes `sha256:<digest>` when the digest is given.
    """
    fields = _without_local_paths(product)
    serve = fields.get("serve")
    if template_digest is not None and isinstance(serve, dict) and "chat_template" in serve:
        serve["chat_template"] = f"sha256:{template_digest}"
    result: dict[str, Any] = fields
    return result


def manifest_digest(document: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex) of the bytes of manifest.json, as written in the image (`canonical.pretty`)."""
    return hashlib.sha256(canonical.pretty(dict(document))).hexdigest()


def _without_local_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: True if key in LOCAL_SOURCES and isinstance(inner, str) else _without_local_paths(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_local_paths(inner) for inner in value]
    return value


def _digest(text: str, what: str) -> str:
    plain = text.removeprefix("sha256:") if isinstance(text, str) else ""
    if not _HEX.fullmatch(plain):
        raise QdcError("manifest.digest", f"{what}: {text!r} is not a SHA-256 digest", exit_code=4)
    return plain


def _refuse_builder_facts(document: Mapping[str, Any]) -> None:
    for section in ("target", "drafter", "serving"):
        stack: list[tuple[str, Any]] = [(section, document[section])]
        while stack:
            where, value = stack.pop()
            if isinstance(value, Mapping):
                found = sorted(_BUILDER_FACTS.intersection(value))
                if found and not where.endswith((".environment", ".census")):
                    raise QdcError(
                        "manifest.builder-fact",
                        f"{where}.{found[0]} tells of the builder; it belongs in the build record",
                        exit_code=4,
                    )
                stack.extend((f"{where}.{key}", inner) for key, inner in value.items())
            elif isinstance(value, list | tuple):
                stack.extend((f"{where}[{index}]", inner) for index, inner in enumerate(value))


def _json(document: dict[str, Any]) -> dict[str, Any]:
    """The same value as read back from its canonical bytes: no tuples, no aliases, nothing but JSON."""
    try:
        result: dict[str, Any] = json.loads(canonical.dumps(document))
    except (TypeError, ValueError) as error:
        raise QdcError("manifest.not-json", f"not a JSON value: {error}", exit_code=4) from error
    return result
