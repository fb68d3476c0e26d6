"""The output folder of an image: its description, exact config and Dockerfile, from its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qdc.core import files
from qdc.image.config import image_name, oci_config
from qdc.image.dockerfile import dockerfile
from qdc.image.layers import Layer, VirtualImage, image_json


def write_image(
    folder: Path,
    recipe_name: str,
    summary: str,
    layers: Sequence[Layer],
    labels: Mapping[str, str],
    *,
    inherited: Sequence[str] = (),
    user: str = "",
) -> VirtualImage:
    """Write image.json, config.json and Dockerfile into `folder`, where the small tars of `layers` are.

    `inherited` variables and `user`: of the base.
    """
    config = oci_config(layers, labels, inherited, user)
    image_id = files.sha256_bytes(config)
    name = image_name(recipe_name, summary, image_id)
    image = VirtualImage(name, image_id, config, tuple(layers), folder)
    files.write_json(folder / "image.json", image_json(name, config, layers))
    (folder / "config.json").write_bytes(config)
    (folder / "Dockerfile").write_text(dockerfile(image), encoding="utf-8")
    return image
