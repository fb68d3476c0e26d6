"""What must fit: requests on the card that serves, QAD on the device that trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qdc.recipe.load import Loaded
from qdc.rules.registry import Found, Topic

if TYPE_CHECKING:
    from qdc.measure.memory import Serving

TOPIC = Topic()
_SERVED = ("target.base", "target.quantization.grid", "drafter.checkpoint")
_LENGTH, _REQUESTS = ("serve", "max_model_len"), ("serve", "max_num_seqs")


def _serving(loaded: Loaded) -> Serving | None:
    """What serving holds; None where nothing says how much it may, or the checkpoints are of a kind not known here."""
    if loaded.model.serve.gpu_memory_utilization is None:
        return None
    from qdc.measure.figures import Lacking
    from qdc.measure.memory import serving
    from qdc.tables.hardware import row

    try:
        return serving(loaded.data, loaded.facts, row(loaded.model.deploy.hardware))
    except Lacking:
        return None


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


@TOPIC.rule(
    "DEP04",
    "error",
    summary="One request of full length does not fit on the card.",
    why="Weights, K + 2 recurrent states, the KV cache of `max_model_len` tokens and the graphs are more than "
    "`gpu_memory_utilization` of the card's memory. The engine ends at the start, or cuts the length.",
    fix="Lower `serve.max_model_len` to what the message says.",
    evidence="Follows by arithmetic from the shapes of the checkpoints (Qwen3.5-4B: a state of 50.3 MB, 32,768 bytes "
    "of KV cache a token, and 20,480 of its drafter's).",
    failing="serve: {max_model_len: 262144, gpu_memory_utilization: 0.7}",
    passing="serve: {max_model_len: 131072, max_num_seqs: 1, gpu_memory_utilization: 0.7}",
    needs=_SERVED,
)
def one_request_fits(loaded: Loaded) -> Iterator[Found]:
    found = _serving(loaded)
    if found is None or found.room is None or found.fits_one is not False:
        return
    sum_, room, card = _gb(found.one), _gb(found.room.value), loaded.model.deploy.hardware
    message = f"one request of {loaded.model.serve.max_model_len} tokens needs {sum_} of {room} on {card}"
    hint = (
        f"write `max_model_len: {found.longest}` or less"
        if found.longest
        else "the weights alone do not fit: raise `gpu_memory_utilization`, or take another card"
    )
    yield Found(_LENGTH, message, hint, also=(("serve", "gpu_memory_utilization"), "part that may be used"))


@TOPIC.rule(
    "DEP05",
    "warning",
    summary="As many requests of full length as `serve.max_num_seqs` do not fit on the card at a time.",
    why="Those without room for their KV cache wait, and an answer's time includes the waiting: the last ones pass a "
    "contract's limit on it.",
    fix="Lower `serve.max_num_seqs` or `serve.max_model_len`.",
    evidence="Three of eight ran at a time, and answers came too late: https://github.com/PraveenAShukla/adaptfm",
    failing="serve: {max_num_seqs: 16}",
    passing="serve: {max_num_seqs: 8}",
    needs=_SERVED,
)
def all_requests_fit(loaded: Loaded) -> Iterator[Found]:
    found = _serving(loaded)
    if found is None or found.room is None or not found.fits_one or found.fits_all:
        return
    runs, wanted = found.runs, found.requests
    message = (
        f"{wanted} requests of {loaded.model.serve.max_model_len} tokens need {_gb(found.all)} of "
        f"{_gb(found.room.value)}: about {runs} will run, the rest wait"
    )
    yield Found(_REQUESTS, message, f"write `max_num_seqs: {runs}`, or lower `max_model_len`", also=(_LENGTH, "tokens"))


@TOPIC.rule(
    "QAD06",
    "error",
    summary="QAD does not fit on the device that trains.",
    why="Teacher, trained weights, gradients and optimizer state are held beside four FP32 tensors of logits; over a "
    "vocabulary of 248,320 and 16,384 tokens each of these is 15.2 GiB. Decided where the setting "
    "`training_memory_gb` (`QDC_TRAINING_MEMORY_GB`) says how much the device has free.",
    fix="Set `kl_chunk_tokens`, so that fewer logits are held at a time, or train on a larger device.",
    evidence="The published training holds a whole sequence's logits and needs two devices of 80 GB: "
    "https://github.com/nota-github/adaptfm-quant-dflash",
    failing="target: {qad: {kl_chunk_tokens: 16384}}",
    passing="target: {qad: {kl_chunk_tokens: 1024}}",
    final="it is about the device that trains, which a recipe does not name",
    needs=("target.base",),
)
def qad_fits(loaded: Loaded) -> Iterator[Found]:
    if loaded.training_bytes is None:
        return
    from qdc.measure import memory
    from qdc.measure.figures import Lacking

    try:
        found = memory.qad(loaded.data, loaded.facts, loaded.training_bytes)
    except Lacking:
        return
    if found is None or found.fits is not False:
        return
    chunk = memory.fitting_chunk(loaded.data, loaded.facts, loaded.training_bytes)
    needs, free = _gb(found.total.value), _gb(loaded.training_bytes)
    message = f"QAD needs {needs} without its activations, and the device that trains has {free} free"
    hint = f"write `kl_chunk_tokens: {chunk}`" if chunk else "train on a larger device; smaller chunks do not suffice"
    given = loaded.data["target"]["qad"]["kl_chunk_tokens"] is not None
    place = ("target", "qad", "kl_chunk_tokens") if given else ("target", "qad", "batch", "sequence_length")
    yield Found(place, message, hint)
