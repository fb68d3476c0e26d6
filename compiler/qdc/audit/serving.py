"""How the image starts and with what settings: the start command, serve.json, the engine, patches, template.

The launcher of qdc reads serve.json and nothing else, so serve.json's arguments are the effective ones if, and only
if, the image starts that launcher: `serve.start` says whether. For any other image the settings in force are followed
from its first process to the engine (`effective`); nothing is executed.
"""

from __future__ import annotations

import json
import posixpath
import re
from importlib import resources
from typing import Any

from qdc.audit import places
from qdc.audit.container import Arguments
from qdc.audit.effective import Configuration, effective_configuration
from qdc.audit.engine_words import Setting, human
from qdc.audit.evidence import Claim, Evidence, Fact, Findings, Look, reason
from qdc.audit.launchers import constants, declared
from qdc.audit.shell_state import Value
from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.manifest.flat import arguments

SERVE = "opt/qdc/serve.json"
LAUNCHER = "opt/qdc/serving/launcher.py"
START = [["/usr/bin/python3", f"/{LAUNCHER}"], ["serve"]]
_DIST = re.compile(r"(?:.*/)?(vllm(?:[_-]\w+)?)-([^/]+)\.dist-info/METADATA")
_HARMFUL = re.compile(r"(PYTHON|LD_|QDC_)\w*=")
_REACHES = re.compile(r"(VLLM|EQC|FLA|FLASHINFER|TORCH|PYTORCH|TRITON|HF)_\w+")
DEFAULT = "left to the engine's default"
_FIELDS = {
    "serve.max_model_len": ("max-model-len", int),
    "serve.max_num_seqs": ("max-num-seqs", int),
    "serve.dtype": ("dtype", str),
}
_SPECULATION = {
    "serve.k": "num_speculative_tokens",
    "drafter.architecture.prompt_lookup_min": "prompt_lookup_min",
    "drafter.architecture.prompt_lookup_max": "prompt_lookup_max",
    "drafter.architecture.max_tree_depth": "suffix_decoding_max_tree_depth",
    "drafter.architecture.max_cached_requests": "suffix_decoding_max_cached_requests",
    "drafter.architecture.max_spec_factor": "suffix_decoding_max_spec_factor",
    "drafter.architecture.min_token_prob": "suffix_decoding_min_token_prob",
}


