"""vLLM's own precedence: from the words of its command and a `--config` file to its effective arguments.

Argument over `--config` file over default; of a repeated argument the last wins; `vllm serve MODEL` and `--model`;
JSON arguments also as `--name.key value`. Read in the argument parsers of vLLM 0.22.0 to 0.32.0, which agree where
this module says what is known. An unknown word may hold any argument: what stands before it is then not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from qdc.audit.shell_state import Place, Value, unknown

SWITCHES = {
    "enforce-eager", "trust-remote-code", "enable-prefix-caching", "enable-chunked-prefill", "language-model-only",
    "disable-log-requests", "disable-log-stats", "skip-mm-profiling", "enable-auto-tool-choice", "async-scheduling",
    "disable-custom-all-reduce", "enable-expert-parallel", "headless", "enable-log-requests", "skip-tokenizer-init",
    "enable-sleep-mode", "calculate-kv-scales", "disable-sliding-window", "disable-cascade-attn", "enable-lora",
    "allow-credentials", "disable-uvicorn-access-log", "enable-request-id-headers", "return-tokens-as-token-ids",
}  # fmt: skip
SHORT = {"-sc": "speculative-config", "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size",
         "-dp": "data-parallel-size", "-q": "quantization", "-cc": "compilation-config"}  # fmt: skip
# Names that an abbreviation could mean (argparse takes a unique beginning for the whole).
WHOLE = {
    "model", "max-model-len", "max-num-seqs", "dtype", "speculative-config", "spec-method", "spec-model", "spec-tokens",
    "chat-template", "enable-prefix-caching", "no-enable-prefix-caching", "kv-cache-dtype", "quantization", "tokenizer",
    "max-num-batched-tokens", "gpu-memory-utilization", "tensor-parallel-size", "served-model-name", "host", "port",
    "config", "enforce-eager", "block-size", "revision", "seed", "load-format", "runner", "task", "hf-overrides",
    "model-impl", "tokenizer-mode", "compilation-config", "attention-backend", "mamba-cache-mode", "mamba-block-size",
    "trust-remote-code", "language-model-only", "skip-mm-profiling", "enable-chunked-prefill", "no-enforce-eager",
    "cudagraph-capture-sizes", "uvicorn-log-level", "api-key", "mamba-cache-dtype", "mamba-ssm-cache-dtype",
}  # fmt: skip
SINGLE_LETTERS = re.compile(r"-O.*")
MAX_CONFIG = 256 << 10
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


@dataclass(frozen=True)
class Setting:
    """One argument. `value`: text, True for a switch, texts for several words, an object where it is JSON; None where

    it is not known. `source`: the word that gave it, with what it beat.
    """

    value: Any
    source: Value

    @property
    def known(self) -> bool:
        return self.source.known


@dataclass
class Effective:
    """Arguments by name without dashes; `rest`: why an argument that is not here is not known either."""

    settings: dict[str, Setting] = field(default_factory=dict)
    rest: Value | None = None
    problems: list[str] = field(default_factory=list)

    def get(self, name: str) -> Setting | None:
        """The setting; one of unknown value where something unknown may hold it; None: the engine's default."""
        found = self.settings.get(name)
        if found is None and self.rest is not None:
            return Setting(None, self.rest)
        return found


def effective(form: str, words: tuple[Value, ...], read: Callable[[Value], Value | None]) -> Effective:
    """The arguments in force. `form`: `serve` or `api_server`; `read`: the text of a file, None if there is none."""
    result = Effective()
    words = _model_first(form, list(words), result)
    items = _items(words, result)
    wild = result.rest
    if result.problems and wild is not None:
        items = [(name, None, wild.over(source)) for name, _, source in items]
    below = _configured(words, read, result)
    if wild is not None:
        below = [(name, None, wild.over(source)) for name, _, source in below]
    for name, value, source in below + items:
        before = result.settings.get(name)
        result.settings[name] = Setting(value, source.over(before.source if before else None))
        _opposite(name, result)
    _dotted(result)
    _speculation(result)
    return result


def _model_first(form: str, words: list[Value], result: Effective) -> tuple[Value, ...]:
    """`vllm serve MODEL ..` as `--model MODEL ..`, where the engine takes it so."""
    if form != "serve":
        return tuple(words)
    given = [number for number, word in enumerate(words) if re.match(r"--model(=|$)", word.text or word.prefix)]
    first = words[0] if words else None
    positional = first is not None and not (first.text or first.prefix or "x").startswith("-")
    if positional and first is not None and (first.known or not first.many):
        if given:
            twice = "a model is given as a word and by --model, which the engine refuses or reads in its own way"
            result.problems.append(twice)
            result.rest = unknown(first.place, twice)
        return (Value("--model", first.place), *words)
    return tuple(words)


