"""Programs that start the engine in published submissions: from what they read to the engine's words.

What each reads is data (`launchers.yaml`). A program of an image is taken for one of them only where its text names
exactly the variables and options that the data names, each seen in the syntax tree of the text; nothing is executed.
Otherwise the answer is that it cannot be decided, with the line that speaks against it.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from qdc.audit.engine_words import yaml_nodes
from qdc.audit.shell_state import Launch, Place, Value, unknown

Read = Callable[[str], Value | None]
MAX_TEXT = 256 << 10
_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|DTYPE|QUANTIZATION")
_OPTION = re.compile(r"--([a-z][a-z0-9-]+)=?")


@dataclass
class Text:
    """The constants in a launcher's source with their first lines: names of variables, of options, all short texts."""

    path: str
    names: dict[str, int] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    broken: str = ""


@dataclass
class Command:
    """The engine's words that a launcher makes, or `why` that cannot be decided. `evidence`: (place, text) pairs."""

    form: str = ""
    words: tuple[Value, ...] = ()
    why: Value | None = None
    evidence: list[tuple[Place, str]] = field(default_factory=list)


@cache
def declared(section: str = "launchers") -> list[dict[str, Any]]:
    """The launchers (or `plugins`) that are known, from `launchers.yaml`."""
    import yaml

    text = (resources.files("qdc.audit") / "launchers.yaml").read_text()
    found: list[dict[str, Any]] = yaml.safe_load(text)[section]
    return found


def command(launch: Launch, read: Read, adapters: list[dict[str, Any]] | None = None) -> Command:
    """What engine a program starts. `read`: the text of the file at an absolute path, None if there is none."""
    place, words = launch.place, [word.text for word in launch.words]
    found = program(words)
    if found is None:
        first = launch.words[0] if launch.words else unknown(place, "a program")
        name = first.text or "a program that is not known"
        there = "/" not in name or read(_absolute(name, launch)) is not None
        why = first.why or (f"{name} is a program, which is not run" if there else f"{name} is not in the image")
        return Command(why=unknown(place, why))
    kind, name = found
    reasons: list[Value] = []
    for adapter in declared() if adapters is None else adapters:
        path = _place_of(adapter, kind, name, launch)
        if path is None:
            continue
        answer = _checked(adapter, path, read, launch)
        if answer.why is None:
            return answer
        reasons.append(answer.why)
    if reasons:
        return Command(why=reasons[0])
    what = f"{name} is a program, which is not run, and no launcher is declared for it"
    return Command(why=unknown(Place("file", _absolute(name, launch), 1) if kind == "script" else place, what))


def program(words: list[str | None]) -> tuple[str, str] | None:
    """(`script` or `module`, its path or name) of a Python command; None for anything else."""
    if not words or words[0] is None:
        return None
    base = posixpath.basename(words[0])
    if base == "uvicorn" and len(words) > 1 and words[1] is not None:
        return "module", words[1].partition(":")[0].partition(".")[0]
    if not re.fullmatch(r"python[\d.]*", base):
        return ("script", words[0]) if words[0].endswith(".py") else None
    number = 1
    while number < len(words) and (words[number] or "").startswith("-") and words[number] not in ("-m", "-c"):
        number += 2 if words[number] in ("-W", "-X") else 1
    head = words[number] if number < len(words) else None
    if head == "-m" and number + 1 < len(words) and words[number + 1]:
        if words[number + 1] == "uvicorn":
            return program(["uvicorn", *words[number + 2 :]])
        return "module", str(words[number + 1])
    return ("script", head) if head and head != "-c" else None


def _absolute(name: str, launch: Launch) -> str:
    return posixpath.normpath(posixpath.join(launch.cwd.text or "/", name))


def _place_of(adapter: Mapping[str, Any], kind: str, name: str, launch: Launch) -> list[str] | None:
    """Where the launcher's text may be, if the program has the name that the data names."""
    if kind == "script":
        return [_absolute(name, launch)] if posixpath.basename(name) in adapter.get("script", ()) else None
    if adapter.get("module") != name:
        return None
    search = launch.environment.get("PYTHONPATH")
    folders = ["", *((search.text or "").split(":") if search is not None else [])]
    return [posixpath.join(_absolute(folder, launch), adapter["text"]) for folder in dict.fromkeys(folders)]


def _checked(adapter: Mapping[str, Any], paths: list[str], read: Read, launch: Launch) -> Command:
    for path in paths:
        text = read(path)
        if text is not None:
            break
    else:
        return Command(why=unknown(launch.place, f"there is no {paths[0]}"))
    if text.text is None:
        return Command(why=unknown(launch.place, f"{path} is not known: {text.why}"))
    source = constants(text.text, path)
    against = _against(adapter, source)
    if against is not None:
        return Command(why=against)
    makes = _Maker(adapter, source, read, launch)
    words = makes.words()
    if makes.why is not None:
        return Command(why=makes.why)
    note = f"read as the launcher {adapter['name']}: it names the same variables and options ({adapter['source']})"
    return Command(adapter["form"], words, None, [(Place("file", path, 1), note), *makes.notes])


