"""The OCI config of an image and its name: pure functions of what is in the image.

The image ID is the SHA-256 of the config's bytes, so that nothing may enter here that does not change the
product: no clock, host, user or path. This module does not know layers' contents.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qdc.image.layers import Layer, config_bytes
from qdc.image.tar import EPOCH
from qdc.serving.launcher import REACHES_ENGINE

ENTRYPOINT = ["/usr/bin/python3", "/opt/qdc/serving/launcher.py"]
CMD = ["serve"]
PORT = 8080
ENVIRONMENT = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"]
CREATED = datetime.datetime.fromtimestamp(EPOCH, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
NAME_LIMIT = 128
_ID_DIGITS = 12


def environment(inherited: Sequence[str]) -> list[str]:
    """Variables of the image: the base's, without those that would reach the engine, and ours where it has none.

    The launcher would keep them from the engine anyway: an image has one source of its configuration.
    """
    kept = {name: line for line in inherited if not REACHES_ENGINE.fullmatch(name := line.partition("=")[0])}
    return [*kept.values(), *(line for line in ENVIRONMENT if line.partition("=")[0] not in kept)]


def runtime_config(labels: Mapping[str, str], inherited: Sequence[str] = (), user: str = "") -> dict[str, Any]:
    """The `config` object of the OCI config: how the container starts. `inherited` variables and `user`: the base's."""
    return {
        **({"User": user} if user else {}),
        "Cmd": CMD,
        "Entrypoint": ENTRYPOINT,
        "Env": environment(inherited),
        "ExposedPorts": {f"{PORT}/tcp": {}},
        "Labels": dict(sorted(labels.items())),
        "StopSignal": "SIGTERM",
        "WorkingDir": "/",
    }


def oci_config(
    layers: Sequence[Layer], labels: Mapping[str, str], inherited: Sequence[str] = (), user: str = ""
) -> bytes:
    """The exact config bytes of a linux/amd64 image of `layers`."""
    return config_bytes(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": CREATED,
            "config": runtime_config(labels, inherited, user),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.diff_id}" for layer in layers]},
            "history": [{"created": CREATED, "created_by": f"qdc: {layer.role}"} for layer in layers],
        }
    )


def _clean(text: str) -> str:
    """Lower case, only what a Docker tag may hold inside, no separator at either end."""
    return re.sub(r"-{2,}", "-", re.sub(r"[^a-z0-9]+", "-", text.lower())).strip("-")


def summary(recipe: Mapping[str, Any], steps: int | None = None) -> str:
    """The middle of a name: parts in fixed order, absent ones omitted.

    `recipe`: resolved product fields {target, drafter, serve, deploy}. `steps`: the training step whose
    weights are served, where it is known; else the recipe's own number of steps.
    """
    target: Mapping[str, Any] = recipe.get("target") or {}
    drafter: Mapping[str, Any] = recipe.get("drafter") or {}
    serve: Mapping[str, Any] = recipe.get("serve") or {}
    parts = [_scheme_part(target), _qad_part(target, steps), *_drafter_parts(drafter, serve)]
    hardware = (recipe.get("deploy") or {}).get("hardware")
    parts.append(_clean(str(hardware)) if hardware else "")
    return "-".join(part for part in parts if part)


def _scheme_part(target: Mapping[str, Any]) -> str:
    scheme = (target.get("quantization") or {}).get("scheme")
    return f"w{scheme['bits']}g{scheme['group_size']}" if scheme else "bf16"


def _qad_part(target: Mapping[str, Any], steps: int | None) -> str:
    qad = target.get("qad")
    if not qad:
        return ""
    return f"qad{steps if steps is not None else (qad.get('schedule') or {}).get('steps', '')}"


def _drafter_parts(drafter: Mapping[str, Any], serve: Mapping[str, Any]) -> list[str]:
    if not drafter:
        return []
    architecture = drafter.get("architecture") or {}
    kind = _clean(str(architecture.get("kind") or drafter.get("kind") or "drafter"))
    if kind == "none":
        return []
    parts = [f"{kind}{architecture.get('draft_block_size', '')}"]
    if serve.get("k") is not None:
        parts[0] += f"k{serve['k']}"
    if ptq := drafter.get("ptq"):
        parts.append(f"{_clean(str(ptq['method']))}{(ptq.get('scheme') or {}).get('group_size', '')}")
    if window := (drafter.get("swa") or {}).get("window"):
        parts.append(f"swa{window}")
    return parts


def image_name(recipe_name: str, summary_text: str, image_id: str) -> str:
    """`<recipe>:<summary>-<12 hex of image_id>`: a valid Docker reference of at most 128 characters.

    A summary that is too long is cut at its end; the digits of the ID always stay.
    """
    repository = _clean(recipe_name)[:60].strip("-") or "image"
    room = NAME_LIMIT - len(repository) - 1 - 1 - _ID_DIGITS
    middle = _clean(summary_text)[:room].strip("-")
    return f"{repository}:" + "-".join(part for part in (middle, image_id[:_ID_DIGITS]) if part)


def labels(recipe: Mapping[str, Any], *, manifest_digest: str, recipe_digest: str) -> dict[str, str]:
    """Image labels. Digests are 64 hex digits, written with their `sha256:`; absent parts have no label."""
    target: Mapping[str, Any] = recipe.get("target") or {}
    drafter: Mapping[str, Any] = recipe.get("drafter") or {}
    serve: Mapping[str, Any] = recipe.get("serve") or {}
    engine: Mapping[str, Any] = serve.get("engine") or {}
    base, _, base_digest = str(((recipe.get("image") or {}).get("base") or {}).get("ref") or "").partition("@")
    name = str(recipe.get("name") or "")
    found = {
        "org.opencontainers.image.title": name,
        "org.opencontainers.image.description": summary(recipe),
        "org.opencontainers.image.base.name": base,
        "org.opencontainers.image.base.digest": base_digest,
        "io.qdc.schema": "1",
        "io.qdc.recipe": name,
        "io.qdc.recipe.digest": f"sha256:{recipe_digest}",
        "io.qdc.manifest.digest": f"sha256:{manifest_digest}",
        "io.qdc.engine": f"vllm {engine['version']}" if engine.get("version") else _engine(engine),
        "io.qdc.k": _text(serve.get("k")),
        "io.qdc.window": _text((drafter.get("swa") or {}).get("window")),
        "io.qdc.target.scheme": _scheme_text((target.get("quantization") or {}).get("scheme")),
        "io.qdc.drafter.scheme": _scheme_text((drafter.get("ptq") or {}).get("scheme")),
    }
    return {key: value for key, value in sorted(found.items()) if value}


def _engine(engine: Mapping[str, Any]) -> str:
    return f"vllm {engine['vllm']}" if engine.get("vllm") else ""


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _scheme_text(scheme: Mapping[str, Any] | None) -> str:
    if not scheme:
        return ""
    kind = "symmetric" if scheme.get("symmetric") else "asymmetric"
    return f"w{scheme['bits']} group {scheme['group_size']} {kind}"
