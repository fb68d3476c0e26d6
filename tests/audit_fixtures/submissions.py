"""Images laid out as the published submissions of 2026 were: launchers, configuration files and models where they lay.

The launchers here are short programs of our own that read the same variables and start the same engine.
"""

from __future__ import annotations

import json
from typing import Any

from audit_fixtures import models
from audit_fixtures.pieces import Files, Fixture, under

SITE = "usr/local/lib/python3.12/dist-packages"
SIXTH_LAUNCHER = b'''\
#!/usr/bin/env python3
"""Starts vLLM for the contest from the environment."""
import os
import shlex
import sys

words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", os.environ["MODEL_ID"]]
for name, flag in (("TOKENIZER_ID", "--tokenizer"), ("SERVED_MODEL_NAME", "--served-model-name"),
                   ("QUANTIZATION", "--quantization"), ("KV_CACHE_DTYPE", "--kv-cache-dtype"),
                   ("SPECULATIVE_CONFIG", "--speculative-config"), ("MAX_MODEL_LEN", "--max-model-len"),
                   ("MAX_NUM_SEQS", "--max-num-seqs"), ("GPU_MEMORY_UTILIZATION", "--gpu-memory-utilization"),
                   ("DTYPE", "--dtype"), ("CHAT_TEMPLATE", "--chat-template")):
    if os.environ.get(name):
        words += [flag, os.environ[name]]
for name, flag in (("ENABLE_PREFIX_CACHING", "--enable-prefix-caching"),
                   ("LANGUAGE_MODEL_ONLY", "--language-model-only")):
    if os.environ.get(name, "").lower() in ("1", "true", "yes"):
        words.append(flag)
words += shlex.split(os.environ.get("VLLM_EXTRA_ARGS", ""))
os.execv(sys.executable, words)
'''
SIXTH_ENTRYPOINT = b"""\
#!/usr/bin/env bash
set -euo pipefail

# Load per-mode config overrides
[ -f /opt/program/config.sh ] && source /opt/program/config.sh

echo "model=${MODEL_ID:-unset}"
echo "speculative_config=${SPECULATIVE_CONFIG:-none}"
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader || true

"""
SIXTH_START = b"python3 /opt/program/serve_vllm_contest.py\n"
SIXTH_EXEC = (
    b'exec python3 -m vllm.entrypoints.openai.api_server --model "$MODEL_ID" --max-model-len "$MAX_MODEL_LEN" '
    b'--max-num-seqs "${MAX_NUM_SEQS:-1}" --chat-template "$CHAT_TEMPLATE" '
    b'--speculative-config "$SPECULATIVE_CONFIG"\n'
)
DFLASH = {"method": "dflash", "model": "/opt/ml/dflash-model", "num_speculative_tokens": 15}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def ngram(k: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 8, "prompt_lookup_min": 2}


def engine(version: str, files: Files | None = None) -> Files:
    """An installed vLLM, as far as an audit reads it."""
    info = f"{SITE}/vllm-{version}.dist-info"
    return {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode(),
        f"{SITE}/vllm/__init__.py": b"",
        "usr/bin/python3": b"\x7fELF",
        "bin": "usr/bin",
        **(files or {}),
    }


def config_sh(speculation: dict[str, Any], **more: str) -> bytes:
    lines = ["#!/bin/bash", "export MAX_NUM_SEQS=8", "export MAX_MODEL_LEN=13312",
             "export CHAT_TEMPLATE=/opt/program/combined.jinja", f"export SPECULATIVE_CONFIG='{compact(speculation)}'",
             *(f"export {name}={value}" for name, value in more.items())]  # fmt: skip
    return ("\n".join(lines) + "\n").encode()


def sixth(
    *, env: dict[str, Any], sourced: dict[str, Any] | None, tag: str | None = None, start: bytes = SIXTH_EXEC,
    drafter: bool = True, **variables: str,
) -> Fixture:  # fmt: skip
    """The 6th place's layout: ENV in the image, `config.sh` sourced by the entrypoint."""
    program: Files = {
        "opt/program/entrypoint.sh": SIXTH_ENTRYPOINT + start,
        "opt/program/combined.jinja": models.TEMPLATE,
        "opt/program/serve_vllm_contest.py": SIXTH_LAUNCHER,
    }
    if sourced is not None:
        program["opt/program/config.sh"] = config_sh(sourced)
    layers = [engine("0.20.1"), under("opt/ml/model", models.target("awq", group=32))]
    if drafter:
        layers.append(under("opt/ml/dflash-model", models.drafter(window=None, group=None)))
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "MODEL_ID": "/opt/ml/model", "MAX_NUM_SEQS": "8",
        "MAX_MODEL_LEN": "13312", "CHAT_TEMPLATE": "/opt/program/combined.jinja",
        "SPECULATIVE_CONFIG": compact(env), **variables,
    }  # fmt: skip
    settings = {
        "Entrypoint": ["/opt/program/entrypoint.sh"],
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "ExposedPorts": {"8080/tcp": {}},
    }
    return Fixture([*layers, program], settings, tag)


