"""Facts of the files that turn text into tokens and end answers: tokenizer, templates, generation settings, EOS sets.

Places that should agree on the tokens that end an answer are laid beside each other. Templates are read as text and
never rendered; which settings an engine takes is for the caller.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from qdc.audit.evidence import TOO_MUCH, Claim, Evidence, Fact, Findings, Look, reason
from qdc.audit.models import Model
from qdc.core.errors import QdcError
from qdc.formats import ranges

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
               "special_tokens_map.json", "added_tokens.json")  # fmt: skip
_GENERATION, _SETTINGS = "generation_config.json", "tokenizer_config.json"
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_ENDS = re.compile(r"<\|(?:im_end|eot_id|end|end_of_turn|endoftext|eom_id)\|>|<end_of_turn>|</s>|eos_token")
"""What ends a turn in the templates of published models."""
MAX_TOKENIZER = 64 << 20
_SPARING = 1 << 17


def text_facts(look: Look, model: Model, findings: Findings) -> None:
    """Facts `target.eos`, `target.tokenizer`, `target.chat_template`, `target.generation`."""
    folder = model.folder
    documents: dict[str, Mapping[str, Any]] = {}
    for name in (_GENERATION, _SETTINGS, "tokenizer.json"):
        if _too_large(look, f"{folder}/{name}"):
            findings.unread[f"target.files[{name}]"] = TOO_MUCH
            continue
        try:
            documents[name] = look.json(f"{folder}/{name}") or {}
        except QdcError as error:
            findings.unread[f"target.files[{name}]"] = reason(error)
    _tokenizer(look, folder, findings)
    templates = _templates(look, folder, documents.get(_SETTINGS, {}), findings)
    generation = {name: value for name, value in documents.get(_GENERATION, {}).items() if name in _SAMPLING}
    if generation:
        row = look.at(f"{folder}/{_GENERATION}", "sampling that the engine takes where a request gives none")
        findings.facts["target.generation"] = Fact(generation, [row])
    _ends(look, model, documents, templates, findings)


def _too_large(look: Look, path: str) -> bool:
    """Whether a file is not read where each byte is fetched."""
    entry = look.image.find(path) if look.sparing else None
    return entry is not None and entry.size > _SPARING


def _tokenizer(look: Look, folder: str, findings: Findings) -> None:
    rows, value = [], {}
    for name in _TOKENIZERS:
        path = f"{folder}/{name}"
        if look.image.find(path) is None:
            continue
        reader = look.image.open(path)
        if reader.size > MAX_TOKENIZER or _too_large(look, path):
            why = TOO_MUCH if look.sparing else f"{reader.size} bytes are too many for a tokenizer"
            findings.unread[f"target.files[{name}]"] = why
            continue
        value[name] = f"sha256:{ranges.sha256(reader)}"
        rows.append(look.at(path, value[name], show="| sha256sum"))
    if value:
        findings.facts["target.tokenizer"] = Fact(value, rows)


def _templates(look: Look, folder: str, settings: Mapping[str, Any], findings: Findings) -> dict[str, str]:
    """Where templates are -> their text: files, and those inside tokenizer_config.json."""
    texts: dict[str, str] = {}
    rows: list[Evidence] = []
    for name in sorted(name for name in look.folder(folder) if name.endswith(".jinja") and name.count("/") < 2):
        data = look.image.read(f"{folder}/{name}")
        texts[name] = data.decode("utf-8", "replace")
        rows.append(look.at(f"{folder}/{name}", f"sha256:{hashlib.sha256(data).hexdigest()}", show="| sha256sum"))
    inside = settings.get("chat_template")
    listed = inside if isinstance(inside, list) else [{"name": "", "template": inside}]
    for item in listed:
        if isinstance(item, dict) and isinstance(item.get("template"), str):
            name = f"{_SETTINGS}:{item.get('name')}" if item.get("name") else _SETTINGS
            texts[name] = item["template"]
            rows.append(look.spot(f"{folder}/{_SETTINGS}", b'"chat_template"', f"a template inside {_SETTINGS}"))
    if texts:
        value = {name: f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" for name, text in texts.items()}
        findings.facts["target.chat_template"] = Fact(value, rows)
    return texts


def _ends(
    look: Look, model: Model, documents: Mapping[str, Mapping[str, Any]], templates: Mapping[str, str],
    findings: Findings,
) -> None:  # fmt: skip
    """`target.eos`: every place that names tokens which end an answer, and where they disagree."""
    config, inner = model.config or {}, model.text_config
    given = {_GENERATION: _ids(documents.get(_GENERATION, {})), "config.json": _ids(config)}
    if inner is not config:
        given["text_config"] = _ids(inner)
    token, ids = _eos_token(documents), _special(documents.get("tokenizer.json", {}))
    turn = {ids[text] for template in templates.values() for text in _ending(template, token) if text in ids}
    own = {ids[token]} if token in ids else set()
    rows = [_row(look, model, place, values) for place, values in given.items() if values]
    if own:
        rows.append(look.spot(f"{model.folder}/{_SETTINGS}", b'"eos_token"', f"eos_token {token}: {sorted(own)}"))
    for place, template in templates.items():
        ends = _ending(template, token)
        if ends:
            text = f"{place} ends turns with {', '.join(ends)}"
            rows.append(look.at(f"{model.folder}/{place.partition(':')[0]}", text))
    said = set().union(*given.values())
    if not said and not own:
        return
    problems = _disagreements(given, own, turn)
    total = model.rows()
    beyond = sorted(id for id in said if total is not None and id >= total)
    if beyond:
        problems.append(f"token {beyond[0]} has no row: the embedding has {total}, so no answer ends with it")
        findings.claims.append(Claim("target.eos", sorted(said), "qdc"))
    findings.facts["target.eos"] = Fact(sorted(said), rows, problems, _as_set(said))
    for name, place in (("generation_config", _GENERATION), ("config", "config.json")):
        values = given[place] or given.get("text_config", set()) if name == "config" else given[place]
        if values:
            evidence = [_row(look, model, place, values)]
            findings.facts[f"target.eos.{name}"] = Fact(sorted(values), evidence, accepts=_as_set(values))


def _disagreements(given: Mapping[str, set[int]], own: set[int], turn: set[int]) -> list[str]:
    generation = given[_GENERATION]
    problems = []
    for place, values in given.items():
        missing = sorted(values - generation)
        if generation and missing:
            problems.append(f"{place} ends answers at {missing[0]}, {_GENERATION} at {sorted(generation)}")
    said = set().union(*given.values())
    if said and own - said:
        problems.append(f"the tokenizer's eos_token is {sorted(own)}, answers end at {sorted(said)}")
    if said and turn and not turn & (said | own):
        problems.append(f"the chat template ends turns with {sorted(turn)}, answers end at {sorted(said)}")
    return problems


def _as_set(values: set[int]) -> Any:
    def against(claimed: Any) -> list[str]:
        wanted = claimed if isinstance(claimed, list) else [claimed]
        same = all(type(id) is int for id in wanted) and set(wanted) == values
        return [] if same else [f"the bytes say {sorted(values)}, not {wanted}"]

    return against


def _row(look: Look, model: Model, place: str, values: set[int]) -> Evidence:
    path = f"{model.folder}/{_GENERATION if place == _GENERATION else 'config.json'}"
    return look.spot(path, b'"eos_token_id"', f"{place}: eos_token_id {sorted(values)}")


def _ids(document: Mapping[str, Any]) -> set[int]:
    value = document.get("eos_token_id")
    return {id for id in (value if isinstance(value, list) else [value]) if type(id) is int}


def _eos_token(documents: Mapping[str, Mapping[str, Any]]) -> str:
    token = documents.get(_SETTINGS, {}).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _special(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Text -> id of the added tokens of a tokenizer.json."""
    listed = tokenizer.get("added_tokens")
    return {
        str(item["content"]): item["id"]
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, dict) and type(item.get("id")) is int and "content" in item
    }


def _ending(template: str, token: str) -> list[str]:
    """Tokens with which a template ends turns, as far as its text shows: the last of the known ones in it."""
    found = [token if text == "eos_token" else text for text in _ENDS.findall(template[: 1 << 20])]
    return [text for text in dict.fromkeys(found) if text and text != "<|endoftext|>"]
