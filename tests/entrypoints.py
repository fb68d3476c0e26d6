"""Small entrypoints and launchers laid out as published submissions were: texts of our own with the same names.

`SIXTH`: ENV against a sourced `config.sh`; `SECOND`: suffix decoding from one variable, read by a proxy; `THIRD`: a
YAML file that a variable names, a plugin that takes the window from another one. Each is path -> text, and the
variables of ENV. The launchers run: `tests/test_audit_effective.py` holds the declared ones against them.
"""

from __future__ import annotations

import json
from typing import Any

DFLASH = {"method": "dflash", "model": "/opt/ml/dflash-model", "num_speculative_tokens": 15}
NGRAM = {"method": "ngram", "num_speculative_tokens": 20, "prompt_lookup_max": 8, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 20, "suffix_decoding_max_tree_depth": 64,
          "suffix_decoding_max_spec_factor": 3.0, "suffix_decoding_min_token_prob": 0.0}  # fmt: skip


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


SIXTH_ENTRY = """#!/usr/bin/env bash
set -euo pipefail

# Settings of this mode
[ -f /opt/program/config.sh ] && source /opt/program/config.sh

echo "model=${MODEL_ID:-unset}"
nvidia-smi --query-gpu=name --format=csv,noheader || true

python3 /opt/program/serve_vllm_contest.py
"""
SIXTH_LAUNCHER = '''"""Starts the engine from the environment."""
import os
import subprocess
import sys

words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", os.environ["MODEL_ID"]]
for name, option in (("SPECULATIVE_CONFIG", "--speculative-config"), ("MAX_MODEL_LEN", "--max-model-len"),
                     ("MAX_NUM_SEQS", "--max-num-seqs"), ("DTYPE", "--dtype")):
    if os.environ.get(name):
        words += [option, os.environ[name]]
if __name__ == "__main__":
    subprocess.Popen(words).wait()
'''


def sixth(env: dict[str, Any], sourced: dict[str, Any] | None) -> tuple[dict[str, str], list[str]]:
    """ENV says `env`, config.sh says `sourced` (no such file: None)."""
    files = {"opt/program/entrypoint.sh": SIXTH_ENTRY, "opt/program/serve_vllm_contest.py": SIXTH_LAUNCHER}
    if sourced is not None:
        files["opt/program/config.sh"] = (
            "#!/bin/bash\nexport MAX_NUM_SEQS=8\nexport MAX_MODEL_LEN=13312\n"
            f"export SPECULATIVE_CONFIG='{compact(sourced)}'\n"
        )
    return files, ["PATH=/usr/bin:/bin", "MODEL_ID=/opt/ml/model", "DTYPE=half", "MAX_NUM_SEQS=8",
                   "MAX_MODEL_LEN=8448", f"SPECULATIVE_CONFIG={compact(env)}"]  # fmt: skip


