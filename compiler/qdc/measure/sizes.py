"""Names, dtypes and shapes of what a recipe serves: the target and the drafter, before they are made.

From the headers of the checkpoints that the recipe names, its schemes and its ignore lists. What a model of a kind
holds is in `qdc.formats`; this module counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.formats.safetensors import BITS
from qdc.measure.figures import Lacking

Json = dict[str, Any]
Shape = tuple[int, ...]
Tensors = dict[str, tuple[str, Shape]]
"""Tensor name -> safetensors dtype and shape."""

BASE, GRID, DRAFTER = "target.base", "target.quantization.grid", "drafter.checkpoint"
_EMBEDDING = "embed_tokens.weight"
_FLOATS = {"BF16", "F16", "F32"}
_COMPANIONS = {"weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx"}


@dataclass(frozen=True)
class TextModel:
    """The text model of a checkpoint. `body`: tensors of its layers and the last norm; `embedding`; `head`: of its
    own, empty where it is tied; `mtp`: its multi-token-prediction head; `others`: all else, as a vision tower."""

    config: Mapping[str, Any]
    body: Tensors
    embedding: Tensors
    head: Tensors
    mtp: Tensors
    others: Tensors

    @property
    def text(self) -> Tensors:
        return self.body | self.embedding | self.head

    @property
    def read_head(self) -> Tensors:
        """What the logits are made with: the head, or the embedding where they are tied."""
        return self.head or self.embedding

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return next(iter(self.embedding.values()))[1][0]

    @property
    def state_elements(self) -> int:
        """Numbers of a sequence's recurrent state: a key x value matrix a head, in each linear-attention layer."""
        kinds = self.config.get("layer_types")
        layers = kinds.count("linear_attention") if isinstance(kinds, list) else 0
        names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        return layers * math.prod(whole(self.config, name) for name in names) if layers else 0

    @property
    def attention_layers(self) -> int:
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list):
            return sum(kind != "linear_attention" for kind in kinds)
        return whole(self.config, "num_hidden_layers")

    @property
    def kv_elements(self) -> int:
        """Numbers of the KV cache a token: a key and a value, in each full-attention layer."""
        return self.attention_layers * 2 * whole(self.config, "num_key_value_heads") * _head_width(self.config)

    @property
    def attention_width(self) -> int:
        """Width of all query heads of a full-attention layer."""
        return whole(self.config, "num_attention_heads") * _head_width(self.config)

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrices that each token passes, without embedding and head."""
        return sum(math.prod(shape) for name, (_, shape) in self.body.items() if len(shape) == 2)


@dataclass(frozen=True)
class Drafter:
    """`tensors`: as served, empty for one that copies text; `parameters`: before quantization; `kv_elements` a token;
    `passes`: forward passes a step; `head_rows`: rows of the head that each pass reads."""

    tensors: Tensors
    parameters: int
    kv_elements: int
    window: int | None
    passes: int
    head_rows: int
    own_head: bool


def whole(config: Mapping[str, Any], name: str) -> int:
    """A size in a configuration. Raises Lacking where it is missing or no whole number over 0."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise Lacking(why=f"`{name}` of a checkpoint's configuration is {value!r}, not a whole number over 0")
    return value


def _head_width(config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return whole(config, "head_dim")
    return whole(config, "hidden_size") // whole(config, "num_attention_heads")


def count(tensors: Tensors) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(shape) for _, shape in tensors.values())


def size(tensors: Tensors, dtype: str = "bfloat16") -> int:
    """Bytes of all tensors where an engine runs them in `dtype`: plain 16-bit weights become 32-bit in `float32`."""
    wide = dtype == "float32"
    return sum(
        math.prod(shape) * (32 if wide and kind in ("BF16", "F16") else BITS[kind]) // 8
        for kind, shape in tensors.values()
    )


def base_model(facts: Mapping[str, ModelFacts]) -> TextModel:
    """The text model of `target.base`. Raises Lacking where its headers are not at hand or are no text model's."""
    if BASE not in facts:
        raise Lacking([BASE])
    return text_model(facts[BASE])


def text_model(facts: ModelFacts) -> TextModel:
    """Split a checkpoint's tensors. Raises Lacking where there is no embedding or the configuration lacks sizes."""
    tensors = plain(facts)
    names = [name for name in tensors if name.endswith(_EMBEDDING) and not _outside(name)]
    needed = ("num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers")
    if not names or any(name not in facts.text_config for name in needed):
        raise Lacking(why="the target's headers hold no text model that is known here")
    prefix = min(names, key=len).removesuffix(_EMBEDDING)
    groups: dict[str, Tensors] = {"body": {}, "embedding": {}, "head": {}, "mtp": {}, "others": {}}
    for name, tensor in tensors.items():
        groups[_group(name, prefix)][name] = tensor
    return TextModel(facts.text_config, **groups)


def _group(name: str, prefix: str) -> str:
    if name == prefix + _EMBEDDING:
        return "embedding"
    if name.startswith((f"{prefix}layers.", f"{prefix}norm.")):
        return "body"
    if name.rpartition("lm_head.")[1]:
        return "head"
    return "mtp" if name.startswith("mtp.") else "others"


def _outside(name: str) -> bool:
    return name.startswith("mtp.") or "visual" in name


def plain(facts: ModelFacts) -> Tensors:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in facts.tensors.items()}


