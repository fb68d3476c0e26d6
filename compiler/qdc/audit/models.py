"""Facts of the model folders in an image: the target's grid, the drafter's shape, taps, window and grid.

Everything is read from tensor headers and config.json in the image's layers. Where the two disagree, the fact
carries the contradiction and refutes every claim. It knows no claim and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.audit.evidence import Evidence, Fact, Findings, Look, reason
from qdc.core.errors import QdcError
from qdc.formats import compressed_tensors, int4
from qdc.formats.compressed_tensors import Facts
from qdc.formats.dflash import read_drafter_config

_ARCHITECTURE = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rope_theta": "rope_theta",
}
_SCHEME = ("bits", "group_size", "symmetric")


class Model:
    """One model folder: its config.json and the facts of all its safetensors files."""

    def __init__(self, look: Look, folder: str) -> None:
        self.look, self.folder = look, folder.strip("/")
        self.config_path = f"{self.folder}/config.json"
        self.config = look.json(self.config_path)
        names = [name for name in look.folder(self.folder) if name.endswith(".safetensors") and "/" not in name]
        self.readers = {name: look.image.open(f"{self.folder}/{name}") for name in names}
        self.facts: Facts = compressed_tensors.read_facts(self.readers)

    def tensor(self, name: str, text: str) -> Evidence:
        """Evidence for the header entry of tensor `name`."""
        for file, header in self.facts.files.items():
            if name in header.tensors:
                needle = f'"{name}":{{'.encode()
                data = self.readers[file].read(0, header.length)
                start = data.find(needle)
                stop = data.find(b"}", start) + 1 if start >= 0 else 0
                if start >= 0 and stop > start:
                    return self.look.at(f"{self.folder}/{file}", text, start, stop - start)
                return self.look.at(f"{self.folder}/{file}", text, 0, header.length)
        return self.look.absent(f"{self.folder}/model.safetensors", text)

    def setting(self, name: str, text: str) -> Evidence:
        """Evidence for one field of config.json."""
        return self.look.spot(self.config_path, f'"{name}"'.encode(), text)

    def codes(self, module: compressed_tensors.Module) -> Evidence:
        """The first codes of a module, unpacked here, as something that a person can check by eye."""
        header = self.facts.files[module.file]
        tensor = header.tensors[f"{module.name}.weight_packed"]
        length = min(tensor.size, 4)
        codes = int4.unpack_bytes(self.readers[module.file].read(tensor.offset, length), 8)
        words = " ".join(str(code) for code in codes)
        path = f"{self.folder}/{module.file}"
        text = f"first codes of {module.name}: {words}"
        return self.look.at(path, text, tensor.offset, length, "| od -An -tx4")

    def scheme(self, prefix: str, findings: Findings) -> None:
        """`<prefix>.bits`, `.group_size`, `.symmetric`; from shapes, and against config.json."""
        modules = self.facts.quantized
        problems = list(self.facts.problems[:3])
        try:
            declared = compressed_tensors.read_declared(self.config or {})
        except QdcError as error:
            declared = None
            problems.append(reason(error))
        for what in _SCHEME:
            if not modules:
                text = "no module is stored packed"
                findings.facts[f"{prefix}.{what}"] = Fact(None, [self.setting("architectures", text)], problems)
                continue
            value = self.facts.one(what)
            first = next(iter(modules.values()))
            evidence = [self._scheme_evidence(what, first)]
            trouble = list(problems)
            if value is None:
                trouble.append(f"{what} differs between modules")
            stated = getattr(declared, what) if declared else None
            if stated != value and declared is not None:
                trouble.append(f"config.json says {what} {stated}, the tensors say {value}")
            if declared is None and not problems:
                trouble.append("config.json declares no quantization")
            if what == "bits" and value == 4:
                evidence.append(self.codes(first))
            findings.facts[f"{prefix}.{what}"] = Fact(value, evidence, trouble)

    def _scheme_evidence(self, what: str, module: compressed_tensors.Module) -> Evidence:
        rows, columns = module.shape
        count = len(self.facts.quantized)
        if what == "bits":
            text = f"{module.name}: {rows} x {columns} codes of {module.bits} bits; {count} modules alike"
            return self.tensor(f"{module.name}.weight_packed", text)
        if what == "group_size":
            text = f"{module.name}: a scale for {module.group_size} columns; {count} modules alike"
            return self.tensor(f"{module.name}.weight_scale", text)
        text = f"{'no' if module.symmetric else 'some'} zero points are stored ({count} modules)"
        return self.tensor(f"{module.name}.weight_scale", text)

    def mask(self, prefix: str, findings: Findings, *, patterns_id: str) -> None:
        """`<prefix>.modules` (census) and `patterns_id` (a list of ignore patterns)."""
        facts = self.facts
        value = {"quantized": len(facts.quantized), "plain": len(facts.plain)}
        names = ", ".join(list(facts.quantized)[:2])
        text = f"{value['quantized']} packed modules ({names}, ..), {value['plain']} plain matrices"
        first = next(iter(facts.quantized), None)
        evidence = [self.tensor(f"{first}.weight_packed", text) if first else self.setting("architectures", text)]

        def census(claimed: Any) -> list[str]:
            if not isinstance(claimed, Mapping):
                return ["a module mask is {quantized: [names], plain: [names]}"]
            problems = []
            for what, found in (("quantized", set(facts.quantized)), ("plain", set(facts.plain))):
                given = claimed.get(what)
                if isinstance(given, int) and not isinstance(given, bool):
                    problems += [f"{len(found)} modules are {what}, not {given}"] if given != len(found) else []
                elif isinstance(given, list) and set(map(str, given)) != found:
                    odd = sorted(set(map(str, given)) ^ found)
                    problems.append(f"{what}: {odd[0]} is on one side only")
            return problems

        def patterns(claimed: Any) -> list[str]:
            listed = claimed if isinstance(claimed, list) else [claimed]
            try:
                return compressed_tensors.mask_problems(facts, [str(item) for item in listed])
            except QdcError as error:
                return [reason(error)]

        findings.facts[f"{prefix}.modules"] = Fact(value, evidence, list(facts.problems[:3]), census)
        if facts.quantized:
            trouble = self._declared_mask()
            findings.facts[patterns_id] = Fact(value, evidence, trouble, patterns)

    def _declared_mask(self) -> list[str]:
        """What config.json's own ignore list contradicts."""
        try:
            declared = compressed_tensors.read_declared(self.config or {})
            if declared is None:
                return ["config.json declares no quantization"]
            return [f"config.json: {text}" for text in compressed_tensors.mask_problems(self.facts, declared.ignore)]
        except QdcError as error:
            return [reason(error)]