SECOND_LAUNCHER = b'''\
#!/usr/bin/env python3
"""A thin proxy on :8080 in front of vLLM on :8081."""
import json
import os
import shlex
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VLLM_PORT = int(os.environ.get("VLLM_PORT", "8081"))
CHAT_REP_PENALTY = float(os.environ.get("VLLM_CHAT_REP_PENALTY", "1.15"))
THINK_FORCE_ANSWER = os.environ.get("VLLM_THINK_FORCE_ANSWER", "0").strip() == "1"
MODEL_DIR = os.environ.get("MODEL_PATH", "/opt/ml/model")
MODEL_NAME = os.environ.get("MODEL_NAME", "Qwen/Qwen3.5-4B")


def model_path():
    return MODEL_DIR if os.path.isfile(os.path.join(MODEL_DIR, "config.json")) else MODEL_NAME


def start_vllm(path):
    cmd = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path,
           "--served-model-name", "default", "--host", "127.0.0.1", "--port", str(VLLM_PORT),
           "--max-model-len", os.environ.get("VLLM_MAX_MODEL_LEN", "9216"),
           "--dtype", os.environ.get("VLLM_DTYPE", "float16"),
           "--gpu-memory-utilization", os.environ.get("VLLM_GPU_MEMORY_UTILIZATION", "0.90")]
    template = os.path.join(path, "chat_template.jinja")
    if os.path.isfile(template):
        cmd += ["--chat-template", template]
    if os.environ.get("VLLM_LANGUAGE_MODEL_ONLY", "1").lower() in {"1", "true", "yes"}:
        cmd.append("--language-model-only")
    for name, flag in (("VLLM_QUANTIZATION", "--quantization"), ("VLLM_SPEC_CONFIG", "--speculative-config"),
                       ("VLLM_KV_CACHE_DTYPE", "--kv-cache-dtype"),
                       ("VLLM_COMPILATION_CONFIG", "--compilation-config")):
        if os.environ.get(name, "").strip():
            cmd += [flag, os.environ[name].strip()]
    if os.environ.get("VLLM_ENFORCE_EAGER", "0").lower() in {"1", "true", "yes"}:
        cmd.append("--enforce-eager")
    pc = os.environ.get("VLLM_ENABLE_PREFIX_CACHING", "").strip().lower()
    if pc in {"1", "true", "yes"}:
        cmd.append("--enable-prefix-caching")
    elif pc in {"0", "false", "no"}:
        cmd.append("--no-enable-prefix-caching")
    cgs = os.environ.get("VLLM_CUDAGRAPH_CAPTURE_SIZES", "").strip()
    if cgs:
        cmd += ["--cudagraph-capture-sizes"] + cgs.split()
    extra = os.environ.get("VLLM_EXTRA_ARGS", "").strip()
    if extra:
        cmd += shlex.split(extra)
    return subprocess.Popen(cmd)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        data = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        thinking = bool(data.get("thinking", False))
        if "messages" in data and self.path != "/v1/completions":
            payload = {"messages": data["messages"], "temperature": data.get("temperature", 0.0)}
            if thinking and CHAT_REP_PENALTY != 1.0:
                payload["repetition_penalty"] = CHAT_REP_PENALTY
        else:
            payload = {"prompt": data.get("prompt", "")}
        self.wfile.write(json.dumps(payload).encode())


if __name__ == "__main__":
    start_vllm(model_path())
    ThreadingHTTPServer(("0.0.0.0", int(os.environ.get("SERVE_PORT", "8080"))), Handler).serve_forever()
'''
SUFFIX = {"method": "suffix", "num_speculative_tokens": 20, "suffix_decoding_max_tree_depth": 64,
          "suffix_decoding_max_spec_factor": 3.0, "suffix_decoding_min_token_prob": 0.0}  # fmt: skip
PATCHED = b"# pads empty drafts with one real token\nALWAYS = True\n"
ORIGINAL_DIGEST = "b" * 43


