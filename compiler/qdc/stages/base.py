"""`base`: the teacher, trained from scratch on synthetic chats, or a given model, checked.

A given model may be whole (with a vision tower and an MTP head, as it is published): its language model is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context, Report
from qdc.formats import qwen35
from qdc.formats.safetensors import copy, read_header
from qdc.methods import documents, pretraining, qwen, tokenizer

SIDECARS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def run(context: Context) -> None:
    """Writes a Hugging Face folder with BF16 weights; a trained one also has training.json."""
    if "scratch" in context.params:
        _train(context)
    else:
        _copy(context)


def _train(context: Context) -> None:
    scratch = context.params["scratch"]
    settings = scratch["training"]
    if int(settings["steps"]) < 1:
        raise QdcError("stage.base.steps", "a training of no steps", exit_code=COULD_NOT)
    vocabulary = _tokenizer(context)
    end = {"pad": vocabulary.pad_id, "eos": vocabulary.eos_id}
    config = qwen35.text_config(scratch["architecture"], int(scratch["tokenizer"]["vocab_size"]), end)
    ids, assistant = _text(context, vocabulary, int(settings["batch"]["sequence_length"]))
    model = qwen.build_model(config, int(settings["seed"])).to(context.device)
    log = pretraining.pretrain(model, ids, assistant, settings, context.partial, context.report)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if name != "lm_head.weight"
    }
    save_file(weights, context.output / "model.safetensors", metadata={"format": "pt"})
    write_json(context.output / "config.json", config)
    write_json(
        context.output / "generation_config.json",
        {"do_sample": False, "eos_token_id": end["eos"], "pad_token_id": end["pad"]},
    )
    summary = {"log": log, "chunks": len(ids), "vocabulary": vocabulary.vocab_size, "steps": len(log)}
    write_json(context.output / "training.json", summary)


def _tokenizer(context: Context) -> tokenizer.Tokenizer:
    scratch = context.params["scratch"]
    chosen = scratch["tokenizer"]
    if chosen["kind"] != "byte-bpe":
        raise QdcError("stage.base.tokenizer", f"no tokenizer of kind {chosen['kind']}", exit_code=COULD_NOT)
    texts = ["user\n", "assistant\n", "system\n"] * 1000
    for row in _answered(context):
        texts += [message["content"] for message in row["messages"]]
        texts.append(row["answer"])
    backend = tokenizer.train_byte_bpe(texts, int(chosen["vocab_size"]), chosen["mask_token"])
    longest = int(scratch["architecture"]["max_position_embeddings"])
    template = context.params["chat_template"]
    tokenizer.write_tokenizer(backend, context.output, template, longest, chosen["mask_token"])
    return tokenizer.load_tokenizer(context.output)


def _answered(context: Context) -> Iterator[dict[str, Any]]:
    """The rows that a model is trained from nothing on. Raises QdcError at one without an answer."""
    for number, row in enumerate(documents.read_rows(context.inputs["text"] / "prompts.jsonl"), 1):
        if row["answer"] is None:
            message = f"prompt {number} has no answer to learn from: let its last message be the assistant's"
            raise QdcError("stage.base.answer", message, exit_code=COULD_NOT)
        yield row


def _text(context: Context, vocabulary: tokenizer.Tokenizer, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed ids [N, T] int64 and the assistant mask with -1 on padding."""
    chats: list[list[dict[str, str]]] = [
        [*row["messages"], {"role": "assistant", "content": row["answer"]}] for row in _answered(context)
    ]
    coded = documents.conversations(vocabulary, chats, [True] * len(chats))
    packed = documents.pack(coded, length, vocabulary.pad_id, vocabulary.pad_id)
    assistant = torch.from_numpy(packed.assistant_mask).to(torch.int8)
    beyond = torch.arange(length)[None, :] >= torch.from_numpy(packed.length)[:, None]
    return torch.from_numpy(packed.input_ids).long(), assistant.masked_fill(beyond, -1)


def _copy(context: Context) -> None:
    source, output = context.inputs["source"], context.output
    given = _config(source)
    for name in SIDECARS:
        if not (source / name).is_file():
            raise QdcError("stage.base.file", f"the given model has no {name}", file=source, exit_code=COULD_NOT)
        context.pass_on(source / name)
    template = context.params.get("chat_template") or _own_template(source)
    (output / "chat_template.jinja").write_text(template, encoding="utf-8")
    if qwen35.WHOLE_ARCHITECTURE in given.get("architectures", []):
        write_json(output / "config.json", qwen35.text_of(given))
        _take_text(source, output, context.report)
    else:
        for file in (source / "config.json", *sorted(source.glob("*.safetensors*"))):
            context.pass_on(file)
    weights = qwen.read_weights(output)
    foreign = sorted(name for name, tensor in weights.items() if not _kept_as(tensor))
    if foreign:
        raise QdcError(
            "stage.base.dtype", f"tensors that are not BF16: {foreign[:3]}", file=source, exit_code=COULD_NOT
        )
    qwen.model_from(qwen.read_config(output), weights)


def _kept_as(tensor: torch.Tensor) -> bool:
    """BF16, or a vector (a decay, a norm) that its makers keep in FP32."""
    return bool(tensor.dtype == torch.bfloat16 or (tensor.dtype == torch.float32 and tensor.dim() == 1))


def _config(source: Path) -> dict[str, Any]:
    """`config.json` of a model that this stage takes. Raises QdcError for any other."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if qwen35.WHOLE_ARCHITECTURE in config.get("architectures", []):
        if not isinstance(config.get("text_config"), dict):
            raise QdcError("stage.base.config", "a whole model without a text_config", file=source, exit_code=COULD_NOT)
        return config
    return qwen.read_config(source)


def _take_text(source: Path, output: Path, report: Report) -> None:
    """The language model's tensors of a whole model, file by file, under the names of a text model."""
    files = sorted(source.glob("*.safetensors"))
    index: dict[str, str] = {}
    left: set[str] = set()
    total = 0
    for number, file in enumerate(files):
        report(number, len(files), f"taking the language model of {file.name}")
        header = read_header(file)
        try:
            names = {name: text for name in header.tensors if (text := qwen35.text_name(name)) is not None}
        except ValueError as error:
            raise QdcError("stage.base.tensors", str(error), file=file, exit_code=COULD_NOT) from error
        left |= {name.removesuffix(".weight") for name in header.tensors if name not in names}
        if names:
            copy(file, output / file.name, names)
            index |= dict.fromkeys(names.values(), file.name)
            total += sum(header.tensors[name].size for name in names)
    write_json(output / qwen.LEFT_OUT, sorted(left))
    if len(files) > 1:
        write_json(output / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _own_template(source: Path) -> str:
    """The given model's chat template: its own file, or inside tokenizer_config.json as older ones have it."""
    file = source / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    inside = json.loads((source / "tokenizer_config.json").read_text()).get("chat_template")
    if not isinstance(inside, str):
        raise QdcError("stage.base.template", "the given model has no chat template", file=source, exit_code=COULD_NOT)
    return inside
