"""What the target's checkpoints say of themselves: tokens that end an answer, output head, MTP head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.recipe.drafter import MtpDrafter
from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.modules import HEAD, ignored, linears
from qdc.rules.registry import Found, Severity, Topic
from qdc.rules.source import checkpoints

TOPIC = Topic()
_NEEDS = ("target.base", "target.quantization.grid")
_EOS: Path_ = ("target", "eos")
_GENERATION, _CONFIG, _TEXT = "generation_config.json", "config.json", "text_config of config.json"


def _targets(loaded: Loaded) -> list[tuple[Path_, ModelFacts]]:
    """The target's published checkpoints: the base, then the grid."""
    return [(path, facts) for path, facts in checkpoints(loaded) if path[0] == "target"]


def _places(facts: ModelFacts) -> dict[str, dict[str, Any]]:
    """Where token ids are given: name of the place -> its fields."""
    config = facts.config or {}
    inner = config.get("text_config")
    return {
        _GENERATION: facts.generation_config or {},
        _CONFIG: config,
        _TEXT: inner if isinstance(inner, dict) else {},
    }


def _ids(value: Any) -> set[int]:
    """Token ids of a field: one, several or none."""
    return {id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)}


def _stops(facts: ModelFacts) -> dict[str, set[int]]:
    return {place: _ids(fields.get("eos_token_id")) for place, fields in _places(facts).items()}


def _written(ids: set[int]) -> str:
    return f"{{{', '.join(map(str, sorted(ids)))}}}" if ids else "nothing"


@TOPIC.rule(
    "TGT08",
    "error",
    summary="The grid's checkpoint ends answers at other tokens than the base.",
    why="Answers get other lengths, and scores change with them.",
    fix="Take a grid with the base's `eos_token_id`s, or name the change in `target.eos`.",
    evidence="Other end tokens were measured as another model: https://github.com/SamMausberg/verified-progress "
    "(evidence/lossy/README.md); an end token was read from one of two files only: "
    "https://github.com/InfiniTensor/InfiniLM/pull/387",
    failing="target: {eos: null}  # the grid's config.json adds eos_token_id 248046",
    passing="target: {eos: {generation_config: [248044, 248046], config: [248046]}}",
    needs=_NEEDS,
    final="the served text would not be the model's",
)
def answers_end_as_the_bases(loaded: Loaded) -> Iterator[Found]:
    found = dict(_targets(loaded))
    base, eos = loaded.facts.get("target.base"), loaded.model.target.eos
    declared = {_GENERATION: eos.generation_config, _CONFIG: eos.config, _TEXT: eos.config} if eos else {}
    for path, facts in found.items():
        if base is None or path[:2] == ("target", "base"):
            continue
        theirs, ours = _stops(base), _stops(facts)
        for place, ids in ours.items():
            if ids != theirs[place] and ids != set(declared.get(place, [])):
                message = (
                    f"{place} of the grid ends answers at {_written(ids)}, the base's at {_written(theirs[place])}"
                )
                named = ids if place != _GENERATION else ours[_CONFIG] or ours[_TEXT]
                both = sorted(ours[_GENERATION]), sorted(named)
                hint = (
                    f"name a grid with the base's, or write `eos: {{generation_config: {both[0]}, config: {both[1]}}}`"
                )
                yield Found(path, message, hint, also=(("target", "base"), "the base"))


@TOPIC.rule(
    "TGT09",
    "warning",
    summary="The token that ends a turn is not one that ends an answer.",
    why="Answers run on to `max_tokens`.",
    fix="Add the tokenizer's `eos_token` to `eos_token_id`, by `target.eos`.",
    evidence="Answers that did not end: https://github.com/QwenLM/Qwen3/issues/927 "
    "https://github.com/Blaizzy/mlx-vlm/pull/2112",
    failing="target: {eos: null}  # the checkpoint ends at 248044 alone",
    passing="target: {eos: {generation_config: [248044, 248046], config: [248044]}}",
    needs=_NEEDS,
)
def turns_end_answers(loaded: Loaded) -> Iterator[Found]:
    eos = loaded.model.target.eos
    for path, facts in _targets(loaded)[-1:]:
        stops = set().union(*_stops(facts).values())
        if eos is not None:
            stops = {*eos.generation_config, *eos.config}
        end = facts.tokenizer.eos if facts.tokenizer is not None else None
        if end is not None and end not in stops:
            message = f"turns end with token {end}, and answers at {_written(stops)}"
            listed = sorted({*stops, end})
            hint = f"write `eos: {{generation_config: {listed}, config: {listed}}}` in `target`"
            yield Found((*_EOS, "generation_config") if eos else path, message, hint)


