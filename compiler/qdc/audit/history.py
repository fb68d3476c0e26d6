"""Facts of the image configuration beside what it starts: platform, history, flattening, sizes.

`docker export | docker import` leaves one layer, one line of history, and none of ENTRYPOINT, ENV and labels; files
that only a start script or a manifest would use show that they were there.
"""

from __future__ import annotations

import re
from typing import Any

from qdc.audit.claims import MANIFEST
from qdc.audit.evidence import Fact, Findings, Look
from qdc.core.redact import HIDDEN, without_credentials

_IMPORTED = ("imported from",)
_STARTERS = ("entrypoint.sh", "docker-entrypoint.sh", "nvidia_entrypoint.sh", "serve", "start.sh")
_LARGEST = 5
_SECRET = re.compile(r"(\b\w*(?:KEY|SECRET|TOKEN|PASSW|CREDENTIAL)\w*\s*[=:]\s*)[^\s\"']+", re.IGNORECASE)


def history_facts(look: Look, findings: Findings) -> None:
    """Facts `image.platform`, `image.history`, `image.flattened`, `image.size`."""
    if not look.image.layers:
        return
    config = look.image.config
    platform = "/".join(str(config.get(name)) for name in ("os", "architecture") if config.get(name))
    if platform:
        findings.facts["image.platform"] = Fact(platform, [look.configuration(f"for {platform}")])
    listed = config.get("history")
    history = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    made = [row for row in history if row.get("empty_layer") is not True]
    value = {"steps": len(history), "layers": len(look.image.layers)}
    text = f"{len(history)} steps of history, {len(made)} of them made layers; there are {len(look.image.layers)}"
    odd = [f"{text}: the history is not this image's"] if history and len(made) != len(look.image.layers) else []
    rows = [look.configuration(text)]
    rows += [look.configuration(_step(row)) for row in history[-5:]]
    findings.facts["image.history"] = Fact(value, rows, odd)
    _flattened(look, history, findings)
    _size(look, findings)


def _step(row: dict[str, Any]) -> str:
    """One step of history, without what it may give away."""
    text = str(row.get("created_by") or row.get("comment") or "(nothing)")
    return _SECRET.sub(rf"\1{HIDDEN}", without_credentials(text))[:200]


def _flattened(look: Look, history: list[dict[str, Any]], findings: Findings) -> None:
    """`image.flattened`: whether the layers were merged by an export and an import, and what that lost."""
    told = [str(row.get("comment") or "") for row in history] + [str(look.image.config.get("comment") or "")]
    imported = next((text for text in told if text.lower().startswith(_IMPORTED)), None)
    flat = len(look.image.layers) == 1 and len(history) <= 1 and imported is not None
    if not flat:
        text = f"{len(look.image.layers)} layers, {len(history)} steps of history, none of them an import"
        findings.facts["image.flattened"] = Fact(False, [look.configuration(text)])
        return
    rows = [look.configuration(f"one layer, and its history says: {imported}")]
    settings = look.image.settings
    lost = [name for name in ("Entrypoint", "Env", "Labels") if not settings.get(name)]
    if lost:
        rows.append(look.configuration(f"it sets no {', no '.join(lost)}"))
    for path, entry in look.image.files().items():
        if path == MANIFEST or (path.rpartition("/")[2] in _STARTERS and entry.mode & 0o111 and "/lib/" not in path):
            rows.append(look.at(path, "it was made to be started, or labelled, by a configuration that is gone"))
        if len(rows) > _LARGEST + 2:
            break
    findings.facts["image.flattened"] = Fact(True, rows)


def _size(look: Look, findings: Findings) -> None:
    """`image.size`: bytes as stored, layer by layer (a compressed layer counts compressed)."""
    sizes = [(layer.blob.size, layer.number) for layer in look.image.layers]
    value = {"stored": sum(size for size, _ in sizes), "layers": [size for size, _ in sizes]}
    rows = [
        look.configuration(f"layer {number}: {size} bytes stored")
        for size, number in sorted(sizes, reverse=True)[:_LARGEST]
    ]
    findings.facts["image.size"] = Fact(value, rows)
