"""`image`: all layers of the product in order, and two documents in the last one: serve.json, manifest.json.

Weights, base and runtime are named by digest only; what this stage writes is small. Nothing here knows the
day, the machine or the user: equal inputs and parameters give the same image ID.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import qdc.serving
from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import sha256_bytes, sha256_file
from qdc.core.stage import Context
from qdc.formats import compressed_tensors
from qdc.formats.ranges import FileRange
from qdc.image import config as image_config
from qdc.image.assemble import write_image
from qdc.image.base import read_base
from qdc.image.layers import Layer, digested, read_layer, small_layer
from qdc.image.model_files import TEMPLATE, TOKENIZER, ModelFiles, drafter_files, target_files
from qdc.manifest.content import content_manifest, manifest_digest
from qdc.serving.patches import patch_digest, patch_files
from qdc.serving.render import patches_of, serve_config

TARGET = "opt/models/target"
DRAFTER = "opt/models/drafter"
SERVING = "opt/qdc/serving"
PATCHES = "opt/qdc/patches"
SERVE = "opt/qdc/serve.json"
MANIFEST = "opt/qdc/manifest.json"
PACKAGES = "opt/qdc/packages.json"
_NOT_IN_IMAGE = ("__init__.py", "render.py")


def run(context: Context) -> None:
    """Roles and params as in the stage table -> image.json, config.json, documents, Dockerfile, layers/."""
    params = context.params
    product = {"name": params["name"], **params["recipe"]}
    models = {TARGET: target_files(context.inputs["target"] / "ct", params["chat_template"])}
    weights = [_weights(context, "layer_target", TARGET)]
    if product.get("drafter"):
        models[DRAFTER] = drafter_files(context.inputs["drafter"], product["drafter"])
        weights.append(_weights(context, "layer_drafter", DRAFTER))
    code = _serving_files(context, product)
    kept = {f"{prefix}/{name}": path for prefix, model in models.items() for name, path in model.kept.items()}
    rendered = {f"{prefix}/{name}": data for prefix, model in models.items() for name, data in model.rendered.items()}
    serve = _serve(product, weights)
    digests = {path: sha256_bytes(data) for path, data in {**code, **rendered}.items()}
    digests |= {path: sha256_file(file) for path, file in kept.items()}
    manifest = _manifest(context, product, serve, models[TARGET], digests)
    documents = {SERVE: canonical.pretty(serve), MANIFEST: canonical.pretty(manifest)}
    base = read_base(context.inputs["base_image"])
    layers = [
        *base.layers,
        read_layer(context.inputs["runtime"], "runtime packages"),
        small_layer(code, "serving code", context.output, "layers/03-serving.tar"),
        *weights,
        digested(kept, "model files"),
        small_layer({**rendered, **documents}, "configuration", context.output, "layers/07-configuration.tar"),
    ]
    (context.output / "serve.json").write_bytes(documents[SERVE])
    (context.output / "manifest.json").write_bytes(documents[MANIFEST])
    labels = image_config.labels(
        product, manifest_digest=manifest_digest(manifest), recipe_digest=manifest["recipe_digest"]
    )
    made = write_image(
        context.output,
        params["name"],
        image_config.summary(product),
        layers,
        labels,
        inherited=base.environment,
        user=base.user,
    )
    context.report(1, 1, made.name)


def _weights(context: Context, role: str, prefix: str) -> Layer:
    """The weight layer of `role`. QdcError unless it holds safetensors below `prefix` only, and at least one."""
    layer = read_layer(context.inputs[role], prefix.rpartition("/")[2] + " weights")
    held = [entry for entry in layer.entries or () if entry.type == "file"]
    odd = [e.path for e in held if not (e.path.startswith(f"{prefix}/") and e.path.endswith(".safetensors"))]
    if odd or not held:
        raise QdcError(
            "stage.image.weights",
            f"the {layer.role} layer holds {odd[0] if odd else 'nothing'}",
            exit_code=COULD_NOT,
        )
    return layer


def _facts(layers: list[Layer], prefix: str) -> dict[str, dict[str, Any]]:
    """Path in the model folder -> size and digest of its weights."""
    return {
        entry.path.removeprefix(f"{prefix}/"): {"size": entry.size, "sha256": entry.sha256}
        for layer in layers
        for entry in layer.entries or ()
        if entry.type == "file" and entry.path.startswith(f"{prefix}/")
    }


def _serving_files(context: Context, product: Mapping[str, Any]) -> dict[str, bytes]:
    """Path in the image -> content of the launcher, its companions, the patches and the list of packages."""
    folder = Path(qdc.serving.__file__).parent
    files = {
        f"{SERVING}/{path.name}": path.read_bytes()
        for path in sorted(folder.glob("*.py"))
        if path.name not in _NOT_IN_IMAGE
    }
    if f"{SERVING}/launcher.py" not in files:
        raise QdcError("stage.image.serving", "the launcher is missing", file=folder, exit_code=COULD_NOT)
    for name in patches_of(product["serve"]["engine"]):
        files |= {f"{PATCHES}/{name}/{path}": data for path, data in patch_files(name).items()}
    packages = {
        role: json.loads((context.inputs[role] / "packages.json").read_bytes()) for role in ("base_image", "runtime")
    }
    _check_engine(packages, product)
    return {**files, PACKAGES: canonical.pretty(packages)}


def _check_engine(packages: Mapping[str, Any], product: Mapping[str, Any]) -> None:
    """A base that is given brings the engine: QdcError where it holds another one, or none."""
    base, wanted = product["image"]["base"], product["serve"]["engine"]["vllm"]
    if packages["runtime"] or "scratch" in base:
        return
    there = sorted({package["version"] for package in packages["base_image"] if package["name"] == "vllm"})
    if wanted not in {version.partition("+")[0] for version in there}:
        raise QdcError(
            "stage.image.engine",
            f"the recipe says vLLM {wanted}, and the base holds {'vLLM ' + ', '.join(there) if there else 'none'}",
            hint="let image.base name an image with this engine, or serve.engine.vllm the version that it has",
            exit_code=COULD_NOT,
        )


def _serve(product: Mapping[str, Any], weights: list[Layer]) -> dict[str, Any]:
    return serve_config(
        product,
        target_files=_facts(weights, TARGET),
        drafter_files=_facts(weights, DRAFTER) or None,
        patches={name: patch_digest(name) for name in patches_of(product["serve"]["engine"])},
    )


def _manifest(
    context: Context,
    product: Mapping[str, Any],
    serve: Mapping[str, Any],
    target: ModelFiles,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    params = context.params
    return content_manifest(
        name=params["name"],
        product=params["recipe"],
        lock=params["lock"],
        artifact_digests=context.digests,
        target_facts=_target_facts(context.inputs["target"], product["target"]),
        drafter_facts=_drafter_facts(context, product["drafter"]) if product.get("drafter") else None,
        serve=serve,
        template_digest=sha256_bytes(target.rendered[TEMPLATE]),
        tokenizer_digest=digests[f"{TARGET}/{TOKENIZER}"],
        packages_digest=digests[PACKAGES],
        accepted=params["accepted"],
        licences=params["licences"],
        files=digests,
    )


def _target_facts(folder: Path, target: Mapping[str, Any]) -> dict[str, Any]:
    """What the target's bytes and its proof say. QdcError where the bytes contradict each other."""
    weights = {path.name: FileRange(path) for path in sorted((folder / "ct").glob("*.safetensors"))}
    facts = compressed_tensors.read_facts(weights)
    if facts.problems:
        raise QdcError("stage.image.target", f"the packed target is damaged: {facts.problems[0]}", exit_code=COULD_NOT)
    scheme, qad = target["quantization"]["scheme"], target.get("qad")
    for what, wanted in scheme.items():
        if facts.one(what) != wanted:
            raise QdcError(
                "stage.image.target",
                f"the packed target has {what} {facts.one(what)}, the recipe says {wanted}",
                exit_code=COULD_NOT,
            )
    return {
        "census": {"quantized": sorted(facts.quantized), "plain": sorted(facts.plain)},
        "scheme": scheme,
        "proof": json.loads((folder / "proof.json").read_bytes()),
        "trainable": qad["trainable"] if qad else None,
    }


def _drafter_facts(context: Context, drafter: Mapping[str, Any]) -> dict[str, Any]:
    """What was trained and how it was quantized and calibrated, as the stages recorded it."""
    folder = context.inputs["drafter"]
    facts: dict[str, Any] = {
        "architecture": drafter["architecture"],
        "taps": drafter["architecture"]["taps"],
        "training": drafter["training"],
    }
    if (folder / "ptq.json").is_file():
        made = json.loads((folder / "ptq.json").read_bytes())
        facts["calibration"] = made.get("calibration")
        facts["ptq"] = {name: made.get(name) for name in ("method", "scheme", "damp", "ignored", "kept_bf16")}
    return facts
