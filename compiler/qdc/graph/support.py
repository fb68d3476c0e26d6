"""What a recipe may say but no stage here can make yet: named before anything runs, never built as something else.

A recipe that says such things is valid: it can be checked, planned and compared, and images that hold them audited.
"""

from __future__ import annotations

from typing import Any

from qdc.tables import engines

Json = dict[str, Any]


def unsupported(recipe: Json) -> list[tuple[str, str]]:
    """(recipe path, what is missing) of every part of a resolved recipe that `build` cannot make."""
    return [*_target(recipe["target"]), *_data(recipe["data"]), *_drafter(recipe["drafter"]), *_serving(recipe)]


def _target(target: Json) -> list[tuple[str, str]]:
    found = []
    quantization, qad = target["quantization"], target["qad"]
    if quantization["grid"] is not None:
        found.append(("target.quantization.grid", "taking over a published grid"))
    if quantization["method"] == "awq":
        found.append(("target.quantization.method", "AWQ"))
    found += _scheme("target.quantization.scheme", quantization["scheme"])
    if target["eos"] is not None:
        found.append(("target.eos", "other end-of-answer ids than the base's"))
    if qad is not None:
        if qad["optimizer"]["kind"] != "adamw":
            found.append(("target.qad.optimizer.kind", f"the optimizer {qad['optimizer']['kind']}"))
        select = qad["checkpoints"]["select"]
        if select is None or select["metric"] != "heldout-kl":
            found.append(("target.qad.checkpoints.select", "choosing a checkpoint otherwise than by held-out KL"))
    return found


def _scheme(path: str, scheme: Json) -> list[tuple[str, str]]:
    if scheme["bits"] == 4 and scheme["symmetric"] and scheme["group_size"] in (32, 64, 128):
        return []
    return [(path, "a scheme other than symmetric INT4 in groups of 32, 64 or 128")]


def _data(data: dict[str, Json]) -> list[tuple[str, str]]:
    found = []
    for name, entry in data.items():
        if "hf_dataset" in entry:
            found.append((f"data.{name}.hf_dataset", "prompts of a dataset"))
        if entry.get("id") == "uuid":
            found.append((f"data.{name}.id", "row ids of a dataset"))
        for field in ("thinking", "chat_template", "unclosed_think"):
            if entry.get(field) is not None:
                found.append((f"data.{name}.{field}", "a rendering of its own for a corpus"))
        if "sampling" in entry and entry["sampling"]["seed"] is None:
            found.append((f"data.{name}.sampling.seed", "answers without a seed"))
    return found


def _drafter(drafter: Json | None) -> list[tuple[str, str]]:
    if drafter is None:
        return []
    found = []
    architecture = drafter["architecture"]
    if architecture["kind"] not in ("dflash", "ngram", "suffix"):
        found.append(("drafter.architecture.kind", f"a drafter of kind {architecture['kind']}"))
    for field in ("mask_token_id", "partial_rotary_factor", "target_hidden_size", "draft_vocab_size"):
        if architecture.get(field) is not None:
            found.append((f"drafter.architecture.{field}", f"`{field}` of a drafter"))
    for field in ("sample_from_anchor", "allow_k_mismatch"):
        if architecture.get(field):
            found.append((f"drafter.architecture.{field}", f"`{field}` of a drafter"))
    if drafter["checkpoint"] is not None:
        found.append(("drafter.checkpoint", "serving a published drafter"))
    for index, training in enumerate(drafter["training"] or []):
        if training["init"] is not None:
            found.append((f"drafter.training.{index}.init", "a start from a published drafter"))
    ptq, swa = drafter["ptq"], drafter["swa"]
    if ptq is not None:
        found += _scheme("drafter.ptq.scheme", ptq["scheme"])
        if ptq["method"] == "awq":
            found.append(("drafter.ptq.method", "AWQ"))
        if ptq["calibration"]["mix"] is not None:
            found.append(("drafter.ptq.calibration.mix", "a mix of kinds of conversation"))
    if swa is not None and (swa["semantics"], swa["apply"]) != ("symmetric-per-query", "always"):
        found.append(("drafter.swa", "a window other than symmetric-per-query, always"))
    return found


def _serving(recipe: Json) -> list[tuple[str, str]]:
    found = []
    engine, base, platform = recipe["serve"]["engine"], recipe["image"]["base"], recipe["serve"]["engine"]["platform"]
    if engines.cell(engine["vllm"], platform, "text-target") is None:
        first = engines.first(platform, "text-target")
        why = f"a packed target on an engine whose classes of Qwen3.5 are not known (vLLM {first} has one for it)"
        found.append(("serve.engine.vllm", why))
    if platform == "cuda" and ("debian" in base or "scratch" in base):
        what = "the packages of a CUDA engine: only a base that holds them (`ref`, `oci`, `archive`) can serve"
        found.append(("image.base", what))
    return found