def target_facts(look: Look, folder: str, findings: Findings) -> Model | None:
    """Facts under `target.quantization.`; on bytes that cannot be read, the prefix is marked unread."""
    try:
        model = Model(look, folder)
        if model.config is None or not model.readers:
            findings.unread["target.quantization."] = f"{folder} lacks config.json or weights"
            return None
        model.scheme("target.quantization.scheme", findings)
        model.mask("target.quantization", findings, patterns_id="target.quantization.ignore")
    except QdcError as error:
        findings.unread["target.quantization."] = reason(error)
        return None
    return model


def drafter_facts(look: Look, folder: str, target: Model | None, findings: Findings) -> None:
    """Facts under `drafter.` of a DFlash drafter; on bytes that cannot be read, the prefix is marked unread."""
    try:
        model = Model(look, folder)
        if model.config is None or not model.readers:
            findings.unread["drafter."] = f"{folder} lacks config.json or weights"
            return
        read = read_drafter_config(model.config)
        _shape(model, read, target, findings)
        _window(model, read, findings)
        model.scheme("drafter.ptq.scheme", findings)
        model.mask("drafter.ptq", findings, patterns_id="drafter.ptq.ignore")
        if not model.facts.quantized:
            evidence = findings.facts["drafter.ptq.scheme.bits"].evidence
            findings.facts["drafter.ptq"] = Fact(None, evidence, list(model.facts.problems[:3]))
    except QdcError as error:
        findings.unread["drafter."] = reason(error)


