"""What an image leaves to its user, and variables that change what it computes: faults that need no claim.

`serve.start`: nothing is started, so that `docker run IMAGE serve` ends with 127.
`serve.offline`: an argument that is a hub's name where a path in the image should be: offline it cannot start, online
it may drift. `serve.environment`: variables of vLLM that change results and that no document of the image records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qdc.audit.evidence import Fact, Findings, Look, brief

_HUB = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}(@[\w.-]+)?")
_MODELS = ("model", "tokenizer", "chat-template", "hf-config-path")
RESULTS = {
    "VLLM_MARLIN_INPUT_DTYPE": "activations in 8 bits",
    "VLLM_MARLIN_USE_ATOMIC_ADD": "sums in another order",
    "VLLM_FLOAT32_MATMUL_PRECISION": "the precision of float32 products",
    "VLLM_BATCH_INVARIANT": "kernels that do not depend on the batch",
    "VLLM_DISABLED_KERNELS": "which kernels multiply packed weights",
    "VLLM_USE_TRITON_AWQ": "which kernels multiply packed weights",
    "VLLM_GDN_DECODE_KERNEL": "which kernel computes linear attention",
    "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE": "which kernel computes linear attention",
    "VLLM_USE_FLASHINFER_SAMPLER": "which sampler draws tokens",
    "VLLM_USE_V2_MODEL_RUNNER": "which model runner drafts and verifies",
}
"""Read in `envs.py` of vLLM 0.20.1 to 0.33.0: what a variable changes of what is computed."""


def outside_facts(
    look: Look,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    recorded: Mapping[str, Any],
    findings: Findings,
) -> None:
    """Faults among the engine's `arguments` (by name, as they take effect) and the `environment` that it starts in.

    `recorded`: variables that a document of the image names.
    """
    fetched = [f"{name} {value}" for name, value in _named(arguments) if _of_a_hub(look, value)]
    if fetched:
        evidence = [look.configuration(f"{text}: not in the image") for text in fetched]
        findings.fault(
            "serve.offline", Fact(fetched, evidence, [f"{text} is a hub's name, no path" for text in fetched])
        )
    changing = {name: text for name, text in sorted(environment.items()) if name in RESULTS and name not in recorded}
    if changing:
        evidence = [look.configuration(f"ENV {name}={brief(text)}") for name, text in changing.items()]
        problems = [f"{name} changes {RESULTS[name]}, and nothing records it" for name in changing]
        findings.fault("serve.environment", Fact(changing, evidence, problems))


def start_fault(look: Look, findings: Findings) -> None:
    """Neither ENTRYPOINT nor CMD, and no program `serve` on PATH, in an image that holds a model."""
    settings = look.image.settings
    if not look.image.image_id or settings.get("Entrypoint") or settings.get("Cmd"):
        return
    if not any(path.endswith(".safetensors") for path in look.image.files()):
        return
    path = image_environment(look).get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    places = [f"{folder.rstrip('/')}/serve" for folder in path.split(":") if folder]
    found = [entry for place in places if (entry := look.image.find(place)) is not None and entry.mode & 0o111]
    if not found:
        text = "neither ENTRYPOINT nor CMD, and no program serve on PATH: nothing starts"
        findings.fault("serve.start", Fact(None, [look.configuration("Entrypoint and Cmd are empty")], [text]))


def image_environment(look: Look) -> dict[str, str]:
    """ENV of the image's configuration; of a name given twice the last counts."""
    listed = look.image.settings.get("Env")
    items = [item.partition("=") for item in listed if isinstance(item, str)] if isinstance(listed, list) else []
    return {name: text for name, equals, text in items if equals}


def _named(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Arguments that name a model, a tokenizer or a template, also the drafter's."""
    speculation = arguments.get("speculative-config")
    found = [(name, arguments.get(name)) for name in _MODELS]
    if isinstance(speculation, Mapping) and speculation.get("method") not in ("ngram", "suffix"):
        found.append(("speculative-config.model", speculation.get("model")))
    return [(name, value) for name, value in found if isinstance(value, str)]


def _of_a_hub(look: Look, value: str) -> bool:
    """Whether a text has the form of a hub's name and is no file or folder of the image."""
    if _HUB.fullmatch(value) is None or value.endswith((".jinja", ".json")):
        return False
    folder = look.image.settings.get("WorkingDir")
    places = (value, f"{folder}/{value}" if isinstance(folder, str) else value)
    return not any(look.image.find(place) is not None or look.folder(place) for place in places)
