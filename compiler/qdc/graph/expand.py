"""A resolved recipe to its stage instances: which parameters and inputs each has. Pure.

Each stage gets exactly the fields that it reads, so that a change elsewhere cannot make it stale. That is the
whole of staleness policy: it is decided here, by hand, and tested as a table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qdc.graph.instances import LOCK, Instance
from qdc.graph.table import KINDS
from qdc.tables import engines

Json = dict[str, Any]
SECTIONS = ("drafter", "ptq", "qad", "swa")
"""Whole parts whose absence a manifest states, for an audit to prove."""
DEBIAN_PACKAGES = ("python3", "libgomp1", "libstdc++6", "libnuma1", "ca-certificates")


class Expander:
    """Collects instances in an order in which inputs come first."""

    def __init__(self, recipe: Json, facts: Json) -> None:
        self.recipe, self.facts = recipe, facts
        self.instances: dict[str, Instance] = {}

    def add(self, name: str, kind: str, params: Json, inputs: dict[str, str]) -> str:
        if name not in self.instances:
            row = KINDS[kind]
            versions = self.facts["versions"]
            packages = {package: versions[package] for package in row.packages}
            self.instances[name] = Instance(
                name,
                kind,
                _given(params, SECTIONS if kind == "image" else ()),
                dict(sorted(inputs.items())),
                self.facts["code"][kind],
                packages,
                row.determinism,
                row.environment,
                row.lane,
            )
        return name

    # Data

    def prompts(self, name: str) -> str:
        entry = self.recipe["data"][name]
        inputs = {f"exclude_{index}": self.prompts(other) for index, other in enumerate(entry["exclude"])}
        params = {key: value for key, value in entry.items() if key not in ("exclude", "path")}
        if "path" in entry or "hf_dataset" in entry:
            inputs["source"] = self.source(f"data.{name}")
        return self.add(f"prompts:{name}", "prompts", params, inputs)

    def corpus(self, name: str) -> str:
        entry = self.recipe["data"][name]
        model, folder = self.model(entry["by"])
        params = {key: value for key, value in entry.items() if key not in ("prompts", "chat_template")}
        params |= {"model_folder": folder, "chat_template": self.facts["templates"].get(f"data.{name}")}
        return self.add(f"corpus:{name}", "corpus", params, {"prompts": self.prompts(entry["prompts"]), "model": model})

    def pack(self, name: str, qad: Json) -> str:
        params = {
            "sequence_length": qad["batch"]["sequence_length"],
            "heldout_ratio": qad["heldout_ratio"],
            "seed": qad["seed"],
        }
        return self.add(f"pack:{name}", "pack", params, {"corpus": self.corpus(name), "tokenizer": self.base()})

    # Target

    def model(self, which: str) -> tuple[str, str]:
        """The instance and the folder in it that hold the teacher's or the target's dense BF16 weights."""
        return (self.base(), ".") if which == "teacher" else (self.target(), "dense")

    def source(self, place: str) -> str:
        """The input of what the recipe names at `place`: its tree, or the lock that must name it first."""
        tree = self.facts["sources"].get(place)
        return f"tree:{tree}" if tree else f"{LOCK}{place}"

    def base(self) -> str:
        source = self.recipe["target"]["base"]
        template = self.facts["chat_template"]
        if "scratch" not in source:
            params = {"copy": True, "chat_template": template}
            return self.add("base", "base", params, {"source": self.source("target.base")})
        scratch = source["scratch"]
        training = {key: value for key, value in scratch["training"].items() if key != "data"}
        return self.add(
            "base",
            "base",
            {"scratch": {**scratch, "training": training}, "chat_template": template},
            {"text": self.prompts(scratch["training"]["data"])},
        )

    def grid(self) -> str:
        quantization = self.recipe["target"]["quantization"]
        inputs = {"base": self.base()}
        calibration = quantization["calibration"]
        if calibration is not None:
            inputs["corpus"] = self.corpus(calibration["data"])
            calibration = {key: value for key, value in calibration.items() if key != "data"}
        if quantization["grid"] is not None:
            inputs["published"] = self.source("target.quantization.grid")
        params = {
            "method": quantization["method"],
            "scheme": quantization["scheme"],
            "ignore": quantization["ignore"],
            "calibration": calibration,
        }
        return self.add("quantize", "quantize", params, inputs)

    def target(self) -> str:
        quantization, qad = self.recipe["target"]["quantization"], self.recipe["target"]["qad"]
        inputs = {"base": self.base(), "grid": self.grid()}
        if qad is not None:
            inputs["selected"] = self.select(qad)
        params = {
            "scheme": quantization["scheme"],
            "ignore": quantization["ignore"],
            "trainable": qad["trainable"] if qad else None,
        }
        return self.add("pack-target", "pack-target", params, inputs)

    def served_target(self) -> str:
        """The instance whose folder `ct` the engine is given: in the form of a whole model where it knows no other."""
        engine = self.recipe["serve"]["engine"]
        if engines.value(engine["vllm"], engine["platform"], "text-target") is not False:
            return self.target()
        return self.add("wrap-target", "wrap-target", {}, {"target": self.target()})

    def select(self, qad: Json) -> str:
        trained = {key: value for key, value in qad.items() if key not in ("data", "heldout_ratio", "checkpoints")}
        trained["checkpoints"] = {"every": qad["checkpoints"]["every"]}
        shared = {"teacher": self.base(), "grid": self.grid(), "data": self.pack(qad["data"], qad)}
        distill = self.add("distill", "distill", trained, shared)
        params = {
            **(qad["checkpoints"]["select"] or {}),
            "temperature": qad["loss"]["temperature"],
            "trainable": qad["trainable"],
        }
        return self.add("select", "select", params, {**shared, "checkpoints": distill})

    # Drafter

    def training(self, name: str) -> str:
        drafter = self.recipe["drafter"]
        entry = next(item for item in drafter["training"] if item["name"] == name)
        model, folder = self.model(entry["taps_from"])
        shape = {key: value for key, value in drafter["architecture"].items() if key != "allow_k_mismatch"}
        params = {key: value for key, value in entry.items() if key not in ("name", "data", "from", "init")}
        params |= {"architecture": shape, "model_folder": folder}
        inputs = {"target": model, "data": self.corpus(entry["data"])}
        if entry["from"] is not None:
            inputs["init"] = self.training(entry["from"])
        elif entry["init"] is not None:
            inputs["init"] = self.source(f"drafter.training.{drafter['training'].index(entry)}.init")
        return self.add(f"draft-train:{name}", "draft-train", params, inputs)

    def drafter_chain(self) -> list[tuple[str, str]]:
        """(label, instance) of each drafter state, first to last; the last one is served. Empty for one without
        weights of its own."""
        drafter = self.recipe["drafter"]
        chain = [(entry["name"], self.training(entry["name"])) for entry in drafter["training"] or []]
        if drafter["checkpoint"] is not None:
            chain.append(("published", self.source("drafter.checkpoint")))
        ptq = drafter["ptq"]
        if ptq is not None:
            calibration = ptq["calibration"]
            params = {
                "conversations": calibration["conversations"],
                "anchors": calibration["anchors"],
                "draft_block_size": drafter["architecture"]["draft_block_size"],
                "seed": calibration["seed"],
            }
            calibrate = self.add(
                "calibrate", "calibrate", params, {"corpus": self.corpus(calibration["data"]), "tokenizer": self.base()}
            )
            quantized = {key: ptq[key] for key in ("method", "scheme", "ignore", "damp")}
            chain.append(
                (
                    ptq["method"],
                    self.add(
                        "draft-quantize",
                        "draft-quantize",
                        {**quantized, "model_folder": "dense"},
                        {"drafter": chain[-1][1], "calibration": calibrate, "target": self.target()},
                    ),
                )
            )
        return chain

    # Measurements of stages (figures for the build record; no part of the image)

    def evaluations(self) -> None:
        wanted = self.recipe["evaluate"]
        qad = self.recipe["target"]["qad"]
        quality = wanted["quality"]
        if quality is not None and "data" in quality and qad is not None:
            params = {"prompts": quality["prompts"], "max_tokens": quality["max_tokens"]}
            self.add(
                "evaluate:target",
                "evaluate-target",
                params,
                {
                    "teacher": self.base(),
                    "grid": self.grid(),
                    "target": self.target(),
                    "heldout": self.prompts(quality["data"]),
                    "data": self.pack(qad["data"], qad),
                },
            )
        if self.replayed():
            block = self.recipe["drafter"]["architecture"]["draft_block_size"]
            self.replay("evaluate:drafter", self.drafter_chain(), block - 1, None)

    def replayed(self) -> bool:
        """Whether acceptance of a drafter is to be measured by replay."""
        drafter, acceptance = self.recipe["drafter"], self.recipe["evaluate"]["acceptance"]
        trained = drafter is not None and bool(drafter["training"])
        return trained and acceptance is not None and "data" in acceptance

    def replay(self, name: str, chain: list[tuple[str, str]], k: int, window: int | None) -> str:
        """Acceptance of each drafter of `chain` by replay on held-out prompts."""
        acceptance = self.recipe["evaluate"]["acceptance"]
        params = {
            "prompts": acceptance["prompts"],
            "max_tokens": acceptance["max_tokens"],
            "k": k,
            "window": window,
            "model_folder": "dense",
            "labels": [label for label, _ in chain],
        }
        inputs = {"target": self.target(), "heldout": self.prompts(acceptance["data"])}
        inputs |= {f"drafter_{index}": instance for index, (_, instance) in enumerate(chain)}
        return self.add(name, "evaluate-drafter", params, inputs)

    def served(self) -> str | None:
        """The replay of the served drafter with the served K and window: what a gate compares the engine with."""
        drafter = self.recipe["drafter"]
        if not self.replayed():
            return None
        window = (drafter["swa"] or {}).get("window")
        return self.replay("evaluate:served", self.drafter_chain()[-1:], self.recipe["serve"]["k"], window)

    # Image

    def image(self) -> str:
        base = self.recipe["image"]["base"]
        inputs = {"base_image": self.base_image(base), "target": self.served_target()}
        lock = {"lock": self.facts["serve_lock"] if "debian" in base else "", "python": "3.11"}
        inputs["runtime"] = self.add("runtime", "runtime", lock, {})
        inputs["layer_target"] = self.add(
            "layer:target", "layer", {"folder": "ct", "prefix": "opt/models/target"}, {"weights": self.served_target()}
        )
        if self.recipe["drafter"] is not None and (chain := self.drafter_chain()):
            _, drafter = chain[-1]
            inputs["drafter"] = drafter
            inputs["layer_drafter"] = self.add(
                "layer:drafter", "layer", {"folder": ".", "prefix": "opt/models/drafter"}, {"weights": drafter}
            )
        params = {
            "name": self.recipe["name"],
            "recipe": _given(self.product(), SECTIONS),
            "chat_template": self.facts["chat_template"],
            "accepted": self.recipe["accept"],
            "lock": self.facts["pins"],
            "licences": self.facts["licences"],
        }
        return self.add("image", "image", params, inputs)

    def base_image(self, base: Json) -> str:
        """What the image stands on: made here, or given and taken as it is."""
        if "scratch" in base:
            return self.add("base-image", "base-image", base, {})
        if "debian" in base:
            params = {**_given(base), "packages": sorted(DEBIAN_PACKAGES)}
            return self.add("base-image", "base-image", params, {})
        return self.add("base-image", "given-base", {}, {"source": self.source("image.base")})

    def product(self) -> Json:
        """The fields of the recipe that describe what the image holds and how it serves; sources by digest."""
        product = {key: self.recipe[key] for key in ("target", "data", "drafter", "serve", "deploy", "image")}
        for place, tree in self.facts["trees"].items():
            product = _replaced(product, place.split("."), {"tree": tree})
        return product


def _replaced(value: Any, path: list[str], by: Any) -> Any:
    """`value` with `by` at `path`."""
    if not path:
        return by
    if isinstance(value, list):
        index = int(path[0])
        return [_replaced(inner, path[1:], by) if at == index else inner for at, inner in enumerate(value)]
    return {**value, path[0]: _replaced(value[path[0]], path[1:], by)}


def _given(value: Any, kept: tuple[str, ...] = ()) -> Any:
    """Without the fields that are null, but those `kept`: an absent field and a null one are the same recipe."""
    if isinstance(value, dict):
        return {key: _given(inner, kept) for key, inner in value.items() if inner is not None or key in kept}
    return [_given(inner, kept) for inner in value] if isinstance(value, list) else value


def expand(recipe: Json, facts: Json) -> list[Instance]:
    """All stage instances that building a recipe needs, inputs first.

    `facts`: {code: kind -> digest, versions: package -> locked version, chat_template: text, serve_lock: text,
    templates: recipe path of a corpus -> text of its own chat template, sources: recipe path of a source -> tree
    digest, trees: the same for the user's own folders, which a manifest names by digest alone, pins: the same for
    what the lock pins, licences: {source, licence} of each checkpoint whose bytes enter the image}.
    """
    expander = Expander(recipe, facts)
    expander.image()
    expander.evaluations()
    return list(expander.instances.values())


def served(recipe: Json, facts: Json, outputs: dict[str, str]) -> Instance | None:
    """The replay that a gate compares the engine with, on the artifacts of a build that is done.

    `outputs`: instance name -> tree digest, as the build record has them. None without a drafter to measure.
    """
    expander = Expander(recipe, facts)
    name = expander.served()
    if name is None:
        return None
    instance = expander.instances[name]
    return replace(instance, inputs={role: f"tree:{outputs[source]}" for role, source in instance.inputs.items()})
