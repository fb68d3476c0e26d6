"""The Dockerfile of an image, rendered from the same values as its OCI config."""

from __future__ import annotations

import json

from qdc.core.resources import resource
from qdc.image.layers import Layer, VirtualImage


def _text(layer: Layer) -> str:
    if layer.entries is None:
        return f"{layer.size:,} bytes"
    held = [entry for entry in layer.entries if entry.type == "file"]
    names = ", ".join("/" + entry.path for entry in held[:3]) + (", ..." if len(held) > 3 else "")
    return f"{layer.size:,} bytes: {names}"


def _quoted(value: str) -> str:
    """A value in a Dockerfile: JSON's quotes, and no variable is expanded."""
    return json.dumps(value, ensure_ascii=False).replace("$", "\\$")


def dockerfile(image: VirtualImage) -> str:
    """Its text. The build context that it needs is the image's OCI layout."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(resource("templates/Dockerfile.j2").read_text(encoding="utf-8"))
    config = json.loads(image.config)["config"]
    return template.render(
        name=image.name,
        id=f"sha256:{image.id}",
        layers=[{"role": layer.role, "blob": layer.stored[0], "text": _text(layer)} for layer in image.layers],
        env=config["Env"],
        labels=[(key, _quoted(value)) for key, value in sorted(config["Labels"].items())],
        ports=sorted(config["ExposedPorts"]),
        user=config.get("User", ""),
        stop_signal=config["StopSignal"],
        workdir=config["WorkingDir"],
        entrypoint=json.dumps(config["Entrypoint"]),
        cmd=json.dumps(config["Cmd"]),
    )