def constants(text: str, path: str) -> Text:
    """The names of variables and options in a Python text; docstrings do not count."""
    found = Text(path)
    if len(text) > MAX_TEXT:
        found.broken = "it has more than 256 kB"
        return found
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found.broken = f"it is no Python text ({error})"
        return found
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in skipped:
            continue
        if type(node.value) in (int, float):
            found.texts.setdefault(str(node.value), node.lineno)
        if not isinstance(node.value, str):
            continue
        if len(node.value) < 80:
            found.texts.setdefault(node.value, node.lineno)
        if _NAME.fullmatch(node.value):
            found.names.setdefault(node.value, node.lineno)
        match = _OPTION.fullmatch(node.value)
        if match:
            found.options.setdefault(match[1], node.lineno)
    return found


def _against(adapter: Mapping[str, Any], source: Text) -> Value | None:
    """What in the text speaks against it being this launcher."""
    if source.broken:
        return unknown(Place("file", source.path, 1), f"{source.path} cannot be read: {source.broken}")
    reads, options = _named(adapter)
    optional = set(adapter.get("reads", ()))
    for name in sorted(reads - optional - source.names.keys()) if not adapter.get("unpublished") else ():
        return unknown(
            Place("file", source.path, 1), f"it does not read {name}, as the launcher {adapter['name']} does"
        )
    for name, line in sorted(source.names.items(), key=lambda item: item[1]):
        if name not in reads | optional and not adapter.get("unpublished"):
            return unknown(Place("file", source.path, line), f"it names {name}, which {adapter['name']} does not")
    for name, line in sorted(source.options.items(), key=lambda item: item[1]):
        if name not in options:
            return unknown(Place("file", source.path, line), f"it gives --{name}, which {adapter['name']} does not")
    return None


