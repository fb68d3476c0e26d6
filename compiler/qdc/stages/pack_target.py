"""`pack-target`: the served target as a compressed-tensors folder, its dense BF16 twin, and the proof of both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.formats.compressed_tensors import quantization_config
from qdc.methods import qwen
from qdc.methods.census import census
from qdc.methods.student import Student, initial_latents, read_grid
from qdc.methods.target import build_target, prove, prove_divergence

SIDECARS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def run(context: Context) -> None:
    """Writes ct/, dense/ and proof.json. Fails when any of the checks (a) to (h) does."""
    base, params = context.inputs["base"], context.params
    config, weights = qwen.read_config(base), qwen.read_weights(base)
    given = read_grid(context.inputs["grid"])
    model = qwen.model_from(config, weights)
    modules, ignored = census(model, params["ignore"], qwen.left_out(base))
    if set(modules) != set(given):
        odd = sorted(set(modules) ^ set(given))
        raise QdcError(
            "stage.pack-target.census", f"modules not in both recipe and grid: {odd[:3]}", exit_code=COULD_NOT
        )
    trained: dict[str, torch.Tensor] = {}
    if "selected" in context.inputs:
        trained = load_file(context.inputs["selected"] / "selected.safetensors")
        expected = set(initial_latents(weights, given, params["trainable"]))
        if set(trained) != expected:
            odd = sorted(set(trained) ^ expected)
            raise QdcError("stage.pack-target.trained", f"unexpected trained set: {odd[:3]}", exit_code=COULD_NOT)
    latents = trained or initial_latents(weights, given, "quantized-weights")
    built = build_target(weights, given, trained)
    served_as = {**config, "quantization_config": quantization_config(params["scheme"], ignored)}
    packed = _write(base, context.output / "ct", served_as, built.packed)
    dense = _write(base, context.output / "dense", config, built.dense)
    checks = prove((packed, dense), built, given, modules, set(trained), weights)
    student = Student(model, {name: t.float() for name, t in latents.items()}, given)
    checks["g"] = prove_divergence(packed, student, int(config["vocab_size"]))
    _conclude(context, checks, modules, ignored, sorted(trained))


def _write(
    base: Path, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write one model folder; returns its tensors as read back from disk."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    for name in SIDECARS:
        shutil.copyfile(base / name, folder / name)
    read: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return read


def _conclude(
    context: Context,
    checks: dict[str, dict[str, Any]],
    modules: list[str],
    ignored: list[str],
    trained: list[str],
) -> None:
    proof = {
        "checks": checks,
        "census": {
            "quantized": modules,
            "ignored": ignored,
            "counts": {"quantized": len(modules), "ignored": len(ignored)},
        },
        "codes_changed": checks["d"]["figure"],
        "trainable": {"set": context.params.get("trainable") if trained else None, "tensors": trained},
        "scheme": context.params["scheme"],
    }
    write_json(context.output / "proof.json", proof)
    failed = {name: check for name, check in checks.items() if not check["pass"]}
    if failed:
        text = "; ".join(f"({name}) {check['what']}: {check['figure']}" for name, check in sorted(failed.items()))
        raise QdcError("stage.pack-target.proof", text, exit_code=COULD_NOT)