def second(*, rows: int = 48, eos: int = 47, tag: str | None = None) -> Fixture:
    """The 2nd place's layout: suffix decoding, a vocabulary cut to `rows`, a patched file of the engine, a proxy."""
    config = models.text_config(vocab_size=rows, eos_token_id=eos)
    tensors = models.tensors_of("awq", group=32, bf16=("q_proj", "k_proj", "v_proj", "o_proj"))
    tensors |= models.plain("model.embed_tokens", rows, models.HIDDEN)
    kept = [name for name in models.LINEARS if name.startswith("self_attn")]
    model = models.folder(tensors, models.declared_awq(keep=kept), config)
    info = f"{SITE}/vllm-0.19.0.dist-info"
    path = "vllm/v1/spec_decode/suffix_decoding.py"
    installed = engine("0.19.0", {
        f"{info}/RECORD": f"{path},sha256={ORIGINAL_DIGEST},512\nvllm/__init__.py,,\n".encode(),
        f"{SITE}/arctic_inference-0.1.1.dist-info/METADATA": b"Name: arctic-inference\nVersion: 0.1.1\n",
    })  # fmt: skip
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "MODEL_PATH": "/opt/ml/model", "SERVE_PORT": "8080",
        "VLLM_PORT": "8081", "VLLM_QUANTIZATION": "awq_marlin", "VLLM_DTYPE": "bfloat16",
        "VLLM_GPU_MEMORY_UTILIZATION": "0.90", "VLLM_MAX_MODEL_LEN": "13312", "VLLM_ENABLE_PREFIX_CACHING": "1",
        "VLLM_SPEC_CONFIG": compact(SUFFIX), "VLLM_THINK_FORCE_ANSWER": "1", "VLLM_CHAT_REP_PENALTY": "1.15",
        "VLLM_CUDAGRAPH_CAPTURE_SIZES": "21 42", "VLLM_EXTRA_ARGS": "",
    }  # fmt: skip
    settings = {
        "Entrypoint": ["python3", "/opt/program/serve_default.py"],
        "Env": [f"{name}={value}" for name, value in variables.items()],
        "WorkingDir": "/opt/program",
    }
    layers: list[Files] = [
        installed,
        under("opt/ml/model", model),
        {f"{SITE}/{path}": PATCHED},
        {"opt/program/serve_default.py": SECOND_LAUNCHER},
    ]
    return Fixture(layers, settings, tag)


