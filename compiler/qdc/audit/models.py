"""Facts of a model folder's weights: scheme, convention, mask, shards.

Everything is read from tensor headers (and zero points) in the image's layers. What config.json and the index claim
of them is compared here: where the two disagree the fact carries the contradiction, and refutes every claim. It knows
no claim, opens no pickle and starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from qdc.audit.evidence import Evidence, Fact, Findings, Look, reason
from qdc.core.errors import QdcError
from qdc.formats import compressed_tensors, drafters, int4, quantized
from qdc.formats.checkpoint import INDEX
from qdc.formats.draft_names import engine_name

_SCHEME = ("bits", "group_size", "symmetric")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_TOOLS = ("quant_config.json", "quantize_config.json")
"""Where AutoAWQ and AutoGPTQ wrote the scheme before config.json held it."""
_PARTS = {"compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point")}
_GROUPED = ("qweight", "scales", "qzeros")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"),
          ("in_proj_b", "in_proj_a"))  # fmt: skip
"""Modules that an engine loads as one matrix (vllm issue 25378)."""


class Model:
    """One model folder: its config.json and the facts of all its safetensors files."""

    def __init__(self, look: Look, folder: str) -> None:
        self.look, self.folder = look, folder.strip("/")
        self.config_path = f"{self.folder}/config.json"
        self.config = look.json(self.config_path)
        self.names = [name for name in look.folder(self.folder) if "/" not in name]
        self.readers = {name: look.image.open(f"{self.folder}/{name}") for name in self.names if _weights(name)}
        self.weights = quantized.read_weights(self.readers, _SPARING if look.sparing else quantized.MAX_ZEROS)
        self.facts = self.weights.facts
        self.problems = [*self._shards(), *self.facts.problems]
        self.where = {tensor: file for file, header in self.facts.files.items() for tensor in header.tensors}

    def called(self, module: str) -> tuple[str, ...]:
        """What the engine calls a stored module: of a drafter that names its target's layers, its layers count on."""
        layers = (self.config or {}).get("num_target_layers")
        if type(layers) is not int or not (module == "fc" or re.match(r"layers\.\d{1,6}\.", module)):
            return (module,)
        name = engine_name(module, layers)
        return name, name.removeprefix("model.")

    @property
    def text_config(self) -> dict[str, Any]:
        """The text model's configuration: `text_config` where there is one."""
        inner = (self.config or {}).get("text_config")
        return inner if isinstance(inner, dict) else self.config or {}

    def whole(self) -> None:
        """Raises QdcError where a weights file cannot be read."""
        for file, why in self.weights.broken.items():
            raise QdcError("audit.weights", why if file in why else f"{file}: {why}", exit_code=4)

    def tensor(self, name: str, text: str) -> Evidence:
        """Evidence for the header entry of tensor `name`."""
        file = self.where.get(name)
        if file is None:
            return self.look.absent(f"{self.folder}/model.safetensors", text)
        header = self.facts.files[file]
        data = self.readers[file].read(0, header.length)
        start = data.find(f'"{name}":{{'.encode())
        stop = data.find(b"}", start) + 1 if start >= 0 else 0
        if start >= 0 and stop > start:
            return self.look.at(f"{self.folder}/{file}", text, start, stop - start)
        return self.look.at(f"{self.folder}/{file}", text, 0, header.length)

    def setting(self, name: str, text: str) -> Evidence:
        """Evidence for one field of config.json."""
        return self.look.spot(self.config_path, f'"{name}"'.encode(), text)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a stored tensor."""
        file = self.where.get(name)
        return self.facts.files[file].tensors[name].shape if file is not None else None

    def rows(self) -> int | None:
        """Rows of the embedding, as stored, else as config.json says."""
        for name in self.where:
            if name.endswith("embed_tokens.weight"):
                return (self.shape(name) or (None,))[0]
        size = self.text_config.get("vocab_size")
        return size if type(size) is int else None

    def matrix(self, name: str) -> tuple[int | None, int | None]:
        """(out, in) of a Linear, packed or plain; (None, None) if it is not there."""
        if name in self.facts.quantized:
            return self.facts.quantized[name].shape
        shape = self.shape(f"{name}.weight")
        return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else (None, None)

    def claimed(self) -> quantized.Claimed | None:
        """What the folder's JSON files claim of the scheme. Raises QdcError where they are malformed."""
        beside = next((name for name in _TOOLS if name in self.names), None)
        return quantized.claimed(self.config or {}, self.look.json(f"{self.folder}/{beside}") if beside else None)

    def _shards(self) -> list[str]:
        """What the index, or the shards' own numbers, say of files and tensors that is not so."""
        index = self.look.json(f"{self.folder}/{INDEX}") if INDEX in self.names else None
        table = index.get("weight_map") if index is not None else None
        if not isinstance(table, dict):
            return _numbers(self.readers)
        named = {shard for shard in table.values() if isinstance(shard, str)}
        problems = [f"the index names {shard}, which is not there" for shard in sorted(named - set(self.readers))]
        problems += [f"{shard} is there, and the index does not name it" for shard in sorted(set(self.readers) - named)]
        stored = {(tensor, file) for file, header in self.facts.files.items() for tensor in header.tensors}
        readable = named & set(self.facts.files)
        said = {(tensor, shard) for tensor, shard in table.items() if shard in readable}
        problems += [f"the index puts {tensor} into {shard}, which lacks it" for tensor, shard in sorted(said - stored)]
        extra = sorted((tensor, file) for tensor, file in stored - said if file in readable)
        return problems + [f"{tensor} is in {file}, and the index does not say so" for tensor, file in extra]

    def scheme(self, prefix: str, findings: Findings) -> None:
        """`<prefix>.bits`, `.group_size`, `.symmetric`; from shapes, and against config.json."""
        problems = self.problems[:3]
        try:
            claimed = self.claimed()
        except QdcError as error:
            claimed = None
            problems.append(reason(error))
        said = "config.json" if (self.config or {}).get("quantization_config") or claimed is None else "the tool's file"
        for what in _SCHEME:
            stated = getattr(claimed, what) if claimed else None
            if not self.facts.quantized:
                value = 8 if self.weights.whole and what == "bits" else None
                trouble = list(problems)
                if claimed is not None and not self.weights.whole:
                    trouble.append(f"{said} says {what} {stated}, and no module is stored packed")
                if self.weights.whole and what != "bits":
                    findings.unread[f"{prefix}.{what}"] = "weights of 8 bits are stored without groups"
                    continue
                findings.facts[f"{prefix}.{what}"] = Fact(value, [self._unpacked()], trouble)
                continue
            value = self.facts.one(what)
            first = next(iter(self.facts.quantized.values()))
            trouble = list(problems)
            if value is None:
                trouble.append(f"{what} differs between modules")
            if claimed is not None and stated != value and not (stated is None and claimed.method != _COMPRESSED):
                trouble.append(f"{said} says {what} {stated}, the tensors say {value}")
            if claimed is None and not problems:
                trouble.append("config.json declares no quantization")
            evidence = [self._scheme_evidence(what, first)]
            if what == "bits" and value == 4 and self.weights.convention == _COMPRESSED:
                evidence.append(self._codes(first))
            sure = not (what == "symmetric" and value is True and self.weights.partial)
            findings.facts[f"{prefix}.{what}"] = Fact(value, evidence, trouble, decides=sure)

    def convention(self, prefix: str, findings: Findings) -> None:
        """`<prefix>.format`: who packed it; order of columns, zero points and fused modules where they contradict."""
        found = self.weights
        if found.convention is None:
            return
        try:
            claimed = self.claimed()
        except QdcError:
            claimed = None
        first = next(iter(self.facts.quantized.values()))
        codes = f"{first.name}.{self._parts()[0]}"
        trouble = ["modules are packed in different conventions"] if found.convention == "mixed" else []
        if claimed is not None and claimed.method not in (found.convention, "unknown") and not trouble:
            trouble.append(f"config.json says {claimed.method}, the tensors are laid out as {found.convention}")
        form = claimed.form if claimed is not None else None
        middle = 1 << (first.bits - 1)
        if found.convention == "gptq" and found.zero in (middle - 1, middle):
            version = "gptq" if found.zero == middle - 1 else "gptq_v2"
            if form in ("gptq", "gptq_v2") and form != version:
                trouble.append(f"zero points of {found.zero} are {version}'s, config.json says {form}: off by one")
        text = f"{codes}: {found.convention}" + (f", {form}" if form else "")
        findings.facts[f"{prefix}.format"] = Fact(found.convention, [self.tensor(codes, text)], trouble)
        if found.act_order is not None:
            order = ["columns are reordered (g_idx), and config.json says they are not"]
            wrong = found.act_order and claimed is not None and claimed.act_order is False
            row = self.tensor(codes, f"columns are {'' if found.act_order else 'not '}in another order than stored")
            findings.facts[f"{prefix}.act_order"] = Fact(found.act_order, [row], order if wrong else [])
        unequal = self._fused()
        if unequal:
            findings.facts[f"{prefix}.fused"] = Fact(False, [self.tensor(codes, unequal[0])], unequal[:5])

    def mask(self, prefix: str, findings: Findings, *, patterns_id: str) -> None:
        """`<prefix>.modules` (census) and `patterns_id` (a list of ignore patterns)."""
        facts = self.facts
        value = {"quantized": len(facts.quantized), "plain": len(facts.plain)}
        names = ", ".join(list(facts.quantized)[:2])
        text = f"{value['quantized']} packed modules ({names}, ..), {value['plain']} plain matrices"
        first = next(iter(facts.quantized), None)
        row = self.tensor(f"{first}.{self._parts()[0]}", text) if first else self.setting("architectures", text)

        def patterns(claimed: Any) -> list[str]:
            listed = claimed if isinstance(claimed, list) else [claimed]
            try:
                return compressed_tensors.mask_problems(facts, [str(item) for item in listed], self.called)
            except QdcError as error:
                return [reason(error)]

        def census(claimed: Any) -> list[str]:
            return _census(facts, claimed)

        findings.facts[f"{prefix}.modules"] = Fact(value, [row], self.problems[:3], census)
        if facts.quantized:
            findings.facts[patterns_id] = Fact(value, [row], self._claimed_mask(), patterns)

    def files(self, prefix: str, findings: Findings) -> None:
        """`<prefix>.weights`: files, bytes and dtypes; pickles, which are not opened."""
        dtypes: dict[str, int] = {}
        for header in self.facts.files.values():
            for tensor in header.tensors.values():
                dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
        size = sum(reader.size for reader in self.readers.values())
        value: dict[str, Any] = {"files": sorted(self.readers), "bytes": size, "tensors": dict(sorted(dtypes.items()))}
        rows = [self.look.at(f"{self.folder}/{name}", f"{reader.size} bytes") for name, reader in self.readers.items()]
        pickles = sorted(name for name in self.names if name.endswith(_PICKLES))
        if pickles:
            value["pickles"] = pickles
            rows += [self.look.at(f"{self.folder}/{name}", "a pickle: not opened") for name in pickles[:5]]
        rows = rows or [self.look.at(self.config_path, "there are no weights beside it")]
        findings.facts[f"{prefix}.weights"] = Fact(value, rows[:20], [])

    def _parts(self) -> tuple[str, str, str]:
        """What codes, scales and zero points are called."""
        first = next(iter(self.facts.quantized), "")
        return _PARTS[_COMPRESSED] if f"{first}.weight_packed" in self.where else _GROUPED

    def _unpacked(self) -> Evidence:
        if self.weights.whole:
            name, dtype = next(iter(self.weights.whole.items()))
            return self.tensor(f"{name}.weight", f"{name} is stored as {dtype}; {len(self.weights.whole)} modules are")
        return self.setting("architectures", "no module is stored packed")

    def _scheme_evidence(self, what: str, module: compressed_tensors.Module) -> Evidence:
        rows, columns = module.shape
        count = len(self.facts.quantized)
        codes, scales, zeros = (f"{module.name}.{part}" for part in self._parts())
        if what == "bits":
            text = f"{module.name}: {rows} x {columns} codes of {module.bits} bits; {count} modules alike"
            return self.tensor(codes, text)
        if what == "group_size":
            text = f"{module.name}: a scale for {module.group_size} columns; {count} modules alike"
            return self.tensor(scales, text)
        if zeros not in self.where:
            return self.tensor(scales, f"no zero points are stored ({count} modules)")
        if not module.symmetric:
            return self.tensor(zeros, f"zero points are stored and differ ({count} modules)")
        more = f"; {self.weights.partial}" if self.weights.partial else ""
        return self.tensor(zeros, f"every zero point is {self.weights.zero} ({count} modules){more}")

    def _codes(self, module: compressed_tensors.Module) -> Evidence:
        """The first codes of a module, unpacked here, as something that a person can check by eye."""
        tensor = self.facts.files[module.file].tensors[f"{module.name}.weight_packed"]
        length = min(tensor.size, 4)
        codes = int4.unpack_bytes(self.readers[module.file].read(tensor.offset, length), 8)
        text = f"first codes of {module.name}: {' '.join(str(code) for code in codes)}"
        return self.look.at(f"{self.folder}/{module.file}", text, tensor.offset, length, "| od -An -tx4")

    def _claimed_mask(self) -> list[str]:
        """What config.json's own list of spared modules contradicts."""
        try:
            claimed = self.claimed()
            if claimed is None:
                return ["config.json declares no quantization"]
            if claimed.ignore is None or quantized.unread_patterns(claimed.ignore):
                return []
            found = compressed_tensors.mask_problems(self.facts, claimed.ignore, self.called)
            return [f"config.json: {text}" for text in found]
        except QdcError as error:
            return [reason(error)]

    def _fused(self) -> list[str]:
        """Members of one matrix of the engine that are stored differently."""
        schemes: dict[str, Any] = dict.fromkeys(self.facts.plain, "plain")
        schemes |= {name: (m.bits, m.group_size, m.symmetric) for name, m in self.facts.quantized.items()}
        problems = []
        for parent in sorted({name.rpartition(".")[0] for name in schemes}):
            for group in _FUSED:
                members = [name for part in group if (name := f"{parent}.{part}") in schemes]
                if len({schemes[name] for name in members}) > 1:
                    problems.append(f"{', '.join(members)} are one matrix in the engine, and are stored differently")
        return problems