def _named(adapter: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """(variables, options) that the data names."""
    reads: set[str] = set()
    options = {*adapter.get("options", ()), *adapter.get("fixed", {})}
    for rule in adapter["rules"]:
        sources = [*rule.get("from", ()), *rule.get("else", ()), rule.get("or", {})]
        reads |= {str(source[key]) for source in sources for key in ("env", "env_file") if key in source}
        options |= {str(rule[key]) for key in ("flag", "switch") if key in rule}
    if "config" in adapter:
        reads.add(adapter["config"]["env"])
    return reads, options


class _Maker:
    """Applies the rules of a launcher to the environment and files that it finds."""

    def __init__(self, adapter: Mapping[str, Any], source: Text, read: Read, launch: Launch) -> None:
        self.adapter, self.source, self.read, self.launch = adapter, source, read, launch
        self.environment = launch.environment
        self.why: Value | None = None
        self.notes: list[tuple[Place, str]] = []
        self.config: dict[str, tuple[Any, Place]] = {}
        self.model = ""
        if "unless" in adapter:
            rule = adapter["unless"]
            held = self.environment.get(rule["env"])
            if held is not None and (held.text is None or held.text in rule["when"]):
                self.why = unknown(held.place, f"{rule['env']} decides whether an engine starts at all")
        if "config" in adapter and self.why is None:
            self._configured(adapter["config"]["env"])

    def at(self, name: str) -> Place:
        """The launcher's own line for an option or variable."""
        line = self.source.options.get(name) or self.source.names.get(name) or 1
        return Place("file", self.source.path, line)

    def _configured(self, name: str) -> None:
        """The YAML file that a variable names; without one this launcher takes its own defaults and says nothing."""
        held = self.environment.get(name)
        if held is None or held.text == "":
            self.notes.append((self.at(name), f"{name} is not set: the launcher takes its own defaults"))
            return
        if held.text is None:
            self.why = unknown(held.place, f"{name} is not known: {held.why}")
            return
        path = posixpath.join(self.launch.cwd.text or "/", held.text)
        text = self.read(path)
        if text is None:
            note = f"{name} names {path}, which is not there: the launcher takes its own defaults, silently"
            self.notes.append((held.place, note))
            return
        nodes = yaml_nodes(text, path) if text.text is not None else text.why
        if isinstance(nodes, str):
            if nodes == "it is no mapping":
                self.notes.append(
                    (Place("file", path, 1), f"{path} is no mapping: the launcher takes its own defaults")
                )
            else:
                self.why = unknown(Place("file", path, 1), f"{path}: {nodes}")
            return
        for key, value, line in nodes:
            self._leaf(str(key), value, Place("file", text.place.path or path, line))
        self.notes.append((held.place, f"{name} names {path}"))

    def _leaf(self, key: str, value: Any, place: Place) -> None:
        self.config[key] = (value, place)
        if isinstance(value, dict):
            text = self.read(place.path)
            lines = (text.text or "").splitlines() if text is not None else []
            for inner, held in value.items():
                near = next(
                    (n for n, line in enumerate(lines[place.line :], place.line + 1)
                     if re.match(rf"\s+[\"']?{re.escape(str(inner))}[\"']?\s*:", line)), place.line
                )  # fmt: skip
                self.config[f"{key}.{inner}"] = (held, Place("file", place.path, near))

    # ---- rules

    def words(self) -> tuple[Value, ...]:
        found: list[Value] = []
        for name, value in self.adapter.get("fixed", {}).items():
            found += [Value(f"--{name}", self.at(name)), Value(str(value), self.at(name))]
        for rule in self.adapter["rules"]:
            if self.why is None:
                found += self._rule(rule)
        return tuple(found)

    def _rule(self, rule: Mapping[str, Any]) -> list[Value]:
        if self.adapter.get("unpublished") and rule["from"][0].get("env") not in self.source.names:
            return []
        held = self._first(rule["from"])
        if "switch" in rule:
            return self._switch(rule, held)
        if held is None:
            if self.adapter.get("unpublished") and "flag" in rule:
                place = self.at(rule["from"][0].get("env", ""))
                lost = unknown(place, "what the launcher does without this variable is not published")
                return [] if rule["flag"] in ("chat-template",) else [replace(lost, prefix=f"--{rule['flag']}=")]
            return []
        if rule.get("words"):
            return self._spread(held)
        name = str(rule["flag"])
        if name == "model":
            held = self._model(rule, held)
        if not held.known:
            return [replace(held, prefix=f"--{name}=", many=False)]
        return [Value(f"--{name}", self.at(name)), *self._shaped(rule.get("as", ""), held)]

    def _model(self, rule: Mapping[str, Any], held: Value) -> Value:
        wanted = rule.get("folder_with")
        if wanted and held.known and self.read(posixpath.join(_absolute(held.text or "", self.launch), wanted)) is None:
            other = self._first(rule["else"])
            if other is not None:
                self.notes.append((held.place, f"{held.text} has no {wanted}: the launcher takes {other.text} instead"))
                held = other.over(held)
        self.model = held.text or ""
        return held

    def _shaped(self, shape: str, held: Value) -> list[Value]:
        text = held.text or ""
        if shape == "words":
            return [replace(held, text=word) for word in text.split()]
        if shape == "commas":
            return [replace(held, text=word.strip()) for word in text.split(",") if word.strip()]
        if shape == "number":
            return [replace(held, text=str(int(text)))] if re.fullmatch(r"\s*-?\d{1,15}\s*", text) else [
                unknown(held.place, f"{text!r} is no number, and the launcher stops")
            ]  # fmt: skip
        return [replace(held, text=json.dumps({shape: text}))] if shape else [held]

    def _spread(self, held: Value) -> list[Value]:
        if not held.known:
            return [replace(held, many=True)]
        try:
            return [replace(held, text=word) for word in shlex.split(held.text or "")]
        except ValueError:
            return [unknown(held.place, "words that cannot be split", many=True)]

    def _switch(self, rule: Mapping[str, Any], held: Value | None) -> list[Value]:
        name, on = str(rule["switch"]), rule.get("when", [])
        other = rule.get("or")
        if other is not None:
            extra = self.environment.get(other["env"])
            if extra is not None and (extra.text is None or extra.text in other["when"]):
                on, held = [*on, extra.text], extra
        if held is None:
            return []
        if not held.known:
            return [replace(held, prefix=f"--{name}=", many=False)]
        raw = self._raw(rule, held)
        if isinstance(raw, str):
            true = raw.strip().lower() in on if on else bool(raw)
        else:
            true = raw in on if on and not other else bool(raw)
        return [replace(held, text=f"--{name}", parts=(held,))] if true else []

    def _raw(self, rule: Mapping[str, Any], held: Value) -> Any:
        """The value as the launcher's own YAML reader has it, where it came from there."""
        for source in rule["from"]:
            item = self.config.get(source.get("config", ""))
            if item is not None and item[1] == held.place:
                return item[0]
        return held.text

    def _first(self, sources: list[Mapping[str, Any]]) -> Value | None:
        """The first source that has a value, over those after it."""
        held = [value for source in sources if (value := self._source(source)) is not None]
        if not held:
            return None
        first, *rest = held
        for loser in rest:
            first = first.over(loser)
        return first

    def _source(self, source: Mapping[str, Any]) -> Value | None:
        if "value" in source:
            text = str(source["value"])
            return Value(text, Place("file", self.source.path, self.source.texts.get(text, 1)))
        if "config" in source:
            return self._from_config(source)
        if "file" in source:
            path = str(source["file"]).replace("{model}", self.model)
            found = self.read(_absolute(path, self.launch)) if self.model or "{model}" not in source["file"] else None
            return None if found is None else Value(path, self.at("chat-template"))
        name = source.get("env") or source.get("env_file")
        held = self.environment.get(str(name))
        if held is None or (source.get("blank") == "skip" and held.text is not None and not held.text.strip()):
            return None
        if "env_file" in source and held.text is not None:
            return held if held.text and self.read(_absolute(held.text, self.launch)) is not None else None
        if source.get("blank") == "skip" and held.text is not None:
            return replace(held, text=held.text.strip())
        return held

    def _from_config(self, source: Mapping[str, Any]) -> Value | None:
        item = self.config.get(str(source["config"]))
        if item is None or item[0] is None or (not item[0] and not source.get("kept")):
            return None
        value, place = item
        return Value(json.dumps(value) if isinstance(value, dict) else str(value), place)
