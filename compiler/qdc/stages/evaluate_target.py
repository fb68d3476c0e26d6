"""`evaluate:target`: how far PTQ and QAD are from the teacher, on held-out text and on held-out prompts.

Compute is FP32 for all three, from the BF16 or dequantized weights that are served.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.methods import grid, qwen, statistics
from qdc.methods.documents import read_rows
from qdc.methods.generate import Sampling, generate
from qdc.methods.qwen_model import Qwen
from qdc.methods.student import heldout_kl, read_grid
from qdc.methods.tokenizer import load_tokenizer

Row = dict[str, Any]


def run(context: Context) -> None:
    """Writes evaluation.json: rows with 95 % intervals and the paired test on answers that changed."""
    teacher = qwen.load_model(context.inputs["teacher"], device=context.device)
    packed = load_file(context.inputs["data"] / "heldout.safetensors")
    weights = {
        "ptq": {f"{m}.weight": grid.decode(*pair).float() for m, pair in read_grid(context.inputs["grid"]).items()},
        "qad": {name: tensor.float() for name, tensor in qwen.read_weights(context.inputs["target"] / "dense").items()},
    }
    rows: list[Row] = []
    for subject, instead in weights.items():
        each = heldout_kl((teacher, {}), (teacher, instead), packed, 1.0)
        rows += [_kl(subject, each, packed, True), _kl(subject, each, packed, False)]
    answers, references = _answers(context, teacher, weights)
    rows += _text_rows(answers, references)
    write_json(context.output / "evaluation.json", {"rows": rows, "tests": _tests(answers)})


def _kl(subject: str, each: list[torch.Tensor], packed: dict[str, torch.Tensor], everything: bool) -> Row:
    sums, counts = [], []
    for kl, mask, length in zip(each, packed["assistant_mask"], packed["length"].tolist(), strict=True):
        counted = torch.ones(length, dtype=torch.bool) if everything else mask[:length].bool()
        sums.append(float(kl[counted].double().sum()))
        counts.append(float(counted.sum()))
    tokens = sum(counts)
    if not tokens:
        raise QdcError("stage.evaluate.tokens", "the held-out text has no such token", exit_code=COULD_NOT)
    low, high = statistics.bootstrap_ratio(sums, counts)
    return {
        "what": "target",
        "subject": subject,
        "metric": "kl-all-tokens" if everything else "kl-assistant-tokens",
        "value": sum(sums) / tokens,
        "low": low,
        "high": high,
        "n": int(tokens),
        "sequences": len(sums),
        "against": "teacher",
        "method": "nats a token, FP32, held-out text; bootstrap over sequences, 95 %",
    }


def _answers(
    context: Context, teacher: Qwen, weights: dict[str, dict[str, torch.Tensor]]
) -> tuple[dict[str, list[str]], list[str | None]]:
    """Greedy texts of teacher, ptq and qad for the same prompts, and the reference answers."""
    tokenizer = load_tokenizer(context.inputs["teacher"])
    wanted = int(context.params["prompts"])
    prompts = list(read_rows(context.inputs["heldout"] / "prompts.jsonl"))[:wanted]
    if len(prompts) < wanted:
        raise QdcError(
            "stage.evaluate.prompts", f"{wanted} prompts were asked for, there are {len(prompts)}", exit_code=COULD_NOT
        )
    heads = tokenizer.encode_many([tokenizer.render_chat(p["messages"], True) for p in prompts])
    sampling = Sampling(0.0, 1.0, 0, int(context.params["max_tokens"]), 0)
    answers: dict[str, list[str]] = {}
    for subject in ("teacher", *weights):
        _replace(teacher, weights.get(subject, {}))
        done = generate(teacher, heads, sampling, tokenizer.eos_id, tokenizer.pad_id, context.report)
        answers[subject] = [tokenizer.decode(completion.ids) for completion in done]
    return answers, [p["answer"] for p in prompts]  # None where a file of prompts gives no reference


def _replace(model: Qwen, weights: dict[str, torch.Tensor]) -> None:
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            named[name].copy_(tensor)


def _proportion(subject: str, metric: str, hits: list[bool], against: str) -> Row:
    low, high = statistics.wilson(sum(hits), len(hits))
    return {
        "what": "target",
        "subject": subject,
        "metric": metric,
        "value": sum(hits) / len(hits),
        "low": low,
        "high": high,
        "n": len(hits),
        "against": against,
        "method": "greedy, FP32, held-out prompts; Wilson, 95 %",
    }


def _text_rows(answers: dict[str, list[str]], references: list[str | None]) -> list[Row]:
    """Against the teacher, and against the references of the prompts that have one."""
    rows = []
    known = [index for index, reference in enumerate(references) if reference is not None]
    for subject, texts in answers.items():
        if subject != "teacher":
            same = [a == b for a, b in zip(texts, answers["teacher"], strict=True)]
            rows.append(_proportion(subject, "same-greedy-text", same, "teacher"))
        if known:
            exact = [texts[index] == references[index] for index in known]
            rows.append(_proportion(subject, "exact-match", exact, "reference"))
    return rows


def _tests(answers: dict[str, list[str]]) -> list[Row]:
    """Paired: prompts whose greedy answer only one of PTQ and QAD changes against the teacher's."""
    triples = list(zip(answers["teacher"], answers["ptq"], answers["qad"], strict=True))
    only_ptq = sum(t != p and t == q for t, p, q in triples)
    only_qad = sum(t == p and t != q for t, p, q in triples)
    return [
        {
            "what": "target",
            "metric": "changed-answers",
            "subject": "qad",
            "against": "ptq",
            "n": len(triples),
            "ptq_only_changed": only_ptq,
            "qad_only_changed": only_qad,
            "p": statistics.sign_test(only_ptq, only_qad),
            "method": "two-sided exact sign test on paired prompts",
        }
    ]
