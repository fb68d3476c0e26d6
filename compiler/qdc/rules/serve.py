"""The room and the number of requests that what is measured asks of the served image."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.recipe.serving import QualityTasks
from qdc.rules.parts import (
    BASE,
    drafted_block,
    served_checkpoint,
    setting,
    target_place,
    target_size,
    target_text,
    whole,
)
from qdc.rules.registry import Found, Topic

TOPIC = Topic()


@TOPIC.rule(
    "SRV01",
    "error",
    summary="What is measured does not fit into `max_model_len`.",
    why="Near the limit answers are cut, and the engine stops drafting. Counted are the prompt (where it is known, "
    "else one token), the answer and one draft step.",
    fix="Raise `serve.max_model_len`, or ask for fewer answer tokens.",
    evidence="A public serving configuration had less room than its benchmarks ask for: "
    "https://github.com/nota-github/adaptfm-quant-dflash; vLLM 0.32 stops drafting there (measured).",
    failing="serve: {max_model_len: 39}",
    passing="serve: {max_model_len: 128}",
)
def answers_fit(loaded: Loaded) -> Iterator[Found]:
    serve = loaded.model.serve
    worst = max(_asked(loaded), key=lambda asked: asked[1] + asked[2], default=None)
    if worst is None:
        return
    path, prompt, answer = worst
    drafted = serve.k or 0
    needed = prompt + answer + drafted
    if needed > serve.max_model_len:
        message = (
            f"max_model_len {serve.max_model_len} has no room for a prompt of {prompt}, {answer} answer tokens of "
            f"`{'.'.join(str(part) for part in path if not isinstance(part, int))}` and K = {drafted}"
        )
        hint = f"write `max_model_len: {needed}` or more"
        yield Found(("serve", "max_model_len"), message, hint, also=(path, "tokens that are asked for"))


def _asked(loaded: Loaded) -> Iterator[tuple[Path_, int, int]]:
    """(recipe path, prompt tokens, answer tokens) of everything that is measured; an unknown prompt counts as 1."""
    evaluate = loaded.model.evaluate
    for index, regime in enumerate(evaluate.latency.regimes if evaluate.latency else []):
        prompt, answer = map(int, regime.split("/"))
        yield ("evaluate", "latency", "regimes", index), prompt, answer
    if isinstance(evaluate.quality, QualityTasks):
        for name, task in evaluate.quality.tasks.items():
            yield ("evaluate", "quality", "tasks", name, "max_tokens"), task.prompt_tokens or 1, task.max_tokens
    elif evaluate.quality is not None:
        yield ("evaluate", "quality", "max_tokens"), 1, evaluate.quality.max_tokens
    if evaluate.acceptance is not None:
        yield ("evaluate", "acceptance", "max_tokens"), 1, evaluate.acceptance.max_tokens


@TOPIC.rule(
    "SRV03",
    "error",
    summary="`max_model_len` is more than the target has positions.",
    why="The engine reads `max_position_embeddings` and does not start.",
    fix="Lower `serve.max_model_len`, or take a target with more positions.",
    evidence="Measured with vLLM 0.32.0 on CPU.",
    failing="serve: {max_model_len: 2049}",
    passing="serve: {max_model_len: 2048}",
    final="the engine would not start",
    needs=BASE,
)
def the_target_has_the_positions(loaded: Loaded) -> Iterator[Found]:
    serve, positions = loaded.model.serve, target_size(loaded, "max_position_embeddings")
    rope = (target_text(loaded) or {}).get("rope_parameters")
    scaled = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    if positions is not None and not scaled and serve.max_model_len > positions:
        message = f"max_model_len {serve.max_model_len} is more than the target's {positions} positions"
        where = (target_place(loaded, "max_position_embeddings"), "the target")
        yield Found(("serve", "max_model_len"), message, f"write `max_model_len: {positions}` or less", also=where)


def _block_drafts(loaded: Loaded) -> bool:
    return drafted_block(loaded) is not None


@TOPIC.rule(
    "SRV04",
    "error",
    summary="`max_model_len` is more than the drafter has positions.",
    why="Past its `max_position_embeddings` the engine has no rotary angles for the drafter: it drafts noise, without "
    "a word.",
    fix="Raise `drafter.architecture.max_position_embeddings`, or lower `serve.max_model_len`.",
    evidence="Measured with vLLM 0.32.0 on CPU: a drafter of 32 positions had not one of 807 drafts accepted.",
    failing="drafter: {architecture: {max_position_embeddings: 127}}",
    passing="drafter: {architecture: {max_position_embeddings: 128}}",
    needs=("drafter.checkpoint",),
    about=_block_drafts,
)
def the_drafter_has_the_positions(loaded: Loaded) -> Iterator[Found]:
    block, facts, longest = drafted_block(loaded), served_checkpoint(loaded), loaded.model.serve.max_model_len
    if block is None:
        return
    path: Path_ = ("drafter", "architecture", "max_position_embeddings")
    positions, hint = block.max_position_embeddings, f"write `max_position_embeddings: {longest}` or more"
    if facts is not None and facts.config is not None:
        scaled = setting(facts.config, "rope_scaling") is not None
        positions = None if scaled else whole(setting(facts.config, "max_position_embeddings"))
        path, hint = ("drafter", "checkpoint"), f"write `max_model_len: {positions}` or less"
    if positions is not None and longest > positions:
        message = f"the drafter has {positions} positions, and max_model_len is {longest}"
        yield Found(path, message, hint, also=(("serve", "max_model_len"), "tokens a request"))


@TOPIC.rule(
    "SRV02",
    "warning",
    summary="Quality is measured with more requests at a time than the image serves.",
    why="Requests beyond `max_num_seqs` wait, and their waiting counts against the time limit of an answer (60 s under "
    "the contract `adaptfm`).",
    fix="Raise `serve.max_num_seqs`, or lower `evaluate.quality.concurrency`.",
    evidence="An entry whose answers came too late: https://github.com/PraveenAShukla/adaptfm",
    failing="serve: {max_num_seqs: 1}",
    passing="serve: {max_num_seqs: 8}",
)
def requests_do_not_wait(loaded: Loaded) -> Iterator[Found]:
    quality, seqs = loaded.model.evaluate.quality, loaded.model.serve.max_num_seqs
    if isinstance(quality, QualityTasks) and seqs < quality.concurrency:
        message = f"{quality.concurrency} requests at a time are measured, and {seqs} run: the others wait"
        where = (("evaluate", "quality", "concurrency"), "requests at a time")
        yield Found(("serve", "max_num_seqs"), message, f"write `max_num_seqs: {quality.concurrency}`", also=where)
