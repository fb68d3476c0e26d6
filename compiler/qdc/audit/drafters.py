"""Facts of a drafter: kind, draft block, taps and their convention, mask token, rotary embedding, window, causality.

Its config.json is compared with its own weights and with the target's: taps against `fc`, rows against rows. It knows
no claim; what the engine is told is compared by the caller.
"""

from __future__ import annotations

import re

from qdc.audit.evidence import Evidence, Fact, Findings, Look, reason
from qdc.audit.models import Model
from qdc.core.errors import QdcError
from qdc.formats.drafters import STATES, Drafter, read_drafter

_ARCHITECTURE = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_BLOCKS = ("dflash", "dflash2", "dspark", "lilicorr", "xpress")
"""Kinds that draft a block at once."""
_METHODS = {"dflash": ("dflash", "dflash2", "lilicorr", "xpress"), "eagle3": ("eagle3", "peagle"), "eagle": ("eagle",)}
"""vLLM's `method` -> the kinds that it serves; the class in the drafter's config.json decides."""
_WINDOW = re.compile(r"\w*(?:SWA|SLIDING|WINDOW)\w*=.*[1-9]")


def drafter_facts(look: Look, folder: str, target: Model | None, findings: Findings) -> None:
    """Facts under `drafter.`; on bytes that cannot be read, the prefix is marked unread."""
    try:
        model = Model(look, folder)
        if model.config is None or not model.readers:
            findings.unread["drafter."] = f"{folder} lacks config.json or weights"
            return
        model.whole()
        read = read_drafter(model.config)
        if read is None:
            text = "an ordinary model, which drafts token by token"
            findings.facts["drafter.kind"] = Fact("draft-model", [model.setting("architectures", text)])
            _stored(model, findings)
            return
        _kind(model, read, findings)
        _block(model, read, findings)
        _taps(model, read, target, findings)
        _shape(model, read, findings)
        _vocabulary(model, read, target, findings)
        _window(model, read, findings)
        _stored(model, findings)
    except QdcError as error:
        findings.unread["drafter."] = reason(error)


def _stored(model: Model, findings: Findings) -> None:
    """How the weights are stored: files, scheme, mask."""
    model.files("drafter", findings)
    model.scheme("drafter.ptq.scheme", findings)
    model.convention("drafter.ptq", findings)
    model.mask("drafter.ptq", findings, patterns_id="drafter.ptq.ignore")
    if not model.facts.quantized:
        evidence = findings.facts["drafter.ptq.scheme.bits"].evidence
        findings.facts["drafter.ptq"] = Fact(None, evidence, model.problems[:3])


def kind_of_method(method: str, stored: str | None) -> str:
    """The kind of drafter that the engine serves by `method` where a drafter of kind `stored` lies."""
    if stored in _METHODS.get(method, ()):
        return str(stored)
    return "mtp" if method.endswith("_mtp") else method.replace("_", "-")


def plugin_window(look: Look, findings: Findings) -> None:
    """Leaves the window undecided where a plugin of the engine is installed and a variable names one.

    A published entry gave its window to a plugin in this way, and its drafter's config.json has none.
    """
    plugins, window = findings.facts.get("packages.plugins"), findings.facts.get("drafter.swa.window")
    listed = look.image.settings.get("Env")
    named = [item for item in (listed if isinstance(listed, list) else []) if _WINDOW.fullmatch(str(item))]
    if plugins is None or window is None or not named:
        return
    text = f"a plugin of the engine may set the window: ENV {named[0][:80]}"
    rows = [*window.evidence, look.configuration(text), *plugins.evidence[:3]]
    findings.facts["drafter.swa.window"] = Fact(window.value, rows, window.problems, lambda _: [], False)


def largest_k(findings: Findings) -> int | None:
    """Tokens that the drafter found in `findings` can draft at most: its block without the anchor, unless that drafts
    too."""
    kind, block = findings.facts.get("drafter.kind"), findings.facts.get("drafter.architecture.draft_block_size")
    if kind is None or block is None or kind.value not in _BLOCKS or type(block.value) is not int:
        return None
    anchor = findings.facts.get("drafter.architecture.sample_from_anchor")
    return block.value if kind.value == "dspark" or (anchor is not None and anchor.value) else block.value - 1