THIRD_APP = b'''\
"""A proxy in front of `vllm serve`, which it starts from a YAML file."""
import json
import os
import subprocess

from serving.config import load_config

EQC_PORT = int(os.environ.get("EQC_PORT", "8080"))
VLLM_PORT = int(os.environ.get("EQC_VLLM_INTERNAL_PORT", str(EQC_PORT + 10000)))


def _build_vllm_args(config):
    vllm_args = config.get("vllm_args", {}) or {}
    max_num_seqs = os.environ.get("EQC_VLLM_MAX_NUM_SEQS") or vllm_args.get("max_num_seqs", 1)
    max_model_len = os.environ.get("EQC_VLLM_MAX_MODEL_LEN") or vllm_args.get("max_model_len", 8704)
    args = ["vllm", "serve", str(config["model"]), "--host", "127.0.0.1", "--port", str(VLLM_PORT),
            "--dtype", str(vllm_args.get("dtype", "auto")), "--max-model-len", str(max_model_len),
            "--gpu-memory-utilization", str(os.environ.get("EQC_GPU_MEM_CAP_FRACTION", "0.78")),
            "--max-num-seqs", str(max_num_seqs), "--served-model-name", "Qwen/Qwen3.5-4B"]
    if vllm_args.get("enforce_eager") or os.environ.get("EQC_FORCE_EAGER") == "1":
        args.append("--enforce-eager")
    for key, flag in (("block_size", "--block-size"), ("mamba_block_size", "--mamba-block-size"),
                      ("kv_cache_dtype", "--kv-cache-dtype"), ("attention_backend", "--attention-backend"),
                      ("max_num_batched_tokens", "--max-num-batched-tokens")):
        if key in vllm_args:
            args += [flag, str(vllm_args[key])]
    state = vllm_args.get("mamba_ssm_cache_dtype") or os.environ.get("EQC_MAMBA_SSM_DTYPE")
    if state:
        args += ["--mamba-ssm-cache-dtype", str(state)]
    cache = vllm_args.get("mamba_cache_dtype") or os.environ.get("EQC_MAMBA_DTYPE")
    if cache:
        args += ["--mamba-cache-dtype", str(cache)]
    graphs = vllm_args.get("cudagraph_mode") or os.environ.get("EQC_CUDAGRAPH_MODE")
    if graphs:
        args += ["--compilation-config", json.dumps({"cudagraph_mode": str(graphs)})]
    if vllm_args.get("language_model_only"):
        args.append("--language-model-only")
    if vllm_args.get("enable_chunked_prefill") is False:
        args.append("--no-enable-chunked-prefill")
    if vllm_args.get("enable_prefix_caching") is True:
        args.append("--enable-prefix-caching")
    elif vllm_args.get("enable_prefix_caching") is False:
        args.append("--no-enable-prefix-caching")
    if config.get("quant"):
        args += ["--quantization", str(config["quant"])]
    if config.get("trust_remote_code"):
        args.append("--trust-remote-code")
    if config.get("tokenizer"):
        args += ["--tokenizer", str(config["tokenizer"])]
    chat_template = config.get("chat_template") or os.environ.get("EQC_CHAT_TEMPLATE")
    if chat_template:
        args += ["--chat-template", str(chat_template)]
    spec_cfg = config.get("speculative_config")
    if spec_cfg:
        args += ["--speculative-config", json.dumps(spec_cfg)]
    replicas = os.environ.get("EQC_VLLM_DP_SIZE")
    if replicas:
        args += ["--data-parallel-size", replicas]
    return args


def start():
    return subprocess.Popen(_build_vllm_args(load_config(os.environ.get("EQC_CONFIG_PATH"))))
'''
THIRD_CONFIG = b"""\
import os

_DEFAULT = {"engine": "vllm", "model": "Qwen/Qwen3.5-4B", "quant": None,
            "vllm_args": {"max_model_len": 8704, "enforce_eager": False, "max_num_seqs": 1, "dtype": "auto"}}


def load_config(path):
    if not path or not os.path.isfile(path):
        return dict(_DEFAULT)
    import yaml

    with open(path) as file:
        return {**_DEFAULT, **(yaml.safe_load(file) or {})}
"""
THIRD_MAIN = b"""\
import os


def main():
    import uvicorn

    host, port = os.environ.get("EQC_HOST", "0.0.0.0"), int(os.environ.get("EQC_PORT", "8080"))
    uvicorn.run("serving.app:app", host=host, port=port)


if __name__ == "__main__":
    main()
"""
THIRD_YAML = b"""\
name: dflash_gptq
engine: vllm
model: /opt/eqc/models/target
quant: compressed-tensors
tokenizer: Qwen/Qwen3.5-4B
speculative_config:
  method: dflash
  model: /opt/eqc/models/drafter
  num_speculative_tokens: 15
  quantization: compressed-tensors
vllm_args:
  max_model_len: 8704
  enforce_eager: false
  max_num_seqs: 1
  dtype: auto
  block_size: 32
"""
PLUGIN = b'''\
"""Reads the window of the drafter from the environment and gives it to the engine."""
import os


def register():
    window = int(os.environ.get("EQC_DFLASH_SWA_WINDOW", "0"))
    if window:
        from vllm.model_executor.models import qwen3_dflash

        qwen3_dflash.WINDOW = window
'''


def third(*, path: str = "/opt/eqc/src/configs/serve_dflash_gptq.yaml", window: str | None = "1024") -> Fixture:
    """The 3rd place's layout: a YAML file with a silent default, a plugin, the window in the environment only.

    `path`: what EQC_CONFIG_PATH names.
    """
    info = f"{SITE}/eqc_vllm_plugin-0.1.0.dist-info"
    installed = engine("0.22.1", {
        f"{SITE}/eqc_vllm_plugin/__init__.py": PLUGIN,
        f"{info}/METADATA": b"Name: eqc-vllm-plugin\nVersion: 0.1.0\n",
        f"{info}/entry_points.txt": b"[vllm.general_plugins]\neqc = eqc_vllm_plugin:register\n",
    })  # fmt: skip
    code: Files = {
        "opt/eqc/src/serving/__init__.py": b"",
        "opt/eqc/src/serving/__main__.py": THIRD_MAIN,
        "opt/eqc/src/serving/app.py": THIRD_APP,
        "opt/eqc/src/serving/config.py": THIRD_CONFIG,
        "opt/eqc/src/configs/serve_dflash_gptq.yaml": THIRD_YAML,
    }
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": "/opt/eqc/src", "EQC_CONFIG_PATH": path,
                 "EQC_DFLASH_QUANT_PATCH": "1"}  # fmt: skip
    if window is not None:
        variables["EQC_DFLASH_SWA_WINDOW"] = window
    settings = {
        "Entrypoint": ["python3", "-m", "serving"],
        "Env": [f"{name}={value}" for name, value in variables.items()],
        "WorkingDir": "/opt/eqc",
    }
    layers = [
        installed,
        under("opt/eqc/models/target", models.target("ct", group=32)),
        under("opt/eqc/models/drafter", models.drafter(window=None, group=64)),
        code,
    ]
    return Fixture(layers, settings, "nota:final")
