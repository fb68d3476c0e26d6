"""`draft-train`: train a DFlash drafter on a corpus, with taps of the teacher or of the target.

Reads `target` (a model folder), `data` (a corpus) and, if given, `init` (weights to start from, no more).
Writes config.json (full attention: a window belongs to serving), model.safetensors (BF16), training.json.
"""

from __future__ import annotations

from typing import Any

import torch

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.formats.dflash import drafter_config
from qdc.methods import draft_files, draft_training, qwen
from qdc.methods.dflash import Drafter, DrafterShape
from qdc.methods.documents import read_rows
from qdc.methods.draft_data import Conversation, cut, encode_rows
from qdc.methods.draft_taps import all_taps, pad, target_taps
from qdc.methods.parallel import Group
from qdc.methods.qwen_model import Qwen
from qdc.methods.tokenizer import Tokenizer, load_tokenizer
from qdc.methods.training import Optimizers, load_partial, save_partial

TAPS_LIMIT = 2 << 30
"""Bytes of taps kept in memory; a larger corpus has them computed step by step."""
PARTIAL_STEPS = 50


def run(context: Context) -> None:
    """See the module. Fails on zero steps, a loss that is no number, and weights that did not move."""
    params, target = context.params, context.inputs["target"]
    tokenizer = load_tokenizer(draft_files.tokenizer_folder(target, params["model_folder"]))
    model = qwen.load_model(target / params["model_folder"], device=context.device)
    config = _config(params["architecture"], qwen.read_config(target / params["model_folder"]), tokenizer)
    drafter, group = _start(context, config).to(context.device), Group(context.rank, context.processes)
    before = draft_files.plain_state(drafter)
    kept, dropped = _conversations(context, tokenizer)
    conversations = params["batch"]["conversations"]
    steps = params["steps"] if "steps" in params else params["epochs"] * (len(kept) // conversations)
    if steps < 1:
        raise _failure("steps", "zero training steps")
    named = dict(drafter.named_parameters())
    optimizers = Optimizers(named, params["optimizer"], [n for n, p in named.items() if p.dim() == 2])
    log = load_partial(context.partial, named, optimizers)
    plan = draft_training.Plan(
        steps=steps,
        conversations=conversations,
        anchors=params["anchors"],
        loss_decay=params["loss_decay"],
        schedule=params["schedule"],
        grad_clip=params["grad_clip"],
        seed=params["seed"],
    )

    def after_step(log: list[dict[str, Any]]) -> None:
        if group.first and len(log) % PARTIAL_STEPS == 0 and len(log) < plan.steps:
            save_partial(context.partial, named, optimizers, log)
        context.report(len(log), plan.steps, f"loss {log[-1]['loss']:.3f}")

    batches = _Batches(model, kept, drafter.shape, plan.steps * plan.conversations, group)
    draft_training.train(
        drafter, draft_files.frozen_parts(model), batches, len(kept), plan, optimizers, log, after_step, group
    )
    if not group.first:
        return
    after = draft_files.plain_state(drafter)
    if all(torch.equal(before[name], after[name]) for name in after):
        raise _failure("unchanged", "training left every weight as it was")
    write_json(context.output / "config.json", config)
    draft_files.save(context.output / "model.safetensors", after)
    write_json(
        context.output / "training.json",
        {
            "conversations": {"read": len(kept) + dropped, "used": len(kept), "without_anchor": dropped},
            "parameters": sum(p.numel() for p in named.values()),
            "steps": log,
            "taps_from": params["taps_from"],
            "warm_start": "init" in context.inputs,
        },
    )


def _failure(what: str, message: str) -> QdcError:
    return QdcError(f"stage.draft-train.{what}", message, exit_code=COULD_NOT)


def _config(architecture: dict[str, Any], target: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    if architecture["hidden_size"] != target["hidden_size"]:
        raise _failure(
            "hidden-size",
            f"the drafter's hidden size {architecture['hidden_size']} is not the target's "
            f"{target['hidden_size']}, whose embedding and head it uses",
        )
    return drafter_config(
        architecture,
        target_layers=target["num_hidden_layers"],
        vocab_size=target["vocab_size"],
        mask_token_id=tokenizer.token_id(architecture["mask_token"]),
        window=None,
        quantization=None,
    )


def _start(context: Context, config: dict[str, Any]) -> Drafter:
    if "init" in context.inputs:
        if draft_files.read_config(context.inputs["init"]) != config:
            raise _failure("init", "the drafter to start from has another config.json")
        return draft_files.load_drafter(context.inputs["init"])
    drafter = Drafter(DrafterShape.from_config(config))
    generator = torch.Generator().manual_seed(context.params["seed"])
    drafter.initialise(context.params["architecture"]["init_range"], generator)
    return drafter


def _conversations(context: Context, tokenizer: Tokenizer) -> tuple[list[Conversation], int]:
    """Those with at least one anchor (an answer token that another follows), and how many have none."""
    rows = list(read_rows(context.inputs["data"] / "conversations.jsonl"))
    found = [cut(c, context.params["max_length"]) for c in encode_rows(rows, tokenizer)]
    kept = [c for c in found if c.answer_tokens() > 1]
    if not kept:
        raise _failure("data", "no conversation has an answer of two tokens or more")
    return kept, len(found) - len(kept)


class _Batches:
    """Batches by row numbers, with the taps of this process's share.

    Taps are computed once a conversation if they fit and are used more than once.
    """

    def __init__(self, model: Qwen, rows: list[Conversation], shape: DrafterShape, draws: int, group: Group) -> None:
        self.model, self.rows, self.shape, self.group = model, rows, shape, group
        size = sum(len(c.input_ids) for c in rows) * len(shape.taps) * shape.hidden_size * 4
        self.known = all_taps(model, rows, shape.taps) if draws > len(rows) and size <= TAPS_LIMIT else None

    def __call__(self, chosen: list[int]) -> draft_training.Batch:
        ids, mask = pad([self.rows[i].input_ids for i in chosen])
        starts = torch.tensor([self.rows[i].prompt_tokens for i in chosen]).unsqueeze(1)
        assistant = (mask > 0) & (torch.arange(ids.shape[1]) >= starts)
        mine = self.group.share(chosen)
        if not mine:
            width = len(self.shape.taps) * self.model.config["hidden_size"]
            taps = torch.zeros(0, ids.shape[1], width, device=qwen.device_of(self.model))
        elif self.known is None:
            taps = target_taps(self.model, [self.rows[i].input_ids for i in mine], self.shape.taps)
        else:
            taps = torch.nn.utils.rnn.pad_sequence([self.known[i] for i in mine], batch_first=True)
        taps = torch.nn.functional.pad(taps, (0, 0, 0, ids.shape[1] - taps.shape[1]))
        return draft_training.Batch(ids, assistant, taps, slice(self.group.rank, None, self.group.size))
