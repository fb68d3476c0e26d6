"""`draft-quantize`: a trained drafter to packed INT4 and its dequantized BF16 twin.

Reads `drafter`, `calibration` and `target` (whose taps and embedding the calibration runs on). Writes
config.json, model.safetensors (packed, what the engine loads), dense.safetensors (plain names), ptq.json.
"""

from __future__ import annotations

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.formats.compressed_tensors import quantization_config
from qdc.formats.dflash import engine_ignore, split_ignored
from qdc.methods import draft_files, draft_quantization, qwen
from qdc.methods.documents import read_rows
from qdc.methods.draft_data import Conversation
from qdc.methods.draft_taps import all_taps


def run(context: Context) -> None:
    """Methods rtn and gptq. Fails when nothing is quantized, or a proof of `draft_quantization` fails."""
    params = context.params
    config = draft_files.read_config(context.inputs["drafter"])
    drafter = draft_files.load_drafter(context.inputs["drafter"]).to(context.device)
    layers = config["num_hidden_layers"]
    modules, ignored = split_ignored(layers, config["num_target_layers"], params["ignore"])
    if not modules:
        raise QdcError("stage.draft-quantize.nothing", "every module of the drafter is ignored", exit_code=COULD_NOT)
    if sorted([*modules, *ignored]) != sorted(draft_quantization.linears(drafter)):
        raise QdcError(
            "stage.draft-quantize.modules",
            "the drafter's Linears are not those of a DFlash",
            exit_code=COULD_NOT,
        )
    model = qwen.load_model(context.inputs["target"] / params["model_folder"], device=context.device)
    rows = list(read_rows(context.inputs["calibration"] / "calibration.jsonl"))
    conversations = [Conversation(r["id"], tuple(r["input_ids"]), r["prompt_tokens"]) for r in rows]
    taps = all_taps(model, conversations, drafter.shape.taps)
    context.report(1, 3, "taps")
    blocks = draft_quantization.rows_of(conversations, [row["anchors"] for row in rows])
    found = draft_quantization.hessians(drafter, draft_files.frozen_parts(model), blocks, taps)
    context.report(2, 3, "Hessians")
    result = draft_quantization.quantize(drafter, found, modules, params["method"], params["scheme"], params["damp"])
    patterns = engine_ignore(layers, config["num_target_layers"], params["ignore"])
    config["quantization_config"] = quantization_config(params["scheme"], patterns)
    write_json(context.output / "config.json", config)
    draft_files.save(context.output / "model.safetensors", result.packed)
    draft_files.save(context.output / "dense.safetensors", result.dense)
    unchanged = [name for name in sorted(result.dense) if name.removesuffix(".weight") not in modules]
    write_json(
        context.output / "ptq.json",
        {
            "method": params["method"],
            "scheme": params["scheme"],
            "damp": params["damp"] if params["method"] == "gptq" else None,
            "modules": result.modules,
            "ignored": ignored,
            "kept_bf16": unchanged,
            "calibration": {
                "conversations": len(rows),
                "blocks": sum(len(row["anchors"]) for row in rows),
                "chooses_codes": params["method"] == "gptq",
            },
        },
    )
    context.report(3, 3, "quantized")