@TOPIC.rule(
    "TGT10",
    "error",
    summary="An end, start or padding token has no row in the embedding, or is another token than in the base.",
    why="A token past the last row can never be produced, so answers do not end.",
    fix="Write the id that the token has after the vocabulary was cut.",
    evidence="Vocabularies that were cut to fewer rows: https://github.com/Teora/efficient-qwen-suffix-spec; ids past "
    "the vocabulary: https://github.com/ggml-org/llama.cpp/issues/28158",
    failing="target: {eos: {generation_config: [248044, 248400], config: [248044]}}",
    passing="target: {eos: {generation_config: [248044, 248046], config: [248044]}}",
    needs=_NEEDS,
    final="answers would not end",
)
def special_tokens_exist(loaded: Loaded) -> Iterator[Found]:
    eos, base = loaded.model.target.eos, loaded.facts.get("target.base")
    for path, facts in _targets(loaded):
        rows, named = _rows(facts), _named_ids(facts)
        cut = base is not None and _rows(base) != rows
        for id, what in named.items():
            if rows is not None and id >= rows:
                message = f"{what} {id} has no row: the embedding has {rows}"
                yield Found(path, message, "name a checkpoint whose ids were mapped to the rows that are left")
            elif cut and base is not None and (was := _renamed(base, facts, id)) is not None:
                message = f"{what} {id} is {was[1]} here and {was[0]} in the base"
                yield Found(path, message, "name a checkpoint whose ids were mapped to its vocabulary")
    given = {"generation_config": eos.generation_config, "config": eos.config} if eos else {}
    rows = min((rows for _, facts in _targets(loaded) if (rows := _rows(facts)) is not None), default=None)
    for name, ids in given.items():
        for index, id in enumerate(ids):
            if rows is not None and id >= rows:
                message = f"token {id} has no row: the embedding has {rows}"
                yield Found((*_EOS, name, index), message, f"write an id below {rows}")


def _named_ids(facts: ModelFacts) -> dict[int, str]:
    """End, start and padding tokens: id -> the first field that names it, and its file."""
    found: dict[int, str] = {}
    for place, fields in _places(facts).items():
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            for id in sorted(_ids(fields.get(name))):
                found.setdefault(id, f"{name} of {place}:")
    return found


def _rows(facts: ModelFacts) -> int | None:
    """Rows of the embedding; the vocabulary's size where no embedding is stored."""
    stored = (tensor.shape[0] for name, tensor in facts.tensors.items() if name.endswith("embed_tokens.weight"))
    size = facts.text_config.get("vocab_size")
    return next(stored, size if isinstance(size, int) else None)


def _renamed(base: ModelFacts, facts: ModelFacts, id: int) -> tuple[str, str] | None:
    """What the id stands for in the base and in the other, where both are known to be different."""
    if base.tokenizer is None or facts.tokenizer is None:
        return None
    was, now = base.tokenizer.special.get(id, "no special token"), facts.tokenizer.special.get(id, "no special token")
    return None if was == now else (was, now)


@TOPIC.rule(
    "TGT11",
    "error",
    summary="The checkpoint has no output head, and its config.json does not tie it to the embedding.",
    why="The head would start at random, with at most a warning.",
    fix="Take a checkpoint with `tie_word_embeddings: true` at the top level of config.json, or with its head.",
    evidence="The key inside `text_config` alone was not read: "
    "https://github.com/huggingface/transformers/pull/43429 "
    "https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89",
    failing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # tied in text_config alone",
    passing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # tied at the top level",
    needs=_NEEDS,
    final="the served text would not be the model's",
)
def there_is_a_head(loaded: Loaded) -> Iterator[Found]:
    for path, facts in _targets(loaded):
        config = facts.config or {}
        stored = any(f".{HEAD}." in f".{name}" for name in facts.tensors)
        if not stored and config.get("tie_word_embeddings") is not True:
            inner = " (it does in `text_config`, which is not read)" if _tied(facts) else ""
            message = f"no {HEAD} is stored, and the top level of config.json does not tie it to the embedding{inner}"
            yield Found(path, message, "name a checkpoint with `tie_word_embeddings: true` at the top of config.json")


