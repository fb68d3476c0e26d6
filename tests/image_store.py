"""A small image as the `image` stage leaves it, alone or in a store with the build record that names it."""

from __future__ import annotations

import json
from pathlib import Path

from small_store import publish

from qdc.core.files import sha256_file
from qdc.image.assemble import write_image
from qdc.image.layers import digested, read_image, small_layer
from qdc.store.store import Store

Contents = dict[str, Path]


def make_image(folder: Path, k: int = 7) -> tuple[Path, Contents]:
    """A small image as the `image` stage leaves it, and where its contents are."""
    source, image = folder / "source", folder / "image"
    source.mkdir(parents=True)
    image.mkdir()
    (source / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    base = small_layer({"etc/os-release": b"ID=test\n"}, "base", source, "layer.tar")
    weights = digested({"opt/models/target/model.safetensors": source / "model.safetensors"}, "target weights")
    last = small_layer({"opt/qdc/serve.json": json.dumps({"k": k}).encode()}, "config", image, "layers/02.tar")
    write_image(image, "demo", f"w4g32-k{k}", [base, weights, last], {"io.qdc.k": str(k)})
    held = [source / "model.safetensors", source / "layer.tar"]
    return image, {sha256_file(path): path for path in held}


def stored_image(folder: Path, limit: dict[str, object] | None = None) -> tuple[Store, str]:
    """A store with one image and the build record that names it."""
    image, contents = make_image(folder / "made")
    store = Store(folder / "store")
    files = {path.relative_to(image).as_posix(): path.read_bytes() for path in image.rglob("*") if path.is_file()}
    artifact = publish(store, files)
    publish(store, {str(index): path.read_bytes() for index, path in enumerate(contents.values())})
    deploy = {"hardware": "cpu", "contract": "adaptfm", "size_limit": limit}
    engine = {"vllm": "0.32.0", "platform": "cpu"}
    described = read_image(image)
    document = {
        "build": "b1",
        "recipe": {"name": "demo", "deploy": deploy, "serve": {"engine": engine, "k": 7}, "image": {"base": {}}},
        "recipe_name": "demo",
        "stages": [],
        "measurements": [],
        "image": {"name": described.name, "id": f"sha256:{described.id}", "artifact": artifact},
    }
    store.add_build(document)
    return store, "b1"
