"""Small inputs of the image's stages: wheels, a packed target, a quantized drafter, and an image of them."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qdc.core.files import sha256_file, write_json
from qdc.core.stage import Context, Report, silent
from qdc.formats import safetensors
from qdc.formats.dflash import drafter_config
from qdc.stages import base_image, image, layer, runtime

SCHEME = {"bits": 4, "group_size": 32, "symmetric": True}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ARCHITECTURE = {
    "kind": "dflash",
    "layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 32,
    "draft_block_size": 8,
    "taps": [0, 1],
    "mask_token": "<|mask|>",
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "init_range": 0.05,
}


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], executable: tuple[str, ...] = ()) -> Path:
    """A wheel with a true RECORD; paths of `files` are as in the wheel."""
    info = f"{name}-{version}.dist-info"
    held = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_urlsafe(data)},{len(data)}" for path, data in held.items()]
    held[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in held.items():
            entry = zipfile.ZipInfo(member)
            entry.external_attr = (0o755 if member in executable else 0o644) << 16
            archive.writestr(entry, data)
    return path


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def lock_of(*wheels: Path) -> str:
    """A lock that pins `wheels` by hash."""
    lines = []
    for path in wheels:
        name, version = path.name.split("-")[:2]
        lines.append(f"{name}=={version} --hash=sha256:{sha256_file(path)}\n")
    return "# pinned\n" + "".join(lines)


def run(module: Any, folder: Path, inputs: dict[str, Path], params: dict[str, Any], report: Report = silent) -> Path:
    """Run a stage module into `folder/output`; the digest of an input is that of its files."""
    for name in ("output", "partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    digests = {role: tree_digest(path) for role, path in inputs.items()}
    module.run(Context(inputs, digests, params, folder / "output", folder / "partial", 1, report))
    return folder / "output"


def tree_digest(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        state.update(f"{path.relative_to(folder).as_posix()} {sha256_file(path)}\n".encode())
    return state.hexdigest()


def target(folder: Path) -> Path:
    """What `pack-target` leaves: one INT4 module, one plain one."""
    ct = folder / "ct"
    ct.mkdir(parents=True)
    tensors: dict[str, tuple[str, list[int], bytes]] = {
        "model.layers.0.mlp.up_proj.weight_packed": ("I32", [32, 4], bytes(range(256)) * 2),
        "model.layers.0.mlp.up_proj.weight_scale": ("BF16", [32, 1], b"\x80\x3f" * 32),
        "model.layers.0.mlp.up_proj.weight_shape": ("I64", [2], (32).to_bytes(8, "little") * 2),
        "model.embed_tokens.weight": ("BF16", [64, 32], b"\x00\x3f" * 2048),
    }
    safetensors.write(ct / "model.safetensors", tensors)
    write_json(ct / "config.json", {"architectures": ["Qwen3_5ForCausalLM"]})
    write_json(ct / "generation_config.json", {"eos_token_id": 2})
    write_json(ct / "tokenizer.json", {"model": {"type": "BPE"}})
    write_json(ct / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": "an old one"})
    (ct / "chat_template.jinja").write_text("another old one")
    write_json(folder / "proof.json", {"roundtrip": {"figure": 0, "pass": True}})
    (folder / "dense").mkdir()
    safetensors.write(folder / "dense" / "model.safetensors", {"a.weight": ("BF16", [1, 1], b"\0\0")})
    return folder


def drafter(folder: Path) -> Path:
    """What `draft-quantize` leaves, as far as the image reads it."""
    folder.mkdir(parents=True)
    config = drafter_config(
        ARCHITECTURE,
        target_layers=4,
        vocab_size=64,
        mask_token_id=3,
        window=None,
        quantization={"scheme": SCHEME, "ignore": []},
    )
    write_json(folder / "config.json", config)
    safetensors.write(folder / "model.safetensors", {"fc.weight_scale": ("BF16", [4, 1], b"\x80\x3f" * 4)})
    safetensors.write(folder / "dense.safetensors", {"fc.weight": ("BF16", [2, 2], b"\x80\x3f" * 4)})
    write_json(folder / "ptq.json", {"method": "gptq", "scheme": SCHEME, "calibration": {"conversations": 64}})
    return folder


def product(k: int = 7, window: int | None = 64) -> dict[str, Any]:
    """Resolved product fields of a recipe that fits `target` and `drafter`."""
    return {
        "target": {
            "base": {"scratch": {}},
            "quantization": {"method": "rtn", "scheme": SCHEME, "ignore": ["lm_head"]},
            "qad": {"trainable": "quantized-weights", "schedule": {"kind": "cosine", "steps": 60}},
        },
        "data": {},
        "drafter": {
            "architecture": ARCHITECTURE,
            "training": [{"name": "pretrain"}],
            "ptq": {"method": "gptq", "scheme": SCHEME, "ignore": []},
            "swa": {"window": window, "semantics": "symmetric-per-query", "apply": "always"} if window else None,
        },
        "serve": {
            "engine": {
                "vllm": "0.32.0",
                "platform": "cpu",
                "prefix_caching": False,
                "patches": ["amx-permission", "expand-sampling", "gdn-short-verify", "torchvision-ops"],
            },
            "k": k,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "dtype": "bfloat16",
            "chat_template": "templates/chatml.jinja",
        },
        "deploy": {"hardware": "cpu", "contract": "adaptfm"},
        "image": {"base": {"scratch": True}},
    }


class Pieces:
    """Outputs of the stages before `image`, made once in `folder`, and all contents by digest."""

    def __init__(self, folder: Path, base: Path | None = None, target: Callable[[Path], Path] = target) -> None:
        self.folder = folder
        self.inputs = {
            "base_image": base or run(base_image, folder / "base", {}, {"scratch": True}),
            "runtime": run(runtime, folder / "runtime", {}, {"lock": "", "python": "3.11"}),
            "target": target(folder / "target"),
            "drafter": drafter(folder / "drafter"),
        }
        for role, where, prefix in (("target", "ct", "target"), ("drafter", ".", "drafter")):
            params = {"folder": where, "prefix": f"opt/models/{prefix}"}
            weights = {"weights": self.inputs[role]}
            self.inputs[f"layer_{role}"] = run(layer, folder / f"layer_{role}", weights, params)

    def image(
        self, name: str, recipe: dict[str, Any] | None = None, template: str = TEMPLATE, without: tuple[str, ...] = ()
    ) -> Path:
        """The output of an `image` stage named `name` here, that lacks the inputs `without`."""
        params = {
            "name": "micro",
            "recipe": recipe or product(),
            "chat_template": template,
            "accepted": [],
            "lock": {},
            "licences": [],
        }
        inputs = {role: path for role, path in self.inputs.items() if role not in without}
        return run(image, self.folder / name, inputs, params)

    def contents(self, *images: Path) -> dict[str, Path]:
        """SHA-256 -> a file with that content, of every file of every folder here."""
        files = [path for folder in (*self.inputs.values(), *images) for path in folder.rglob("*") if path.is_file()]
        return {sha256_file(path): path for path in files}


def documents(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(serve.json, manifest.json) of an image stage's output."""
    serve, manifest = (json.loads((folder / f"{name}.json").read_bytes()) for name in ("serve", "manifest"))
    return serve, manifest