def served_target(recipe: Json, facts: Mapping[str, ModelFacts]) -> TextModel:
    """The target as it is served: on the published grid's tensors where there is one, else packed here. Raises
    Lacking."""
    quantization = recipe["target"]["quantization"]
    if quantization["grid"] is not None:
        if GRID not in facts:
            raise Lacking([GRID])
        return text_model(facts[GRID])
    model = base_model(facts)
    groups = {
        name: packed(getattr(model, name), quantization["scheme"], quantization["ignore"])
        for name in ("body", "head", "mtp", "others")
    }
    return TextModel(model.config, embedding=model.embedding, **groups)


def packed(tensors: Tensors, scheme: Json, ignore: Iterable[str]) -> Tensors:
    """`tensors` with each matrix that `ignore` does not name as compressed-tensors' `pack-quantized` has it."""
    patterns, made = list(ignore), {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name or dtype not in _FLOATS or any(_matches(module, p) for p in patterns):
            made[name] = (dtype, shape)
            continue
        rows, columns = shape
        groups = 1 if scheme["group_size"] == -1 else -(-columns // scheme["group_size"])
        made[f"{module}.weight_packed"] = ("I32", (rows, -(-columns * scheme["bits"] // 32)))
        made[f"{module}.weight_scale"] = ("BF16", (rows, groups))
        made[f"{module}.weight_shape"] = ("I64", (2,))
        if not scheme["symmetric"]:
            made[f"{module}.weight_zero_point"] = ("I32", (-(-rows * scheme["bits"] // 32), groups))
    return made


def _matches(module: str, pattern: str) -> bool:
    """As the packer matches; a pattern that is none (a rule's finding) matches nothing."""
    if not pattern.startswith("re:"):
        return module == pattern
    try:
        return re.match(pattern[3:], module) is not None
    except re.error:
        return False


def dflash_tensors(architecture: Json, target_hidden: int) -> Tensors:
    """Every stored tensor of a block drafter of these sizes, in BF16. Raises Lacking where a size is not given."""
    sizes = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim")
    if any(architecture.get(name) is None for name in sizes):
        raise Lacking([DRAFTER])
    hidden, inner, width = (architecture[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    query, key = architecture["heads"] * width, architecture["kv_heads"] * width
    layer: dict[str, Shape] = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    taps = len(architecture["taps"]) * (architecture.get("target_hidden_size") or target_hidden)
    shapes: dict[str, Shape] = {"fc": (hidden, taps), "hidden_norm": (hidden,), "norm": (hidden,)}
    for index in range(architecture["layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if architecture.get("draft_vocab_size") is not None:
        shapes["lm_head"] = (architecture["draft_vocab_size"], hidden)
    return {f"{name}.weight": ("BF16", shape) for name, shape in shapes.items()}


def drafter(recipe: Json, facts: Mapping[str, ModelFacts], model: TextModel) -> Drafter | None:
    """The served drafter, None without one. Raises Lacking where its headers are not at hand."""
    section = recipe["drafter"]
    if section is None:
        return None
    shape, k = section["architecture"], recipe["serve"]["k"] or 1
    vocabulary = model.vocabulary
    window = section["swa"]["window"] if section["swa"] else None
    if shape["kind"] in ("ngram", "suffix"):
        return Drafter({}, 0, 0, None, 0, 0, False)
    if shape["kind"] == "mtp":
        layers = whole(model.config, "mtp_num_hidden_layers") if model.config.get("mtp_num_hidden_layers") else 1
        if not model.mtp:
            raise Lacking(why="the target's headers hold no MTP head")
        values = layers * 2 * whole(model.config, "num_key_value_heads") * _head_width(model.config)
        return Drafter(model.mtp, count(model.mtp), values, None, k, vocabulary, False)
    tensors, values, bits = _proposer(section, facts, model)
    head = tensors.get("lm_head.weight")
    scheme = section["ptq"]
    stored = packed(tensors, scheme["scheme"], [*scheme["ignore"], "lm_head"]) if scheme else tensors
    rows = head[1][0] if head else vocabulary
    passes = 1 if "taps" in shape else k
    return Drafter(stored, parameters(tensors, bits), values, window, passes, rows, head is not None)


def _proposer(section: Json, facts: Mapping[str, ModelFacts], model: TextModel) -> tuple[Tensors, int, int]:
    """(tensors before the recipe's PTQ, KV numbers a token, bits a code) of a drafter with weights of its own."""
    shape = section["architecture"]
    if section["checkpoint"] is None:
        tensors = dflash_tensors(shape, whole(model.config, "hidden_size"))
        return tensors, shape["layers"] * 2 * shape["kv_heads"] * shape["head_dim"], 4
    if DRAFTER not in facts:
        raise Lacking([DRAFTER])
    config = facts[DRAFTER].text_config
    values = whole(config, "num_hidden_layers") * 2 * whole(config, "num_key_value_heads") * _head_width(config)
    return plain(facts[DRAFTER]), values, _bits(facts[DRAFTER].config or {})


def parameters(tensors: Tensors, bits: int = 4) -> int:
    """Weights that tensors stand for: a packed matrix counts with all its columns, scales and zero points not."""
    total = 0
    for name, (_, shape) in tensors.items():
        part = name.rpartition(".")[2]
        if part in ("weight_packed", "qweight"):
            total += math.prod(shape) * 32 // bits
        elif part not in _COMPANIONS:
            total += math.prod(shape)
    return total


def _bits(config: Mapping[str, Any]) -> int:
    """Bits a code, as a configuration's first group of weights or its `bits` says; 4 where it says nothing."""
    section = _mapping(config.get("quantization_config"))
    groups = list(_mapping(section.get("config_groups")).values())
    weights = _mapping(_mapping(groups[0]).get("weights")) if groups else {}
    bits = weights.get("num_bits") or section.get("bits") or 4
    return bits if bits in (2, 3, 4, 8) else 4


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