def _items(words: tuple[Value, ...], result: Effective) -> list[tuple[str, Any, Value]]:
    """(name, value, source) in order. After a word that may hold anything, what came before is not known."""
    found: list[tuple[str, Any, Value]] = []
    number = 0
    while number < len(words):
        word = words[number]
        number += 1
        text = word.text
        if text is None:
            match = re.match(r"--([\w.-]+)=", word.prefix)
            if match and not word.many:
                found.append((_named(match[1]), None, replace(word, prefix="")))
                continue
            result.rest = word
            found = [(name, None, replace(word, prefix="", many=False).over(source)) for name, _, source in found]
            continue
        if text == "--":
            break
        name, value = _name(text)
        if name is None:
            if found or text:
                result.problems.append(f"the word {text[:60]!r} belongs to no argument")
            continue
        source = word
        values: list[Value] = []
        if value is not None:
            source = replace(word, text=value)
            values = [source]
        elif name not in SWITCHES and not name.startswith("no-"):
            while number < len(words) and _is_value(words[number]) and (not values or _several(name)):
                values.append(words[number])
                number += 1
        if values:
            source = values[0] if len(values) == 1 else replace(values[0], text=" ".join(v.text or "" for v in values))
            lost = next((item for item in values if not item.known), None)
            if lost is not None:
                found.append((name, None, replace(lost, prefix="", many=False)))
                if lost.many:
                    result.rest = lost
                    found = [(n, None, replace(lost, prefix="", many=False).over(s)) for n, _, s in found]
                continue
        opened = True if not values else source.text if len(values) == 1 else [item.text for item in values]
        found.append((name, opened, source))
        for whole in WHOLE if name not in WHOLE and name not in SWITCHES else ():
            if whole.startswith(name) and len(name) > 1:
                found.append((whole, None, unknown(word.place, f"--{name} may stand for --{whole}")))
    return found


def _name(text: str) -> tuple[str | None, str | None]:
    """(name, value after `=`) of a word; (None, None) for one that is no argument."""
    if text.startswith("--") and len(text) > 2:
        name, equals, value = text[2:].partition("=")
        return _named(name), value if equals else None
    head, equals, value = text.partition("=")
    if head in SHORT:
        return SHORT[head], value if equals else None
    if SINGLE_LETTERS.fullmatch(text):
        return "optimization-level", text[2:].removeprefix("=") or None
    if re.fullmatch(r"-[A-Za-z].*", text):
        return head, value if equals else None
    return None, None


def _named(name: str) -> str:
    head, dot, rest = name.partition(".")
    return head.replace("_", "-") + dot + rest


def _is_value(word: Value) -> bool:
    text = word.text
    if text is None:
        return not word.prefix.startswith("--")
    return not text.startswith("-") or re.fullmatch(r"-\d+(\.\d*)?|-", text) is not None


def _several(name: str) -> bool:
    return name in ("served-model-name", "cudagraph-capture-sizes", "middleware", "lora-modules", "allowed-origins",
                    "cuda-graph-sizes", "compile-sizes")  # fmt: skip


def _opposite(name: str, result: Effective) -> None:
    """`--x` and `--no-x` are one switch: the later one wins."""
    other = name[3:] if name.startswith("no-") else f"no-{name}"
    loser = result.settings.pop(other, None) if other in SWITCHES or name in SWITCHES else None
    if loser is not None:
        mine = result.settings[name]
        result.settings[name] = Setting(mine.value, mine.source.over(loser.source))


def _configured(
    words: tuple[Value, ...], read: Callable[[Value], Value | None], result: Effective
) -> list[tuple[str, Any, Value]]:
    """What a `--config FILE` gives; it loses to every word of the command."""
    places = [number for number, word in enumerate(words) if word.text == "--config"]
    if not places:
        return []
    if len(places) > 1 or places[0] + 1 >= len(words):
        result.problems.append("--config without a file, or twice, which the engine refuses")
        return []
    word = words[places[0] + 1]
    text = read(word) if word.known else word
    if text is None:
        result.problems.append(f"there is no file {word.text}, and the engine does not start without it")
        return []
    if text.text is None:
        result.rest = result.rest or replace(text, why=f"the file of --config: {text.why}")
        return []
    return config_items(text, word.text or "", result)