SECOND_LAUNCHER = '''"""A proxy in front of the engine."""
import os
import shlex
import subprocess
import sys

PORTS = os.environ.get("SERVE_PORT", "8080"), os.environ.get("VLLM_PORT", "8081")
MODEL_DIR = os.environ.get("MODEL_PATH", "/opt/ml/model")


def start(model):
    cmd = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name",
           "default", "--host", "127.0.0.1", "--port", PORTS[1],
           "--max-model-len", os.environ.get("VLLM_MAX_MODEL_LEN", "9216"),
           "--dtype", os.environ.get("VLLM_DTYPE", "float16"),
           "--gpu-memory-utilization", os.environ.get("VLLM_GPU_MEMORY_UTILIZATION", "0.90")]
    template = os.path.join(model, "chat_template.jinja")
    if os.path.isfile(template):
        cmd += ["--chat-template", template]
    if os.environ.get("VLLM_LANGUAGE_MODEL_ONLY", "1").lower() in {"1", "true", "yes"}:
        cmd.append("--language-model-only")
    for name, option in (("VLLM_QUANTIZATION", "--quantization"), ("VLLM_SPEC_CONFIG", "--speculative-config"),
                         ("VLLM_KV_CACHE_DTYPE", "--kv-cache-dtype")):
        if os.environ.get(name, "").strip():
            cmd += [option, os.environ[name].strip()]
    caching = os.environ.get("VLLM_ENABLE_PREFIX_CACHING", "").strip().lower()
    if caching in {"1", "true", "yes"}:
        cmd.append("--enable-prefix-caching")
    elif caching in {"0", "false", "no"}:
        cmd.append("--no-enable-prefix-caching")
    if os.environ.get("VLLM_ENFORCE_EAGER", "0").lower() in {"1", "true", "yes"}:
        cmd.append("--enforce-eager")
    sizes = os.environ.get("VLLM_CUDAGRAPH_CAPTURE_SIZES", "").strip()
    if sizes:
        cmd += ["--cudagraph-capture-sizes"] + sizes.split()
    if os.environ.get("VLLM_COMPILATION_CONFIG", "").strip():
        cmd += ["--compilation-config", os.environ["VLLM_COMPILATION_CONFIG"].strip()]
    cmd += shlex.split(os.environ.get("VLLM_EXTRA_ARGS", "").strip())
    return subprocess.Popen(cmd)


if __name__ == "__main__":
    there = os.path.isfile(os.path.join(MODEL_DIR, "config.json"))
    start(MODEL_DIR if there else os.environ.get("MODEL_NAME", "Qwen/Qwen3.5-4B"))
'''


def second() -> tuple[dict[str, str], list[str]]:
    variables = {
        "PATH": "/usr/bin:/bin", "MODEL_PATH": "/opt/ml/model", "VLLM_QUANTIZATION": "awq_marlin",
        "VLLM_DTYPE": "bfloat16", "VLLM_MAX_MODEL_LEN": "13312", "VLLM_ENABLE_PREFIX_CACHING": "1",
        "VLLM_SPEC_CONFIG": compact(SUFFIX), "VLLM_CUDAGRAPH_CAPTURE_SIZES": "21 42", "VLLM_EXTRA_ARGS": "",
    }  # fmt: skip
    return {"opt/program/serve_default.py": SECOND_LAUNCHER}, [f"{k}={v}" for k, v in variables.items()]