def _shape(model: Model, read: Mapping[str, Any], target: Model | None, findings: Findings) -> None:
    config = model.config or {}
    hidden = config.get("hidden_size")
    wide = config.get("target_hidden_size", hidden)
    if target is not None and target.config is not None:
        text_config = target.config.get("text_config", target.config)
        wide = text_config.get("hidden_size", wide) if isinstance(text_config, dict) else wide
    rows, columns = _matrix(model, "fc")
    taps = read["taps"]
    problems = []
    if columns is not None and isinstance(wide, int) and columns != len(taps) * wide:
        problems.append(f"fc takes {columns} inputs, {len(taps)} taps of {wide} make {len(taps) * wide}")
    text = f"config.json: taps {taps}"
    evidence = [model.setting("target_layer_ids", text)]
    if columns is not None:
        name = "fc.weight_shape" if "fc" in model.facts.quantized else "fc.weight"
        evidence.append(model.tensor(name, f"fc: {columns} inputs = {len(taps)} taps"))
    else:
        problems.append("the weights have no fc")
    findings.facts["drafter.kind"] = Fact("dflash", [model.setting("architectures", "DFlashDraftModel")])
    findings.facts["drafter.architecture.taps"] = Fact(taps, evidence, problems)
    block = read["draft_block_size"]
    findings.facts["drafter.architecture.draft_block_size"] = Fact(
        block, [model.setting("block_size", f"config.json: draft block {block}")]
    )
    findings.facts["drafter.architecture.mask_token_id"] = Fact(
        read["mask_token_id"], [model.setting("mask_token_id", f"mask token {read['mask_token_id']}")]
    )
    stored = {name.split(".")[1] for name in (*model.facts.quantized, *model.facts.plain) if name.startswith("layers.")}
    mlp = _matrix(model, "layers.0.mlp.gate_proj")
    for field, key in _ARCHITECTURE.items():
        if key in config:
            value = config[key]
            trouble = []
            if field == "layers" and value != len(stored):
                trouble.append(f"config.json says {value} layers, the weights have {len(stored)}")
            if field == "hidden_size" and rows is not None and rows != value:
                trouble.append(f"config.json says {value}, fc has {rows} outputs")
            if field == "intermediate_size" and mlp[0] is not None and mlp[0] != value:
                trouble.append(f"config.json says {value}, gate_proj has {mlp[0]} outputs")
            findings.facts[f"drafter.architecture.{field}"] = Fact(
                value, [model.setting(key, f"config.json: {key} {value}")], trouble
            )


def _window(model: Model, read: Mapping[str, Any], findings: Findings) -> None:
    config = model.config or {}
    window, sliding, layers = read["window"], read["window_layers"], read["layers"]
    problems = []
    if sliding and len(sliding) != layers:
        problems.append(f"only layers {sliding} of {layers} have the window")
    second = (config.get("dflash_config") or {}).get("swa_window_size")
    if second is not None and second != window:
        problems.append(f"sliding_window is {window}, dflash_config.swa_window_size is {second}")
    text = f"config.json: window {window}, layers {sliding}" if sliding else "config.json: every layer sees everything"
    evidence = [model.setting("sliding_window" if sliding else "layer_types", text)]
    findings.facts["drafter.swa.window"] = Fact(window, evidence, problems)
    if sliding and read["causal"] is False:
        row = model.setting("causal", "not causal: the window is symmetric for each query")
        findings.facts["drafter.swa.semantics"] = Fact("symmetric-per-query", [row])
    elif sliding:
        row = model.setting("dflash_config", "the window looks back only")
        findings.facts["drafter.swa.semantics"] = Fact("causal", [row])


def _matrix(model: Model, name: str) -> tuple[int | None, int | None]:
    """(out, in) of a Linear, packed or plain; (None, None) if it is not there."""
    if name in model.facts.quantized:
        return model.facts.quantized[name].shape
    for header in model.facts.files.values():
        tensor = header.tensors.get(f"{name}.weight")
        if tensor is not None and len(tensor.shape) == 2:
            return tensor.shape[0], tensor.shape[1]
    return None, None


def find_models(look: Look) -> tuple[list[str], list[str]]:
    """(targets, drafters): folders that hold config.json and safetensors; DFlash drafters by their config."""
    targets, drafters = [], []
    folders = {path.rpartition("/")[0] for path in look.image.files() if path.endswith(".safetensors")}
    for folder in sorted(folders):
        try:
            config = look.json(f"{folder}/config.json")
        except QdcError:
            config = None
        if config is None:
            continue
        try:
            read_drafter_config(config)
            drafters.append(f"/{folder}")
        except QdcError:
            targets.append(f"/{folder}")
    return targets, drafters