def _tied(facts: ModelFacts) -> bool:
    return True in ((facts.config or {}).get("tie_word_embeddings"), facts.text_config.get("tie_word_embeddings"))


@TOPIC.rule(
    "TGT12",
    "warning",
    summary="The output head is tied to the embedding, and the ignore list does not spare it.",
    why="One matrix cannot be a BF16 embedding and an INT4 head.",
    fix="Add `lm_head` to `ignore`.",
    evidence="Disputed. One compressor refuses it: https://github.com/intel/auto-round/pull/101; a change of an engine "
    "would allow it: https://github.com/vllm-project/vllm/pull/45535",
    failing='target: {quantization: {ignore: ["re:.*in_proj_[ab]$", "re:.*conv1d$"]}}',
    passing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_[ab]$", "re:.*conv1d$"]}}',
    needs=("target.base",),
)
def a_tied_head_is_spared(loaded: Loaded) -> Iterator[Found]:
    facts, entries = loaded.facts.get("target.base"), loaded.model.target.quantization.ignore
    if facts is not None and _tied(facts) and not ignored(HEAD, entries):
        message = (
            f"the embedding is also the output head, and `ignore` does not name `{HEAD}` (disputed: if that works)"
        )
        yield Found(("target", "quantization", "ignore"), message, f"add `{HEAD}` to the list")


def _of_mtp(loaded: Loaded) -> Severity:
    drafter = loaded.model.drafter
    return "error" if drafter is not None and isinstance(drafter.architecture, MtpDrafter) else "warning"


@TOPIC.rule(
    "TGT13",
    "warning",
    summary="config.json promises an MTP head that the checkpoint lacks.",
    why="The engine fails to load it, or drafts with weights that were never read. With the drafter `mtp` it is an "
    "error.",
    fix="Take a checkpoint with its `mtp.*` tensors, or one whose `mtp_num_hidden_layers` is 0.",
    evidence="Checkpoints that were saved without the head: https://github.com/unslothai/unsloth/pull/6706; drafts "
    "that were never accepted: https://github.com/sgl-project/sglang/issues/35797",
    failing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # without its mtp tensors",
    passing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # with them",
    needs=_NEEDS,
)
def the_mtp_head_is_there(loaded: Loaded) -> Iterator[Found]:
    for path, facts in _targets(loaded):
        layers = facts.text_config.get("mtp_num_hidden_layers")
        if isinstance(layers, int) and layers > 0 and not any(_mtp(name) for name in facts.tensors):
            message = f"config.json promises {layers} MTP layer{'s' if layers > 1 else ''}, and no mtp tensor is stored"
            hint = "name a checkpoint with its mtp tensors, or with `mtp_num_hidden_layers: 0`"
            yield Found(path, message, hint, _of_mtp(loaded))


def _mtp(name: str) -> bool:
    return "mtp" in name.split(".")


@TOPIC.rule(
    "TGT14",
    "warning",
    summary="An MTP module is stored in BF16, and the checkpoint's own ignore list does not say so.",
    why="The engine looks for packed weights and fails. With the drafter `mtp` it is an error.",
    fix="Take a checkpoint whose `quantization_config.ignore` names its plain MTP modules.",
    evidence="Loading such a head: https://github.com/vllm-project/vllm/issues/53387 "
    "https://github.com/vllm-project/vllm/pull/38832",
    failing="target: {quantization: {grid: {hf: cyankiwi/Qwen3.5-4B-AWQ-4bit}}}  # ignores lm_head",
    passing="target: {quantization: {grid: {hf: cyankiwi/Qwen3.5-4B-AWQ-4bit}}}  # ignores mtp.fc too",
    needs=_NEEDS,
)
def plain_mtp_modules_are_declared(loaded: Loaded) -> Iterator[Found]:
    for path, facts in _targets(loaded):
        own = (facts.config or {}).get("quantization_config")
        if not isinstance(own, dict) or own.get("quant_method") != "compressed-tensors":
            continue
        said = own.get("ignore")
        entries = [entry for entry in said if isinstance(entry, str)] if isinstance(said, list) else []
        layers = [layer for name, layer in linears(facts).items() if _mtp(name)]
        odd = [layer.name for layer in layers if not layer.packed and not ignored(layer.name, entries)]
        if odd:
            message = f"`{odd[0]}` is stored in BF16, and the checkpoint's own ignore list does not name it"
            hint = 'name a checkpoint whose `quantization_config` ignores it ("re:^mtp.*")'
            yield Found(path, message, hint, _of_mtp(loaded))