def _kind(model: Model, read: Drafter, findings: Findings) -> None:
    name = "speculators_model_type" if read.form == "speculators" else "architectures"
    listed = (model.config or {}).get(name)
    findings.facts["drafter.kind"] = Fact(read.kind, [model.setting(name, _short(listed))], list(read.problems))
    findings.facts["drafter.format"] = Fact(read.form, [model.setting(name, f"config.json in {read.form}'s form")])


def _short(listed: object) -> str:
    return str(listed[0]) if isinstance(listed, list) and listed else str(listed)


def _block(model: Model, read: Drafter, findings: Findings) -> None:
    block, mask = read.draft_block_size, read.mask_token_id
    if block is not None or read.kind in _BLOCKS:
        row = model.setting("block_size", f"config.json: draft block {block}")
        findings.facts["drafter.architecture.draft_block_size"] = Fact(block, [row])
    if mask is not None or read.kind in _BLOCKS:
        row = model.setting("mask_token_id", f"mask token {mask}")
        findings.facts["drafter.architecture.mask_token_id"] = Fact(mask, [row])
    if read.sample_from_anchor is not None:
        row = model.setting("sample_from_anchor", f"config.json: sample_from_anchor {read.sample_from_anchor}")
        findings.facts["drafter.architecture.sample_from_anchor"] = Fact(read.sample_from_anchor, [row])
    if read.k is not None:
        row = model.setting("speculative_tokens", f"config.json proposes K {read.k}")
        findings.facts["drafter.proposed_k"] = Fact(read.k, [row])


def _taps(model: Model, read: Drafter, target: Model | None, findings: Findings) -> None:
    """Taps in z-lab's convention, whichever the file uses, against the inputs of `fc` and the target's layers."""
    if read.taps is None:
        if read.kind in _BLOCKS or read.kind == "eagle3":
            findings.unread["drafter.architecture.taps"] = "config.json names no taps: the engine's default holds"
        return
    taps, problems = read.taps, []
    columns = model.matrix("fc")[1]
    wide = _wide(model, target)
    if columns is not None and wide is not None and columns != len(taps) * wide:
        problems.append(f"fc takes {columns} inputs, {len(taps)} taps of {wide} make {len(taps) * wide}")
    layers = target.text_config.get("num_hidden_layers") if target is not None else None
    if taps != sorted(set(taps)):
        problems.append(f"taps {taps} do not rise")
    if taps and (min(taps) < 0 or (type(layers) is int and max(taps) >= layers)):
        problems.append(f"taps {taps} leave the target's layers 0..{layers - 1 if type(layers) is int else '?'}")
    shifted = f"{read.tap_key} {read.stored} count hidden states: " if read.convention == STATES else ""
    evidence = [model.setting(str(read.tap_key), f"config.json: {shifted}taps {taps}")]
    if columns is not None:
        name = "fc.weight_shape" if "fc" in model.facts.quantized else "fc.weight"
        evidence.append(model.tensor(name, f"fc: {columns} inputs = {len(taps)} taps"))
    elif read.kind in _BLOCKS:
        problems.append("the weights have no fc")
    findings.facts["drafter.architecture.taps"] = Fact(taps, evidence, problems)
    text = f"{read.tap_key} counts {'hidden states, taps are one less' if shifted else 'layers'}"
    findings.facts["drafter.architecture.convention"] = Fact(read.convention, [model.setting(str(read.tap_key), text)])


def _wide(model: Model, target: Model | None) -> int | None:
    """Width of one tap: the target's hidden size, else what the drafter says of it."""
    inner = (model.config or {}).get("transformer_layer_config")
    own = [model.config or {}, inner if isinstance(inner, dict) else {}]
    places = [(target.text_config, "hidden_size")] if target is not None else []
    places += [(place, name) for name in ("target_hidden_size", "hidden_size") for place in own]
    return next((int(place[name]) for place, name in places if type(place.get(name)) is int), None)


