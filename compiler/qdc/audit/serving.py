"""How the image starts and with what settings: the start command, serve.json, the engine, patches, template.

The launcher reads serve.json and nothing else, so serve.json's arguments are the effective ones if, and only if,
the image starts that launcher: `serve.start` says whether. Where another entrypoint decides, settings given on the
command line are facts and all others are left unread; nothing is executed.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

from qdc.audit.evidence import Fact, Findings, Look, reason
from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.manifest.flat import arguments

SERVE = "opt/qdc/serve.json"
LAUNCHER = "opt/qdc/serving/launcher.py"
START = [["/usr/bin/python3", f"/{LAUNCHER}"], ["serve"]]
_DIST = re.compile(r"(?:.*/)?(vllm(?:[_-]\w+)?)-([^/]+)\.dist-info/METADATA")
_HARMFUL = re.compile(r"(PYTHON|LD_|QDC_)\w*=")
_FIELDS = {
    "serve.k": ("speculative-config.num_speculative_tokens", int),
    "serve.max_model_len": ("max-model-len", int),
    "serve.max_num_seqs": ("max-num-seqs", int),
    "serve.dtype": ("dtype", str),
}


class Serving:
    """What the image is started with. `arguments` by name, `target` and `drafter`: model folders or None."""

    def __init__(self, look: Look, digests: dict[str, str], files: dict[str, str]) -> None:
        self.look, self.digests, self.files = look, digests, files
        self.findings = Findings()
        self.serve: dict[str, Any] | None = None
        self.arguments: dict[str, Any] = {}
        self.where = SERVE
        try:
            self.serve = look.json(SERVE)
        except QdcError as error:
            self.findings.unread["serve."] = reason(error)
        if self.serve is not None:
            self._of_launcher()
        elif not self.findings.unread:
            self._of_command_line()
        speculation = self.arguments.get("speculative-config")
        self.speculation: dict[str, Any] = speculation if isinstance(speculation, dict) else {}
        self.target = self._folder(self.arguments.get("model"))
        self.drafter = self._folder(self.speculation.get("model"))
        if self.arguments:
            self._settings()
            self._template()
        self._engine()

    def _folder(self, value: Any) -> str | None:
        return value if isinstance(value, str) and value.startswith("/") and self.look.folder(value) else None

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
        self.findings.facts["serve.start"] = Fact([*START[0], *START[1]], evidence, problems, lambda claimed: [])
        if problems:
            self.findings.unread["serve."] = f"the launcher may not decide: {problems[0]}"
            return
        words = (self.serve or {}).get("arguments")
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            self.arguments = arguments(words)
        else:
            self.findings.unread["serve."] = "serve.json lists no arguments"

    def _of_command_line(self) -> None:
        settings = self.look.image.settings
        words = [
            word
            for name in ("Entrypoint", "Cmd")
            if isinstance(settings.get(name), list)
            for word in settings[name]
            if isinstance(word, str)
        ]
        engine = any("vllm" in word for word in words) and not any(word.endswith(".sh") for word in words)
        if engine and "-c" not in words:
            self.where = ""
            self.arguments = arguments(words)
        text = " ".join(words)[:120] or "nothing"
        why = f"the image starts `{text}`; a script decides, and it is not run"
        if self.arguments:
            self.findings.facts["serve.start"] = Fact(words, [self.look.configuration(f"starts {text}")])
        else:
            self.findings.unread["serve."] = why

    def _settings(self) -> None:
        for id, (path, kind) in _FIELDS.items():
            value: Any = self.arguments
            for part in path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is None:
                if id != "serve.k":
                    self.findings.unread[id] = "left to the engine's default"
                    continue
            elif kind is int:
                try:
                    value = int(value)
                except (TypeError, ValueError):
                    self.findings.unread[id] = f"{value!r} is not a number"
                    continue
            self.findings.facts[id] = Fact(value, [self._argument(path.split(".")[-1], value)])
        caching = "enable-prefix-caching" in self.arguments
        if caching or "no-enable-prefix-caching" in self.arguments:
            both = caching and "no-enable-prefix-caching" in self.arguments
            name = "enable-prefix-caching" if caching else "no-enable-prefix-caching"
            self.findings.facts["serve.engine.prefix_caching"] = Fact(
                caching, [self._argument(name, caching)], ["it is switched on and off"] if both else []
            )

    def _argument(self, name: str, value: Any) -> dict[str, Any]:
        """Evidence for one engine argument: its place in serve.json, or the image's command line."""
        if not self.where:
            return self.look.configuration(f"{name} {value}")
        data = self.look.image.read(self.where)
        for needle in (f'\\"{name}\\":{json.dumps(value)}', f'\\"{name}\\": {json.dumps(value)}', f'"--{name}"'):
            if needle.encode() in data:
                return self.look.spot(self.where, needle.encode(), f"{name} {value}")
        return self.look.at(self.where, f"{name}: {value}")

    def _template(self) -> None:
        path = self.arguments.get("chat-template")
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

    def missing(claimed: Any) -> list[str]:
        wanted = claimed if isinstance(claimed, list) else [claimed]
        return [f"the patch {name} is not there" for name in wanted if name not in present]

    facts["serve.engine.patches"] = Fact(
        present, [row for fact in facts.values() for row in fact.evidence[:1]],
        [problem for fact in facts.values() for problem in fact.problems], missing,
    )  # fmt: skip
    return facts
