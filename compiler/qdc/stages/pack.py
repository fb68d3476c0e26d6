"""`pack`: conversations as chunks of one length for QAD, split by row into training and held-out text."""

from __future__ import annotations

import random
from typing import Any

from safetensors.numpy import save_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import documents
from qdc.methods.tokenizer import Tokenizer, load_tokenizer


def run(context: Context) -> None:
    """Writes train.safetensors, heldout.safetensors and pack.json. Both splits must hold at least one chunk."""
    tokenizer = load_tokenizer(context.inputs["tokenizer"])
    rows = list(documents.read_rows(context.inputs["corpus"] / "conversations.jsonl"))
    order = list(range(len(rows)))
    random.Random(int(context.params["seed"])).shuffle(order)
    aside = round(len(rows) * float(context.params["heldout_ratio"]))
    length = int(context.params["sequence_length"])
    facts: dict[str, Any] = {
        "sequence_length": length,
        "separator_id": tokenizer.pad_id,
        "padding_id": tokenizer.pad_id,
        "eos_id": tokenizer.eos_id,
        "rows": len(rows),
    }
    for name, chosen in (("heldout", order[:aside]), ("train", order[aside:])):
        facts[name] = _split(context, tokenizer, [rows[i] for i in chosen], name, length)
    write_json(context.output / "pack.json", facts)


def _split(
    context: Context, tokenizer: Tokenizer, rows: list[dict[str, Any]], name: str, length: int
) -> dict[str, int]:
    chats = [row["messages"] for row in rows]
    finished = [row["finish_reason"] == "stop" for row in rows]
    coded = documents.conversations(tokenizer, chats, finished)
    packed = documents.pack(coded, length, tokenizer.pad_id, tokenizer.pad_id)
    if not len(packed.length):
        raise QdcError("stage.pack.empty", f"the {name} split has no conversation", exit_code=COULD_NOT)
    tensors = {
        "assistant_mask": packed.assistant_mask,
        "input_ids": packed.input_ids,
        "length": packed.length,
    }
    save_file(tensors, str(context.output / f"{name}.safetensors"))
    return {
        "rows": len(rows),
        "chunks": len(packed.length),
        "tokens": int(packed.length.sum()),
        "assistant_tokens": int(packed.assistant_mask.sum()),
    }
