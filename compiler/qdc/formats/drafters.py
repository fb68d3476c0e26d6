"""What a config.json says of a drafter, whoever trained it: kind, draft block, taps, mask token, window, causality.

Two conventions of tap numbers differ by one: z-lab counts layers (tap i is the output of layer i), speculators and
EAGLE-3 count hidden states (state i + 1 is the output of layer i). Taps here are always z-lab's. Reads configurations
only; `dflash` is the reader of what qdc itself writes. Standard library only.

Sources: vLLM 0.32.0's readers of both forms; speculators 0.9.0's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdc.tables import engines

LAYERS, STATES = "layers", "hidden-states"
_KINDS = {
    "XPressDraftModel": "xpress",
    "MedusaModel": "medusa",
    "MLPSpeculatorPreTrainedModel": "mlp-speculator",
}
_NAMES = ("peagle", "eagle3", "eagle", "medusa")
_MOST_LAYERS = 4096
_FULL_FIRST = 28
"""Default of `max_window_layers`."""


@dataclass(frozen=True)
class Drafter:
    """`form`: `z-lab`, `speculators`, or `other`. `convention`: how the file numbers taps; `stored`: the numbers as
    they stand there, `tap_key` their field. `window_layers`: layers that slide. `causal`: None where layers differ or
    nothing says it. `rope`: every setting of the rotary embedding: field -> values, by place. `k`: draft tokens that
    the file itself proposes. `problems`: contradictions inside the file."""

    kind: str
    form: str
    draft_block_size: int | None = None
    taps: list[int] | None = None
    stored: list[int] | None = None
    tap_key: str | None = None
    convention: str | None = None
    mask_token_id: int | None = None
    window: int | None = None
    window_layers: list[int] = field(default_factory=list)
    layers: int | None = None
    causal: bool | None = None
    sample_from_anchor: bool | None = None
    draft_vocab_size: int | None = None
    k: int | None = None
    rope: dict[str, list[Any]] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The kind of drafter that a config.json is of, None where it is an ordinary model's (or none at all)."""
    word = config.get("speculators_model_type")
    if isinstance(word, str) and word:
        return word
    listed = config.get("architectures")
    for name in listed if isinstance(listed, list) else []:
        if not isinstance(name, str):
            continue
        known = engines.architecture(name)
        if known is not None:
            return known.column
        if name in _KINDS:
            return _KINDS[name]
        folded = name.lower().replace("_", "")
        for kind in _NAMES:
            if kind in folded:
                return kind
    family = config.get("model_type")
    return family if family in ("medusa", "eagle", "eagle3") else None


def read_drafter(config: Mapping[str, Any]) -> Drafter | None:
    """A drafter's facts, None where the config is of no drafter. A field of a wrong type is named in `problems`."""
    kind = kind_of(config)
    if kind is None:
        return None
    read = _Reading(config)
    return read.speculators(kind) if "speculators_model_type" in config else read.own(kind)