THIRD_APP = '''"""A proxy in front of `vllm serve`, which a YAML file configures."""
import json
import os
import subprocess

from serving.config import load_config

PORT = int(os.environ.get("EQC_PORT", "8080"))
INNER = os.environ.get("EQC_VLLM_INTERNAL_PORT", str(PORT + 10000))


def words_of(config):
    inner = config.get("vllm_args", {}) or {}
    length = os.environ.get("EQC_VLLM_MAX_MODEL_LEN") or inner.get("max_model_len", 8704)
    seqs = os.environ.get("EQC_VLLM_MAX_NUM_SEQS") or inner.get("max_num_seqs", 1)
    args = ["vllm", "serve", str(config["model"]), "--host", "127.0.0.1", "--port", INNER,
            "--dtype", str(inner.get("dtype", "auto")), "--max-model-len", str(int(length)),
            "--gpu-memory-utilization", os.environ.get("EQC_GPU_MEM_CAP_FRACTION", "0.78"),
            "--max-num-seqs", str(int(seqs)), "--served-model-name", "Qwen/Qwen3.5-4B"]
    if inner.get("enforce_eager") or os.environ.get("EQC_FORCE_EAGER") == "1":
        args.append("--enforce-eager")
    for key, option in (("block_size", "--block-size"), ("mamba_block_size", "--mamba-block-size"),
                        ("kv_cache_dtype", "--kv-cache-dtype"), ("attention_backend", "--attention-backend"),
                        ("max_num_batched_tokens", "--max-num-batched-tokens")):
        if key in inner:
            args += [option, str(inner[key])]
    for key, name, option in (("mamba_ssm_cache_dtype", "EQC_MAMBA_SSM_DTYPE", "--mamba-ssm-cache-dtype"),
                              ("mamba_cache_dtype", "EQC_MAMBA_DTYPE", "--mamba-cache-dtype")):
        value = inner.get(key) or os.environ.get(name)
        if value:
            args += [option, str(value)]
    mode = inner.get("cudagraph_mode") or os.environ.get("EQC_CUDAGRAPH_MODE")
    if mode:
        args += ["--compilation-config", json.dumps({"cudagraph_mode": str(mode)})]
    if inner.get("language_model_only"):
        args.append("--language-model-only")
    if inner.get("enable_chunked_prefill") is False:
        args.append("--no-enable-chunked-prefill")
    if inner.get("enable_prefix_caching") is True:
        args.append("--enable-prefix-caching")
    elif inner.get("enable_prefix_caching") is False:
        args.append("--no-enable-prefix-caching")
    if config.get("quant"):
        args += ["--quantization", str(config["quant"])]
    if config.get("trust_remote_code"):
        args.append("--trust-remote-code")
    if config.get("tokenizer"):
        args += ["--tokenizer", str(config["tokenizer"])]
    template = config.get("chat_template") or os.environ.get("EQC_CHAT_TEMPLATE")
    if template:
        args += ["--chat-template", str(template)]
    speculation = config.get("speculative_config")
    if speculation:
        args += ["--speculative-config", json.dumps(speculation) if isinstance(speculation, dict) else speculation]
    if os.environ.get("EQC_VLLM_DP_SIZE"):
        args += ["--data-parallel-size", os.environ["EQC_VLLM_DP_SIZE"]]
    return args


def start():
    if os.environ.get("EQC_USE_STUB") != "1":
        subprocess.Popen(words_of(load_config(os.environ.get("EQC_CONFIG_PATH"))))
'''
THIRD_CONFIG = '''"""Settings from a YAML file, over defaults."""
import os

DEFAULT = {"engine": "vllm", "model": "Qwen/Qwen3.5-4B", "quant": None,
           "vllm_args": {"max_model_len": 8704, "enforce_eager": False, "max_num_seqs": 1, "dtype": "auto"}}


def merged(base, over):
    found = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def load_config(path):
    if not path or not os.path.isfile(path):
        return dict(DEFAULT)
    import yaml

    with open(path) as file:
        loaded = yaml.safe_load(file) or {}
    return merged(DEFAULT, loaded) if isinstance(loaded, dict) else dict(DEFAULT)
'''
THIRD_PLUGIN = '''"""A plugin of the engine: the drafter's window."""
import os


def register():
    window = os.environ.get("EQC_DFLASH_SWA_WINDOW")
    static = os.environ.get("EQC_DFLASH_SWA_STATIC") == "1"
    return int(window), static
'''
THIRD_YAML = """name: dflash_gptq
engine: vllm
model: /opt/ml/model
quant: compressed-tensors
speculative_config:
  method: dflash
  model: /opt/ml/dflash-model
  num_speculative_tokens: 15
vllm_args:
  max_model_len: 8704
  enforce_eager: false
  max_num_seqs: 1
  dtype: auto
"""


def third(**variables: str) -> tuple[dict[str, str], list[str]]:
    files = {
        "opt/eqc/serving/__init__.py": "", "opt/eqc/serving/app.py": THIRD_APP,
        "opt/eqc/serving/config.py": THIRD_CONFIG, "opt/eqc/serve.yaml": THIRD_YAML,
        "usr/lib/python3/site-packages/eqc_vllm_plugin/__init__.py": THIRD_PLUGIN,
    }  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/opt/eqc", "EQC_CONFIG_PATH": "/opt/eqc/serve.yaml"} | variables
    return files, [f"{name}={value}" for name, value in env.items()]
