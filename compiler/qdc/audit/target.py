"""Facts of the target beside its grid: class, lengths, rotary embedding, output head, MTP head.

From config.json and tensor names; what the engine then makes of them is not known here.
"""

from __future__ import annotations

import re

from qdc.audit.evidence import Fact, Findings, Look, reason
from qdc.audit.models import Model
from qdc.core.errors import QdcError
from qdc.formats import drafters


def target_facts(look: Look, folder: str, findings: Findings) -> Model | None:
    """Facts under `target.`; what cannot be read is marked unread."""
    try:
        model = Model(look, folder)
        if model.config is None or not (model.readers or model.names):
            findings.unread["target.quantization."] = f"{folder} lacks config.json or weights"
            return None
        model.files("target", findings)
        _configuration(model, findings)
        if not model.readers:
            findings.unread["target.quantization."] = f"{folder} holds no safetensors file"
            return None
        model.whole()
        model.scheme("target.quantization.scheme", findings)
        model.convention("target.quantization", findings)
        model.mask("target.quantization", findings, patterns_id="target.quantization.ignore")
        _head(model, findings)
        _mtp(model, findings)
    except QdcError as error:
        findings.unread["target.quantization."] = reason(error)
        return None
    return model


def _configuration(model: Model, findings: Findings) -> None:
    """Class, lengths, rotary embedding: as config.json says; the engine takes them from there."""
    config, text = model.config or {}, model.text_config
    listed = config.get("architectures")
    if isinstance(listed, list):
        findings.facts["target.architecture"] = Fact(listed, [model.setting("architectures", f"config.json: {listed}")])
    for name in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "sliding_window"):
        if text.get(name) is not None:
            row = model.setting(name, f"config.json: {name} {text[name]}")
            findings.facts[f"target.{name}"] = Fact(text[name], [row])
    rows, said = model.rows(), text.get("vocab_size")
    if rows is not None and type(said) is int and rows != said:
        findings.facts["target.vocab_size"].problems.append(f"the embedding has {rows} rows, config.json says {said}")
    rope = drafters.rope_of(config, text) if text is not config else drafters.rope_of(text)
    if rope:
        spread = [f"{name} has several values: {values}" for name, values in rope.items() if len(values) > 1]
        value = {name: values[0] for name, values in rope.items()}
        findings.facts["target.rope"] = Fact(value, [model.setting("rope_theta", f"config.json: {value}")], spread)


def _head(model: Model, findings: Findings) -> None:
    """`target.head`: `own`, `tied`, `missing`, or `default` where config.json leaves it to the model's class."""
    config, inner = model.config or {}, model.text_config
    own = [name for name in model.where if name.rpartition(".")[0].rpartition(".")[2] == "lm_head"]
    tied = config.get("tie_word_embeddings")
    row = model.setting("tie_word_embeddings", f"config.json: tie_word_embeddings {tied}; {len(own)} tensors of a head")
    problems = []
    if own:
        value = "own"
    elif tied is True:
        value = "tied"
    elif tied is None and inner is not config and inner.get("tie_word_embeddings") is True:
        value = "missing"
        problems.append("no output head is stored, and only text_config says that it is the embedding")
    elif tied is None:
        value = "default"
    else:
        value = "missing"
        problems.append("no output head is stored, and config.json says that it is not the embedding")
    findings.facts["target.head"] = Fact(value, [row], problems)


def _mtp(model: Model, findings: Findings) -> None:
    """`target.mtp`: layers of the target's own multi-token-prediction head, stored and promised."""
    promised = model.text_config.get("mtp_num_hidden_layers", (model.config or {}).get("mtp_num_hidden_layers"))
    stored = [name for name in model.where if re.search(r"(^|\.)mtp\.", name)]
    layers = {match[1] for name in stored if (match := re.search(r"mtp\.layers\.(\d+)\.", name))}
    if not stored and not promised:
        return
    text = f"{len(stored)} tensors of an MTP head; config.json promises {promised} layers"
    row = model.tensor(stored[0], text) if stored else model.setting("mtp_num_hidden_layers", text)
    problems = ["config.json promises an MTP head that the files lack"] if promised and not stored else []
    findings.facts["target.mtp"] = Fact(len(layers) if stored else 0, [row], problems)
