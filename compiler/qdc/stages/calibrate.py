"""`calibrate`: choose conversations, and the anchors in each, that the drafter's quantization looks at.

Reads `corpus` and `tokenizer` (a model folder). Writes calibration.jsonl and summary.json.
"""

from __future__ import annotations

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods.documents import read_rows
from qdc.methods.draft_data import calibration_anchors, choose, encode_rows
from qdc.methods.tokenizer import load_tokenizer


def run(context: Context) -> None:
    """Rows {id, input_ids, prompt_tokens, anchors}. Fails when no conversation has room for a block."""
    params = context.params
    rows = list(read_rows(context.inputs["corpus"] / "conversations.jsonl"))
    chosen = [rows[i] for i in choose(len(rows), params["conversations"], params["seed"])]
    kept, blocks = [], 0
    for found in encode_rows(chosen, load_tokenizer(context.inputs["tokenizer"])):
        anchors = calibration_anchors(
            len(found.input_ids), found.prompt_tokens, params["draft_block_size"], params["anchors"]
        )
        if anchors:
            blocks += len(anchors)
            kept.append(
                {
                    "id": found.id,
                    "input_ids": list(found.input_ids),
                    "prompt_tokens": found.prompt_tokens,
                    "anchors": anchors,
                }
            )
    if not kept:
        raise QdcError(
            "stage.calibrate.empty",
            f"none of {len(chosen)} conversations has an answer longer than a draft block",
            hint="calibrate on longer answers, or draft in shorter blocks",
            exit_code=COULD_NOT,
        )
    lines = b"".join(canonical.dumps(row) + b"\n" for row in kept)
    (context.output / "calibration.jsonl").write_bytes(lines)
    write_json(
        context.output / "summary.json",
        {
            "corpus_rows": len(rows),
            "chosen": len(chosen),
            "kept": len(kept),
            "dropped": {"answer_too_short": len(chosen) - len(kept)},
            "blocks": blocks,
        },
    )
    context.report(len(chosen), len(chosen), "conversations")