class Serving:
    """What the image is started with.

    `arguments` by name, as far as they are known; `target` and `drafter`: model folders or None; `claims`: what ENV
    says of variables that a script overrides. `run`: the arguments of `docker run`, if it is asked for.
    """

    def __init__(
        self, look: Look, digests: dict[str, str], files: dict[str, str], run: Arguments | None = None
    ) -> None:
        self.look, self.digests, self.files, self.run = look, digests, files, run
        self.findings = Findings()
        self.serve: dict[str, Any] | None = None
        self.arguments: dict[str, Any] = {}
        self.claims: list[Claim] = []
        self.configuration: Configuration | None = None
        try:
            self.serve = look.json(SERVE)
        except QdcError as error:
            self.findings.unread["serve."] = reason(error)
        if self.serve is not None:
            self._of_launcher()
        elif not self.findings.unread:
            self._of_any_image()
        speculation = self.arguments.get("speculative-config")
        self.speculation: dict[str, Any] = speculation if isinstance(speculation, dict) else {}
        self.target = self._folder(self.arguments.get("model"))
        self.drafter = self._folder(self.speculation.get("model"))
        if self.arguments:
            self._settings()
            self._template()
        self._engine()

    def knows(self, name: str) -> bool:
        """Whether the value of an argument is known; that it is left to the engine is known too."""
        if not self.arguments:
            return False
        setting = self.setting(name)
        return setting is None or setting.known

    def setting(self, name: str) -> Setting | None:
        """An argument with its source, for an image that qdc's launcher does not start."""
        return self.configuration.result.get(name) if self.configuration is not None else None

    def evidence(self, name: str, text: str) -> list[Evidence]:
        """Where an argument comes from, and all that it beat; for qdc's launcher its place in serve.json."""
        if self.configuration is None:
            return [self._in_serve(name, text)]
        setting = self.setting(name)
        if setting is None:
            return [self.look.configuration(f"{text}: nothing that the image starts with gives {name}")]
        return places.rows(self.look, setting.source, text)

    def _folder(self, value: Any) -> str | None:
        if not isinstance(value, str) or not value:
            return None
        path = posixpath.join(self._cwd(), value) if self.configuration is not None else value
        return path if path.startswith("/") and self.look.folder(path) else None

    def _cwd(self) -> str:
        return (self.configuration.start.cwd.text if self.configuration else None) or "/"

    def _of_launcher(self) -> None:
        settings, problems = self.look.image.settings, []
        found = [settings.get("Entrypoint"), settings.get("Cmd")]
        if found != START:
            problems.append(f"the image starts {canonical.dumps(found).decode()[:120]}")
        environment = settings.get("Env")
        for item in environment if isinstance(environment, list) else []:
            if isinstance(item, str) and _HARMFUL.match(item):
                problems.append(f"the image sets {item.partition('=')[0]} for the launcher")
        recorded, seen = self.files.get(LAUNCHER), self.digests.get(LAUNCHER)
        if seen is None and self.look.image.find(LAUNCHER) is not None:
            self.findings.unread["serve."] = "the launcher could not be read"
            return
        if seen is None:
            problems.append("there is no launcher")
        elif recorded is None:
            problems.append("the manifest names no digest of the launcher")
        elif recorded != seen:
            problems.append(f"the launcher is {seen[:12]}, the manifest names {recorded[:12]}")
        evidence = [
            self.look.configuration("Entrypoint and Cmd"),
            self.look.at(LAUNCHER, f"sha256:{seen}, {_known(seen)}", show="| sha256sum"),
        ]
        told = [word for part in found for word in (part if isinstance(part, list) else [])]
        self.findings.facts["serve.start"] = Fact(told, evidence, problems)
        if problems:
            self.findings.unread["serve."] = f"the launcher may not decide: {problems[0]}"
            return
        words = (self.serve or {}).get("arguments")
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            self.arguments = arguments(words)
        else:
            self.findings.unread["serve."] = "serve.json lists no arguments"

    def _of_any_image(self) -> None:
        found = effective_configuration(self.look.image, self.run)
        words = [word.text for word in found.start.words]
        if found.why is not None:
            text = f"cannot decide: {found.why.why} ({found.why.place})"[:400]
            self.findings.unread["serve."] = text
            self.findings.facts["serve.start"] = Fact(
                words, [*places.rows(self.look, found.why, text)], [], lambda _: [], False
            )
            return
        self.configuration = found
        rows = [self.look.configuration(f"starts {' '.join(str(word) for word in words)[:120] or 'nothing'}")]
        for engine in found.engines:
            rows.append(places.row(self.look, engine.place, "starts the engine"))
            rows += [places.row(self.look, place, note) for place, note in engine.notes]
        self.findings.facts["serve.start"] = Fact(words, rows, list(found.result.problems))
        self.findings.facts["serve.engines"] = Fact(
            max(found.together, 1), rows[1:], ["several engines are started"] if found.together > 1 else []
        )
        for name, setting in found.result.settings.items():
            if setting.known:
                self.arguments[name] = setting.value
        self.arguments.setdefault("", [])
        self._environment(found)

    def _environment(self, found: Configuration) -> None:
        """`serve.environment[NAME]`: variables that reach the engine, and those of ENV that a script overrides."""
        used = {(setting.source.place, setting.source.text) for setting in found.result.settings.values()}
        for name, value in sorted(found.environment.items()):
            over = next((item for item in value.beat if item.place.kind == "ENV" and item.text != value.text), None)
            if value.place.kind == "docker run" or (value.place, value.text) not in used:
                over = None
            if over is None and not _REACHES.fullmatch(name):
                continue
            id = f"serve.environment[{name}]"
            if not value.known:
                self.findings.unread[id] = _undecided(value)
                continue
            self.findings.facts[id] = Fact(value.text, places.rows(self.look, value, f"{name}={value.text}"))
            if over is not None:
                row = self.look.configuration(f"ENV {name}={over.text}"[:200])
                self.claims.append(Claim(id, over.text, "image configuration ENV", (row,)))

    def _settings(self) -> None:
        self._speculation()
        for id, (name, kind) in _FIELDS.items():
            setting = self.setting(name)
            if setting is not None and not setting.known:
                self.findings.unread[id] = _undecided(setting.source)
                continue
            value = self.arguments.get(name)
            if value is None:
                self.findings.unread[id] = DEFAULT
                continue
            read = _number if kind is int else _text
            told = read(value)
            if told is None:
                self.findings.unread[id] = f"{value!r} is not a number"
                continue
            self.findings.facts[id] = Fact(told, self.evidence(name, f"{name} {value}"))
        self._caching()
        if self.configuration is not None:
            for name, setting in sorted(self.configuration.result.settings.items()):
                id = f"serve.arguments[{name}]"
                if setting.known:
                    self.findings.facts[id] = Fact(setting.value, self.evidence(name, f"--{name}"))
                else:
                    self.findings.unread[id] = _undecided(setting.source)

    def _speculation(self) -> None:
        """K and what kinds without weights are told, from the speculative configuration."""
        setting = self.setting("speculative-config")
        if setting is not None and not setting.known:
            self.findings.unread["serve.k"] = _undecided(setting.source)
            return
        for id, key in _SPECULATION.items():
            value = self.speculation.get(key)
            if value is None and id != "serve.k":
                continue
            if value is None and self.speculation:
                self.findings.unread[id] = DEFAULT
                continue
            told = _number(value) if type(value) is str and id == "serve.k" else value
            self.findings.facts[id] = Fact(told, self.evidence("speculative-config", f"{key} {value}"))

    def _caching(self) -> None:
        on, off = self.setting("enable-prefix-caching"), self.setting("no-enable-prefix-caching")
        for setting in (on, off):
            if setting is not None and not setting.known:
                self.findings.unread["serve.engine.prefix_caching"] = _undecided(setting.source)
                return
        caching = "enable-prefix-caching" in self.arguments
        if caching or "no-enable-prefix-caching" in self.arguments:
            both = caching and "no-enable-prefix-caching" in self.arguments
            name = "enable-prefix-caching" if caching else "no-enable-prefix-caching"
            self.findings.facts["serve.engine.prefix_caching"] = Fact(
                caching, self.evidence(name, f"{name} {caching}"), ["it is switched on and off"] if both else []
            )

    def _in_serve(self, name: str, text: str) -> Evidence:
        """Evidence for one engine argument: its place in serve.json."""
        data, value = self.look.image.read(SERVE), self.arguments.get(name)
        key, _, shown = text.partition(" ")
        inner = value.get(key) if isinstance(value, dict) else value
        for needle in (f'\\"{key}\\":{json.dumps(inner)}', f'\\"{key}\\": {json.dumps(inner)}', f'"--{name}"'):
            if needle.encode() in data:
                return self.look.spot(SERVE, needle.encode(), text)
        return self.look.at(SERVE, f"{key}: {shown}")

    def plugin_window(self, findings: Findings) -> None:
        """`drafter.swa.*` where a plugin of the engine takes the window from a variable (`launchers.yaml`)."""
        if self.configuration is None or "drafter.swa.window" not in findings.facts:
            return
        for plugin in declared("plugins"):
            path = next(
                (path for path in self.look.image.files() if path.endswith(f"{plugin['package']}/__init__.py")), ""
            )
            value = self.configuration.environment.get(plugin["window"])
            if not path or value is None or value.text == "":
                continue
            text = self.look.image.read(path).decode("utf-8", "replace")
            line = constants(text, f"/{path}").names.get(plugin["window"])
            if line is None:
                continue
            if not value.known:
                findings.facts.pop("drafter.swa.window")
                findings.unread["drafter.swa.window"] = _undecided(value)
                return
            if not re.fullmatch(r"\s*[1-9]\d*\s*", str(value.text)):
                return  # The plugin ignores what is no number.
            note = f"the plugin {plugin['name']} reads {plugin['window']} ({plugin['source']})"
            rows = [
                *places.rows(self.look, value, f"{plugin['window']}={value.text}"),
                places.row(self.look, places.file(path, line), note),
                *findings.facts["drafter.swa.window"].evidence[:2],
            ]
            window, stored = int(str(value.text)), findings.facts["drafter.swa.window"].value
            findings.facts["drafter.swa.window"] = _told(window, rows, (window, stored))
            findings.facts["drafter.swa.semantics"] = _told(plugin["semantics"], rows[:2], (plugin["semantics"],))
            static = self.configuration.environment.get(plugin["static"])
            if static is None or static.known:
                apply = "always" if static is not None and static.text == "1" else "above-window"
                findings.facts["drafter.swa.apply"] = _told(apply, rows[:2], (apply,))
            return

    def _template(self) -> None:
        setting = self.setting("chat-template")
        if setting is not None and not setting.known:
            self.findings.unread["serve.chat_template"] = _undecided(setting.source)
            return
        path = self.arguments.get("chat-template")
        if isinstance(path, str) and self.configuration is not None:
            path = posixpath.join(self._cwd(), path)
        if not isinstance(path, str):
            path = f"{self.target}/chat_template.jinja" if self.target else None
        if path is None or self.look.image.find(path) is None:
            self.findings.unread["serve.chat_template"] = "no template file is named or found"
            return
        digest = self.digests.get(path.strip("/"))
        if digest is not None:
            evidence = [self.look.at(path, "the chat template", show="| sha256sum")]
            self.findings.facts["serve.chat_template"] = Fact(f"sha256:{digest}", evidence)

    def _engine(self) -> None:
        """The engine's version, from the METADATA of its distribution where the launcher finds packages."""
        listed = (self.serve or {}).get("python_path")
        roots = [str(root).strip("/") + "/" for root in listed] if isinstance(listed, list) else [""]
        versions: dict[str, list[dict[str, Any]]] = {}
        for path in self.look.image.files():
            match = _DIST.fullmatch(path)
            if not match or not any(path.startswith(root) for root in roots):
                continue
            lines = self.look.image.read(path, 0, min(self.look.image.open(path).size, 1 << 16))
            version = re.search(rb"^Version: *([\w.+!-]+)", lines, re.MULTILINE)
            if version:
                text = version[1].decode()
                row = self.look.at(path, version[0].decode(), version.start(), len(version[0]))
                versions.setdefault(text.partition("+")[0], []).append(row)
        if versions:
            found = sorted(versions)
            problems = [f"several versions are installed: {', '.join(found)}"] if len(found) > 1 else []
            evidence = [row for version in found for row in versions[version]]
            self.findings.facts["serve.engine.vllm"] = Fact(found[0], evidence, problems)