def _shape(model: Model, read: Drafter, findings: Findings) -> None:
    stored = {
        name.split("layers.")[1].split(".")[0]
        for name in (*model.facts.quantized, *model.facts.plain)
        if name.startswith(("layers.", "model.layers."))
    }
    rows = model.matrix("fc")[0]
    mlp = model.matrix("layers.0.mlp.gate_proj")[0]
    for field, key in _ARCHITECTURE.items():
        value = read.shape.get(key)
        if value is None:
            continue
        trouble = []
        if field == "layers" and stored and value != len(stored):
            trouble.append(f"config.json says {value} layers, the weights have {len(stored)}")
        if field == "hidden_size" and rows is not None and rows != value:
            trouble.append(f"config.json says {value}, fc has {rows} outputs")
        if field == "intermediate_size" and mlp is not None and mlp != value:
            trouble.append(f"config.json says {value}, gate_proj has {mlp} outputs")
        row = model.setting(key, f"config.json: {key} {value}")
        findings.facts[f"drafter.architecture.{field}"] = Fact(value, [row], trouble)
    for name in ("rope_theta", "partial_rotary_factor"):
        values = read.rope.get(name)
        if values:
            spread = [f"{name} has several values: {values}"] if len(values) > 1 else []
            row = model.setting(name, f"config.json: {name} {values[0]}")
            findings.facts[f"drafter.architecture.{name}"] = Fact(values[0], [row], spread)


def _vocabulary(model: Model, read: Drafter, target: Model | None, findings: Findings) -> None:
    """The drafter's vocabulary against the target's; a smaller head needs its map of ids; the mask needs a row."""
    own = read.shape.get("vocab_size")
    rows = target.rows() if target is not None else None
    if type(own) is int:
        trouble = [f"the drafter has {own} tokens, the target {rows}"] if rows is not None and rows != own else []
        row = model.setting("vocab_size", f"config.json: vocab_size {own}")
        findings.facts["drafter.vocab_size"] = Fact(own, [row], trouble)
    mask = findings.facts.get("drafter.architecture.mask_token_id")
    limit = rows if rows is not None else own if type(own) is int else None
    if mask is not None and mask.value is not None and limit is not None and mask.value >= limit:
        mask.problems.append(f"mask token {mask.value} has no row: there are {limit}")
    small = read.draft_vocab_size
    if small is None:
        return
    row = model.setting("draft_vocab_size", f"config.json: draft_vocab_size {small}")
    fact = findings.facts["drafter.architecture.draft_vocab_size"] = Fact(small, [row])
    if limit is not None and small < limit:
        heads = {model.shape(name) for name in model.where if name.endswith("lm_head.weight")}
        if not any(shape and shape[0] == small for shape in heads):
            fact.problems.append(f"the weights have no head of {small} rows")
        if not any(name.rpartition(".")[2] == "d2t" for name in model.where):
            fact.problems.append("the weights have no map of ids (d2t)")


def _window(model: Model, read: Drafter, findings: Findings) -> None:
    window, sliding, layers = read.window, read.window_layers, read.layers or 0
    problems = [text for text in read.problems if "slid" in text or "layer_types" in text or "window" in text]
    if sliding and len(sliding) != layers:
        problems.append(f"only layers {sliding} of {layers} have the window")
    text = f"config.json: window {window}, layers {sliding}" if sliding else "config.json: every layer sees everything"
    field = "sliding_window" if sliding else "layer_types"
    evidence: list[Evidence] = [model.setting(field, text)]
    findings.facts["drafter.swa.window"] = Fact(window, evidence, problems)
    if sliding and read.causal is not None:
        text = "the window looks back only" if read.causal else "not causal: the window is symmetric for each query"
        field = "sliding_window_non_causal" if read.form == "speculators" else "causal"
        semantics = "causal" if read.causal else "symmetric-per-query"
        findings.facts["drafter.swa.semantics"] = Fact(semantics, [model.setting(field, text)])
    if read.causal is not None and read.kind in _BLOCKS:
        field = "sliding_window_non_causal" if read.form == "speculators" else "causal"
        row = model.setting(
            field, f"as the engine reads it: {'causal' if read.causal else 'every slot sees its block'}"
        )
        findings.facts["drafter.causal"] = Fact(read.causal, [row])
