"""What a published checkpoint's headers and JSON files say: the facts that rules and plans need, without a weight.

A Hugging Face folder: config.json, generation_config.json, safetensors headers, the index of shards, tokenizer
files. Standard library only. It reads what is there and judges nothing: what is wrong with it is for rules to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats.ranges import FileRange, RangeReader
from qdc.formats.safetensors import read_header

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a safetensors header; `file`: the shard that holds it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TokenizerFacts:
    """`size`: rows that its ids need (largest id + 1); `special`: id -> text of special tokens; `eos`: id of its
    `eos_token`; `template`: SHA-256 of its chat template, or None."""

    size: int
    special: dict[int, str] = field(default_factory=dict)
    eos: int | None = None
    template: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """`config`, `generation_config`: parsed, or None where there is no such file. `tensors`: name -> facts.

    `weight_map`: tensor name -> shard, of the index, or None. `shards`: the *.safetensors files that are there.
    `broken`: file -> why it cannot be read (a cut download, a header that is no JSON).
    `licence`: the identifier that its README's front matter gives, lower case, or None.
    """

    config: dict[str, Any] | None
    generation_config: dict[str, Any] | None = None
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    weight_map: dict[str, str] | None = None
    shards: tuple[str, ...] = ()
    broken: dict[str, str] = field(default_factory=dict)
    tokenizer: TokenizerFacts | None = None
    licence: str | None = None

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the text model: `text_config` where there is one, else the top level."""
        config = self.config or {}
        inner = config.get("text_config")
        return inner if isinstance(inner, dict) else config

    def as_json(self) -> dict[str, Any]:
        """A JSON value, tensors in rows; `from_json` reads it back."""
        value = asdict(self)
        value["tensors"] = {name: [t.file, t.dtype, list(t.shape)] for name, t in self.tensors.items()}
        if self.tokenizer is not None:
            value["tokenizer"]["special"] = {str(id): text for id, text in self.tokenizer.special.items()}
        value["shards"] = list(self.shards)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFacts:
        """What `as_json` gave. Raises KeyError, TypeError or ValueError on anything else."""
        tokenizer = value["tokenizer"]
        if tokenizer is not None:
            tokenizer = TokenizerFacts(
                **{**tokenizer, "special": {int(id): text for id, text in tokenizer["special"].items()}}
            )
        tensors = {
            name: TensorFacts(file, dtype, tuple(shape)) for name, (file, dtype, shape) in value["tensors"].items()
        }
        return cls(**{**value, "tensors": tensors, "tokenizer": tokenizer, "shards": tuple(value["shards"])})


def read_folder(folder: Path) -> ModelFacts:
    """Facts of a checkpoint folder. Raises QdcError where a JSON file is not readable JSON."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    small = {name: path.read_bytes() for name, path in files.items() if name.endswith((".json", ".jinja", ".md"))}
    weights = {name: FileRange(path) for name, path in files.items() if name.endswith(".safetensors")}
    return read_facts(small, weights, str(folder))


def read_facts(small: Mapping[str, bytes], weights: Mapping[str, RangeReader], what: str) -> ModelFacts:
    """Facts from the bytes of the small files and readers of the safetensors files; `what`: for errors."""
    documents = {name: _json(raw, f"{what}/{name}") for name, raw in small.items() if name.endswith(".json")}
    tensors: dict[str, TensorFacts] = {}
    broken: dict[str, str] = {}
    for name, reader in sorted(weights.items()):
        try:
            header = read_header(reader, name)
        except QdcError as error:
            broken[name] = error.message
            continue
        for tensor, facts in sorted(header.tensors.items()):
            tensors[tensor] = TensorFacts(name, facts.dtype, facts.shape)
    index = documents.get(INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    return ModelFacts(
        config=_mapping(documents.get("config.json")),
        generation_config=_mapping(documents.get("generation_config.json")),
        tensors=tensors,
        weight_map=dict(weight_map) if isinstance(weight_map, dict) else None,
        shards=tuple(sorted(weights)),
        broken=broken,
        tokenizer=_tokenizer(documents, small),
        licence=_licence(small.get("README.md", b"")),
    )


def _json(raw: bytes, what: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise QdcError("checkpoint.json", f"{what} is not JSON: {error}", exit_code=COULD_NOT) from None


def _mapping(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _tokenizer(documents: Mapping[str, Any], small: Mapping[str, bytes]) -> TokenizerFacts | None:
    """From tokenizer.json (its model's vocabulary and added tokens) and tokenizer_config.json."""
    whole, settings = documents.get("tokenizer.json"), documents.get("tokenizer_config.json") or {}
    if not isinstance(whole, dict):
        return None
    vocabulary = (whole.get("model") or {}).get("vocab") or {}
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {row[0]: id for id, row in enumerate(vocabulary)}
    added = {token["content"]: token for token in whole.get("added_tokens") or []}
    ids |= {text: token["id"] for text, token in added.items()}
    special = {token["id"]: text for text, token in added.items() if token.get("special")}
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    template = small.get("chat_template.jinja")
    if template is None and isinstance(settings.get("chat_template"), str):
        template = settings["chat_template"].encode()
    return TokenizerFacts(
        size=max(ids.values(), default=-1) + 1,
        special=dict(sorted(special.items())),
        eos=ids.get(eos) if isinstance(eos, str) else None,
        template=hashlib.sha256(template).hexdigest() if template is not None else None,
    )


def _licence(readme: bytes) -> str | None:
    """`license:` of the front matter (the block between two `---` lines at the top)."""
    lines = readme.decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        name, mark, value = line.partition(":")
        if mark and name.strip() == "license":
            return value.strip().strip("\"'").lower() or None
    return None
