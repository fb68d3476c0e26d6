"""`evaluate:drafter`: acceptance length of every drafter of the chain on held-out prompts, by replay.

Reads `target`, `heldout` (prompts) and `drafter_0`, `drafter_1`, ... in the order of the chain. Writes
evaluation.json and prompts.jsonl (the prompts replayed, with each drafter's counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import draft_files, qwen, replay
from qdc.methods.documents import read_rows
from qdc.methods.draft_data import Conversation
from qdc.methods.draft_taps import all_taps
from qdc.methods.generate import Sampling, generate
from qdc.methods.replay import Counts
from qdc.methods.tokenizer import Tokenizer, load_tokenizer

METHOD = "replay of greedy speculation on the target's own continuation, FP32; 95 % bootstrap over prompts"


def run(context: Context) -> None:
    """Drafters at full attention, and the last one at `window` too if there is one.

    Fails when K is over the draft block less one, when there is nothing to draft, or when a drafter never has
    a draft token accepted (acceptance length 1.0: it is broken, or not this target's).
    """
    params = context.params
    model_folder = context.inputs["target"] / params["model_folder"]
    drafters = _drafters(context)
    tokenizer = load_tokenizer(draft_files.tokenizer_folder(context.inputs["target"], params["model_folder"]))
    model = qwen.load_model(model_folder, device=context.device)
    rows = list(read_rows(context.inputs["heldout"] / "prompts.jsonl"))[: params["prompts"]]
    conversations = _continue(context, model, tokenizer, rows)
    taps = all_taps(model, conversations, drafters[0][1].shape.taps)
    frozen = draft_files.frozen_parts(model)
    forms: list[tuple[str, Any, int | None]] = [(label, drafter, None) for label, drafter in drafters]
    if params.get("window") is not None:
        label, drafter = drafters[-1]
        forms.append((f"{label}, window {params['window']}", drafter, params["window"]))
    counts: dict[str, list[Counts]] = {}
    for done, (label, drafter, window) in enumerate(forms):
        counts[label] = replay.replay(drafter, frozen, conversations, taps, params["k"], window)
        _check(label, counts[label])
        context.report(done + 1, len(forms), label)
    write_json(context.output / "evaluation.json", _evaluation(counts, params["k"]))
    lines = [
        canonical.dumps(
            {
                "id": row["id"],
                "messages": row["messages"],
                "prompt_tokens": conversation.prompt_tokens,
                "completion_tokens": conversation.answer_tokens(),
                "replay": {
                    label: {"accepted": found[index].accepted, "drafts": found[index].drafts}
                    for label, found in counts.items()
                },
            }
        )
        + b"\n"
        for index, (row, conversation) in enumerate(zip(rows, conversations, strict=True))
    ]
    (context.output / "prompts.jsonl").write_bytes(b"".join(lines))


def _failure(what: str, message: str, hint: str | None = None) -> QdcError:
    return QdcError(f"stage.evaluate-drafter.{what}", message, hint=hint, exit_code=COULD_NOT)


def _drafters(context: Context) -> list[tuple[str, Any]]:
    """(label, drafter) in the order of the roles' numbers. All must share taps."""
    labels, k = context.params["labels"], context.params["k"]
    found = []
    for index, label in enumerate(labels):
        drafter = draft_files.load_drafter(context.inputs[f"drafter_{index}"]).to(context.device)
        if not 1 <= k <= drafter.shape.draft_block_size - 1:
            raise _failure(
                "k",
                f"K {k} does not fit {label}, whose draft block holds {drafter.shape.draft_block_size} tokens",
                "K is at least 1 and at most the draft block size less one",
            )
        found.append((label, drafter))
    if len({drafter.shape.taps for _, drafter in found}) != 1:
        raise _failure("taps", "the drafters do not read the same taps")
    return found


def _continue(
    context: Context, model: torch.nn.Module, tokenizer: Tokenizer, rows: Sequence[dict[str, Any]]
) -> list[Conversation]:
    """The target's greedy continuation of every prompt."""
    prompts = [tokenizer.encode(tokenizer.render_chat(row["messages"], add_generation_prompt=True)) for row in rows]
    sampling = Sampling(0.0, 1.0, 0, context.params["max_tokens"], 0)
    completions = generate(model, prompts, sampling, tokenizer.eos_id, tokenizer.pad_id, context.report)
    found = []
    for row, prompt, completion in zip(rows, prompts, completions, strict=True):
        end = [tokenizer.eos_id] if completion.finish_reason == "stop" else []
        found.append(Conversation(str(row["id"]), (*prompt, *completion.ids, *end), len(prompt)))
    return found


def _check(label: str, counts: Sequence[Counts]) -> None:
    if not sum(c.drafts for c in counts):
        raise _failure("nothing", "no answer is long enough to draft anything")
    if not sum(c.accepted for c in counts):
        raise _failure(
            "acceptance",
            f"acceptance length of {label} is 1.0: not one draft token of {sum(c.drafts for c in counts)} "
            "drafts was accepted",
            "look at taps, mask token, and whether the drafter was trained on this target's text",
        )


def _evaluation(counts: dict[str, list[Counts]], k: int) -> dict[str, Any]:
    rows, tests = [], []
    before: str | None = None
    for label, found in counts.items():
        low, high = replay.bootstrap([found])[0]
        rows.append(
            {
                "what": f"drafter, K {k}",
                "subject": label,
                "metric": "acceptance-length",
                "value": replay.acceptance_length(found),
                "low": low,
                "high": high,
                "n": len(found),
                "against": "target",
                "method": METHOD,
            }
        )
        if before is not None:
            low, high = replay.bootstrap([found, counts[before]])[2]
            tests.append(
                {
                    "what": f"drafter, K {k}",
                    "subject": label,
                    "metric": "acceptance-length difference",
                    "value": replay.acceptance_length(found) - replay.acceptance_length(counts[before]),
                    "low": low,
                    "high": high,
                    "n": len(found),
                    "against": before,
                    "method": "95 % paired bootstrap over prompts",
                }
            )
        before = label
    return {"rows": rows, "tests": tests}