_COMPRESSED = "compressed-tensors"
_MODEL = re.compile(r"(?:.*/)?(?:[^/]+\.safetensors|pytorch_model[^/]*\.bin)")
_SPARING = 1 << 16
"""Bytes of zero points that are read where each byte is fetched."""


def _weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _numbers(names: Iterable[str]) -> list[str]:
    """Shards that the others' `00001-of-00002` ask for and that are not there."""
    found = [match for name in names if (match := re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", name))]
    problems = []
    for stem, total in sorted({(match[1], match[3]) for match in found}):
        have = {int(match[2]) for match in found if (match[1], match[3]) == (stem, total)}
        lacking = [number for number in range(1, min(int(total), 10_000) + 1) if number not in have]
        problems += [f"{stem}{number:05}-of-{total}.safetensors is not there" for number in lacking[:5]]
    return problems


_CENSUS = "a module mask is {quantized: .., plain: ..}, names or how many"


def _census(facts: compressed_tensors.Facts, claimed: Any) -> list[str]:
    if not isinstance(claimed, Mapping) or not claimed or not claimed.keys() <= {"quantized", "plain"}:
        return [_CENSUS]
    problems = []
    for what, found in (("quantized", set(facts.quantized)), ("plain", set(facts.plain))):
        if what not in claimed:
            continue
        given = claimed[what]
        if type(given) is int:
            problems += [f"{len(found)} modules are {what}, not {given}"] if given != len(found) else []
        elif isinstance(given, list):
            odd = sorted(set(map(str, given)) ^ found)
            problems += [f"{what}: {odd[0]} is on one side only"] if odd else []
        else:
            problems.append(_CENSUS)
    return problems


def find_models(look: Look) -> tuple[list[str], list[str]]:
    """(targets, drafters): folders that hold config.json and weights; drafters by their config."""
    targets: list[str] = []
    drafts: list[str] = []
    folders = {path.rpartition("/")[0] for path in look.names() if _MODEL.fullmatch(path)}
    for folder in sorted(folders):
        try:
            config = look.json(f"{folder}/config.json")
        except QdcError:
            config = None
        if config is not None:
            (targets if drafters.kind_of(config) is None else drafts).append(f"/{folder}")
    return targets, drafts
