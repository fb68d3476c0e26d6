"""`quantize`: the PTQ grid of the teacher's weights, by rounding to nearest or by GPTQ on a corpus."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import grid, qwen
from qdc.methods.calibration import gptq_model, padded_batches
from qdc.methods.census import census
from qdc.methods.documents import conversations, read_rows
from qdc.methods.tokenizer import load_tokenizer


def run(context: Context) -> None:
    """Writes grid.safetensors (codes and scales) and grid.json."""
    params = context.params
    config, weights = qwen.read_config(context.inputs["base"]), qwen.read_weights(context.inputs["base"])
    model = qwen.model_from(config, weights, device=context.device)
    modules, ignored = census(model, params["ignore"], qwen.left_out(context.inputs["base"]))
    facts: dict[str, Any] = {"method": params["method"], "scheme": params["scheme"]}
    if params["method"] == "rtn":
        pairs = {m: grid.rtn_quantize(weights[f"{m}.weight"], params["scheme"]) for m in modules}
    elif params["method"] == "gptq":
        batches = _batches(context)
        damp = float(params["calibration"]["damp"])
        pairs, facts["errors"] = gptq_model(model, modules, batches, params["scheme"], damp, context.report)
        facts["calibration"] = {
            "conversations": sum(len(ids) for ids, _ in batches),
            "tokens": sum(int(mask.sum()) for _, mask in batches),
        }
    else:
        raise QdcError("stage.quantize.method", f"no PTQ method {params['method']}", exit_code=COULD_NOT)
    tensors: dict[str, torch.Tensor] = {}
    for module, (codes, scale) in pairs.items():
        tensors[f"{module}.codes"], tensors[f"{module}.scale"] = codes, scale
    save_file(dict(sorted(tensors.items())), context.output / "grid.safetensors")
    write_json(context.output / "grid.json", {**facts, "modules": modules, "ignored": ignored})
    context.report(len(modules), len(modules), "modules")


def _batches(context: Context) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokenizer = load_tokenizer(context.inputs["base"])
    wanted = int(context.params["calibration"]["conversations"])
    rows = list(read_rows(context.inputs["corpus"] / "conversations.jsonl"))[:wanted]
    if len(rows) < wanted:
        raise QdcError(
            "stage.quantize.calibration",
            f"{wanted} conversations were asked for, the corpus has {len(rows)}",
            exit_code=COULD_NOT,
        )
    finished = [row["finish_reason"] == "stop" for row in rows]
    coded = conversations(tokenizer, [row["messages"] for row in rows], finished)
    return padded_batches([document.ids for document in coded], tokenizer.pad_id)