def _told(value: Any, rows: list[Evidence], possible: tuple[Any, ...]) -> Fact:
    """What a plugin is told by a variable: it is not run, so that what it does with it is not proved."""

    def against(claimed: Any) -> list[str]:
        shown = " or ".join("none" if item is None else str(item) for item in possible)
        return [] if claimed in possible else [f"the bytes say {shown}, not {claimed}"]

    return Fact(value, rows, [], against, False)


def _undecided(value: Value) -> str:
    return f"cannot decide: {value.why or 'it is not known'} ({value.place})"[:400]


def _number(value: Any) -> int | None:
    return value if type(value) is int else human(value.strip()) if isinstance(value, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _known(digest: str | None) -> str:
    """Whether a launcher is the one that this version of qdc ships, whose source can be read beside this file."""
    own = resources.files("qdc.serving") / "launcher.py"
    same = digest == sha256_bytes(own.read_bytes())
    return "the launcher of this qdc" if same else "not the launcher of this qdc: what it reads is its maker's word"


def patch_facts(look: Look, serve: dict[str, Any], digests: dict[str, str]) -> dict[str, Fact]:
    """`serve.patches[NAME]` -> digest of the patch's files, and `serve.engine.patches` -> names on the path.

    A patch's digest is SHA-256 of the canonical JSON {relative path: SHA-256 of the file}.
    """
    listed, folders = serve.get("patches"), serve.get("python_path")
    names = [item.get("name") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    roots = [root for root in folders if isinstance(root, str)] if isinstance(folders, list) else []
    facts: dict[str, Fact] = {}
    for name in names:
        found = [root for root in roots if root.rstrip("/").rpartition("/")[2] == name]
        files = look.folder(found[0]) if len(found) == 1 else {}
        root = found[0].strip("/") if found else ""
        table = {path: digests[f"{root}/{path}"] for path in files if f"{root}/{path}" in digests}
        problems = [] if files else [f"the patch {name} is not on the launcher's path"]
        evidence = [look.at(f"{root}/{path}", f"file of the patch {name}", show="| sha256sum") for path in files]
        if len(table) < len(files):
            facts[f"serve.patches[{name}]"] = Fact(None, evidence, [], lambda _: [], False)  # Not all could be read.
            continue
        facts[f"serve.patches[{name}]"] = Fact(canonical.digest(table), evidence, problems)
    present = [str(name) for name in names]

    def other(claimed: Any) -> list[str]:
        wanted = claimed if isinstance(claimed, list) else [claimed]
        problems = [f"the patch {name} is not there" for name in wanted if name not in present]
        more = [name for name in present if name not in wanted] if isinstance(claimed, list) else []
        return problems + [f"the patch {name} is there, too" for name in more]

    facts["serve.engine.patches"] = Fact(
        present, [row for fact in facts.values() for row in fact.evidence[:1]],
        [problem for fact in facts.values() for problem in fact.problems], other,
    )  # fmt: skip
    return facts
