"""`corpus`: a model's own answers to prompts, in FP32 compute from its BF16 weights, with row accounting."""

from __future__ import annotations

from typing import Any

import torch

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import documents, qwen
from qdc.methods.generate import Completion, Sampling, generate
from qdc.methods.tokenizer import Tokenizer, load_tokenizer


def run(context: Context) -> None:
    """Writes conversations.jsonl and summary.json. Fails when no row is left."""
    folder = context.inputs["model"] / context.params["model_folder"]
    settings = context.params["sampling"]
    sampling = Sampling(
        temperature=float(settings["temperature"]),
        top_p=float(settings["top_p"]),
        top_k=int(settings["top_k"]),
        max_tokens=int(settings["max_tokens"]),
        seed=int(settings["seed"]),
    )
    tokenizer = load_tokenizer(folder)
    model = qwen.load_model(folder, torch.float32, context.device)
    rows = list(documents.read_rows(context.inputs["prompts"] / "prompts.jsonl"))
    heads = [tokenizer.render_chat(row["messages"], add_generation_prompt=True) for row in rows]
    prompts = tokenizer.encode_many(heads)
    answers = generate(model, prompts, sampling, tokenizer.eos_id, tokenizer.pad_id, context.report)
    _write(context, tokenizer, rows, prompts, answers)


def _write(
    context: Context,
    tokenizer: Tokenizer,
    rows: list[dict[str, Any]],
    prompts: list[list[int]],
    answers: list[Completion],
) -> None:
    dropped: dict[str, int] = {"empty": 0, "truncated": 0}
    kept = truncated = changed = tokens = 0
    with (context.output / "conversations.jsonl").open("wb") as lines:
        for row, prompt, answer in zip(rows, prompts, answers, strict=True):
            text = tokenizer.decode(answer.ids)
            cut = answer.finish_reason == "length"
            truncated += cut
            if not text:
                dropped["empty"] += 1
                continue
            if cut and context.params["truncated"] == "drop":
                dropped["truncated"] += 1
                continue
            kept += 1
            changed += tokenizer.encode(text) != answer.ids
            tokens += len(answer.ids) + (not cut)
            conversation = {
                "id": row["id"],
                "messages": [*row["messages"], {"role": "assistant", "content": text}],
                "finish_reason": answer.finish_reason,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(answer.ids) + (not cut),
            }
            lines.write(canonical.dumps(conversation) + b"\n")
    counts: dict[str, Any] = {
        "rows": len(rows),
        "kept": kept,
        "dropped": dropped,
        "truncated": truncated,
        "retokenized": changed,
        "completion_tokens": tokens,
    }
    if not kept:
        raise QdcError("stage.corpus.empty", f"no conversation was kept: {counts}", exit_code=COULD_NOT)
    write_json(context.output / "summary.json", counts)