def config_items(text: Value, path: str, result: Effective) -> list[tuple[str, Any, Value]]:
    """The arguments in a YAML file as the engine reads it, each with its line."""
    nodes = yaml_nodes(text, path)
    if isinstance(nodes, str):
        result.rest = result.rest or unknown(Place("file", path, 1), f"the file of --config: {nodes}")
        return []
    found: list[tuple[str, Any, Value]] = []
    for key, value, line in nodes:
        place = Place("file", text.place.path or path, line)
        name = _named(str(key))
        if value is False:
            why = f"{key}: false, which versions of the engine read differently"
            found += [(name, None, unknown(place, why)), (f"no-{name}", None, unknown(place, why))]
        elif value is True:
            found.append((name, True, Value("true", place)))
        elif isinstance(value, dict):
            found.append((name, json.dumps(value), Value(json.dumps(value), place)))
        elif isinstance(value, list):
            found.append((name, [str(item) for item in value], Value(" ".join(map(str, value)), place)))
        else:
            found.append((name, str(value), Value(str(value), place)))
    return [item for item in found if item[0] != "no-" and item[1:2] != ([],)]


def yaml_nodes(text: Value, path: str) -> list[tuple[Any, Any, int]] | str:
    """(key, value, line) of the top mapping of a YAML text as PyYAML's safe loader reads it, or why it cannot be."""
    import yaml

    source = text.text or ""
    if len(source) > MAX_CONFIG or re.search(r"(^|[\s\[{,:-])[&*][\w]", source):
        return "it is large or has anchors"
    try:
        node = yaml.compose(source, Loader=yaml.SafeLoader)
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            return "it is no mapping"
        loader = yaml.SafeLoader("")
        first = text.place.line or 1
        found: dict[Any, tuple[Any, int]] = {}  # as in a dict, a repeated key keeps its first place and last value
        for key, value in node.value:
            name = loader.construct_object(key, deep=True)
            found[name] = (loader.construct_object(value, deep=True), key.start_mark.line + first)
        return [(name, value, line) for name, (value, line) in found.items()]
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        return f"it cannot be read: {' '.join(str(error).split())[:100]}"


def _dotted(result: Effective) -> None:
    """`--name.key value` makes an object that replaces `--name` as a whole."""
    groups: dict[str, dict[str, Any]] = {}
    sources: dict[str, list[Value]] = {}
    for name in [name for name in result.settings if "." in name]:
        item = result.settings.pop(name)
        head, *keys = name.split(".")
        sources.setdefault(head, []).append(item.source)
        table = groups.setdefault(head, {})
        for key in keys[:-1]:
            inner = table.setdefault(key, {})
            table = inner if isinstance(inner, dict) else {}
        last = keys[-1]
        table[last.removesuffix("+")] = str(item.value).split(",") if last.endswith("+") else _json(item.value)
    for head, table in groups.items():
        lost = next((source for source in sources[head] if not source.known), None)
        before = result.settings.get(head)
        source = lost or replace(sources[head][0], text=json.dumps(table), parts=tuple(sources[head]))
        beaten = source.over(before.source if before else None)
        result.settings[head] = Setting(None if lost else json.dumps(table), beaten)


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        number = human(value)
        return value if number is None else number


def human(text: str) -> int | None:
    """`16k`, `16K`, `16384` as a number; None for anything else."""
    if re.fullmatch(r"\d{1,15}", text, re.ASCII):
        return int(text)
    match = _HUMAN.fullmatch(text.strip())
    if not match:
        return None
    power = "kmgt".index(match[2].lower()) + 1
    if match[2].islower():
        return int(float(match[1]) * 1000**power)
    return int(match[1]) * 1024**power if match[1].isdigit() else None


def _speculation(result: Effective) -> None:
    """`speculative-config` as an object, with what the short arguments add."""
    item = result.settings.get("speculative-config")
    table: dict[str, Any] = {}
    if item is not None and item.known:
        try:
            opened = json.loads(str(item.value))
        except (ValueError, RecursionError):
            opened = None
        if opened is not None and not isinstance(opened, dict):
            opened = None
        if opened is None and item.value not in ("None", "null", ""):
            result.problems.append("--speculative-config is no JSON object, which the engine refuses")
        table = {str(key).replace("-", "_"): value for key, value in (opened or {}).items()}
        result.settings["speculative-config"] = Setting(table, item.source)
    for name, key in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        short = result.settings.pop(name, None)
        if short is None:
            continue
        if not short.known or (item is not None and not item.known):
            lost = short.source if not short.known else item.source if item is not None else short.source
            result.settings["speculative-config"] = Setting(None, lost)
            return
        if key in table:
            result.problems.append(f"--{name} and --speculative-config both give {key}, which the engine refuses")
        table[key] = _json(short.value) if key == "num_speculative_tokens" else short.value
        source = replace(item.source, parts=(*item.source.parts, short.source)) if item else short.source
        result.settings["speculative-config"] = Setting(table, source)