class _Reading:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def own(self, kind: str) -> Drafter:
        """z-lab's form: fields at the top and in `dflash_config`; EAGLE's: in `eagle_config`."""
        inner: Mapping[str, Any] = {}
        for name in _INNER:
            if not inner and isinstance(self.config.get(name), dict):
                inner = self.config[name]
        key, form = ("target_layer_ids", "z-lab") if inner is self.config.get("dflash_config") else (None, "other")
        if key is None or key not in inner:
            key = next((name for name in _STATE_KEYS if name in inner or name in self.config), key)
        layers = self._whole("num_hidden_layers", self.config)
        window, sliding = self._window(self.config, inner, layers)
        return self._drafter(
            kind,
            form,
            inner,
            key,
            layers=layers,
            window=window,
            window_layers=sliding,
            causal=self._causal(inner, layers, sliding),
            shape=self.config,
            mask_token_id=self._whole("mask_token_id", inner, self.config),
            draft_block_size=self._whole("block_size", self.config, inner),
        )

    def speculators(self, kind: str) -> Drafter:
        """speculators' form: the transformer's own fields are in `transformer_layer_config`."""
        shape = self.config.get("transformer_layer_config")
        if not isinstance(shape, dict):
            self.problems.append("transformer_layer_config is missing")
            shape = {}
        layers = self._whole("num_hidden_layers", shape)
        window, sliding = self._window(shape, {}, layers)
        key = next((name for name in _STATE_KEYS if name in self.config), None)
        causal = self.config.get("sliding_window_non_causal", True)
        return self._drafter(
            kind,
            "speculators",
            {},
            key,
            layers=layers,
            window=window,
            window_layers=sliding,
            causal=(not causal) if isinstance(causal, bool) else None,
            shape=shape,
            mask_token_id=self._whole("mask_token_id", self.config),
            draft_block_size=self._whole("block_size", self.config),
            k=self._proposed(),
        )

    def _drafter(self, kind: str, form: str, inner: Mapping[str, Any], key: str | None, **known: Any) -> Drafter:
        stored = inner.get(key, self.config.get(key)) if key else None
        if stored is not None and not (isinstance(stored, list) and all(type(tap) is int for tap in stored)):
            self.problems.append(f"{key} is not a list of layer numbers")
            stored = None
        shift = 0 if key == "target_layer_ids" else 1
        anchor = self.config.get("sample_from_anchor", inner.get("sample_from_anchor"))
        shape = known["shape"]
        return Drafter(
            kind=kind,
            form=form,
            stored=stored,
            taps=[tap - shift for tap in stored] if stored is not None else None,
            tap_key=key if stored is not None else None,
            convention=(STATES if shift else LAYERS) if stored is not None else None,
            sample_from_anchor=anchor if isinstance(anchor, bool) else None,
            draft_vocab_size=self._whole("draft_vocab_size", self.config, inner),
            rope=rope_of(self.config, shape),
            problems=tuple(self.problems),
            **known,
        )

    def _whole(self, name: str, *places: Mapping[str, Any]) -> int | None:
        """The number in the first place that has it; where two have different ones, a problem."""
        values = [place[name] for place in places if place.get(name) is not None]
        good = [value for value in values if type(value) is int and value >= 0]
        if len(good) != len(values):
            self.problems.append(f"{name} is {next(v for v in values if v not in good)!r}, not a whole number")
        if len(set(good)) > 1:
            self.problems.append(f"{name} is {' and '.join(map(str, dict.fromkeys(good)))}")
        return good[0] if good else None

    def _window(
        self, shape: Mapping[str, Any], inner: Mapping[str, Any], layers: int | None
    ) -> tuple[int | None, list[int]]:
        """(window, layers that slide): all with `use_swa`, else by `layer_types`, else as transformers' Qwen3 makes
        `layer_types`: with `use_sliding_window`, those from `max_window_layers` on."""
        width, second = self._whole("sliding_window", shape), self._whole("swa_window_size", inner)
        count = min(layers or 0, _MOST_LAYERS)
        types = shape.get("layer_types")
        if inner.get("use_swa"):
            sliding = list(range(count))
            width = second if second is not None else width
        elif isinstance(types, list) and types:
            sliding = [number for number, word in enumerate(types[:count]) if word == "sliding_attention"]
            if len(types) != count:
                self.problems.append(f"layer_types names {len(types)} layers, num_hidden_layers is {layers}")
        else:
            first = shape.get("max_window_layers", _FULL_FIRST)
            on = shape.get("use_sliding_window") is True and width is not None and type(first) is int
            sliding = [number for number in range(count) if number >= first] if on else []
        if sliding and shape.get("use_sliding_window") is False:
            self.problems.append("layers slide by layer_types, and use_sliding_window is false")
        if not sliding and second is not None and not inner.get("use_swa"):
            self.problems.append(f"swa_window_size is {second}, and no layer slides")
        if sliding and second is not None and width is not None and second != width:
            self.problems.append(f"sliding_window is {width}, dflash_config.swa_window_size is {second}")
        if sliding and width is None:
            self.problems.append("layers slide, and nothing says how far")
        return (width if sliding else None), sliding

    def _causal(self, inner: Mapping[str, Any], layers: int | None, sliding: Iterable[int]) -> bool | None:
        for place, name in ((self.config, "is_causal"), (inner, "causal")):
            if isinstance(place.get(name), bool):
                return bool(place[name])
        if inner is not self.config.get("dflash_config"):
            return None
        kinds = {number in set(sliding) for number in range(min(layers or 0, _MOST_LAYERS))}
        return kinds.pop() if len(kinds) == 1 else None

    def _proposed(self) -> int | None:
        section = self.config.get("speculators_config")
        methods = section.get("proposal_methods") if isinstance(section, dict) else None
        for method in methods if isinstance(methods, list) else []:
            if isinstance(method, dict) and type(method.get("speculative_tokens")) is int:
                return int(method["speculative_tokens"])
        return None


_INNER = ("dflash_config", "eagle_config")
_STATE_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_ROPE = ("rope_theta", "rope_type", "partial_rotary_factor", "factor", "original_max_position_embeddings",
         "mrope_section")  # fmt: skip


def rope_of(*configs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Every setting of the rotary embedding in these configurations: field -> its values in order, each once."""
    found: dict[str, list[Any]] = {}
    for place in _places(configs):
        for name in _ROPE:
            value = place.get(name)
            if value is not None and value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: values for name, values in found.items() if values}


def _places(configs: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for config in configs:
        yield config
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(config.get(key), dict):
                yield config[key]
