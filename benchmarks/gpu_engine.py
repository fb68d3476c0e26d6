"""What runs in one process of `gpu_patches.py`: an engine in-process, with hooks, and what it did as tensors.

The hooks are on the engine's classes for DFlash (vLLM 0.25.1): they look on and change nothing. Knows no verdicts.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gpu_models import MASK, K, context_weight, read

MAX_LENGTH = 8704
SHAPES = ((64, 128), (2048, 256), (8192, 256))
TOKENS = 40


def start(work: Path, drafter: str, synthetic: float | None = None) -> tuple[Any, float]:
    """(LLM, seconds to start it). The target is random but the same in each process."""
    began = time.perf_counter()
    from vllm import LLM
    from vllm.config import LoadConfig

    make_up_the_target()
    speculation: dict[str, Any] = {
        "method": "dflash",
        "model": str(work / drafter),
        "num_speculative_tokens": K,
        "attention_backend": "FLASH_ATTN",
        "draft_load_config": LoadConfig(load_format="safetensors"),
    }
    if synthetic is not None:
        speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": synthetic}
    engine = LLM(
        model=str(work / "target"),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=MAX_LENGTH,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_LENGTH,
        enable_prefix_caching=False,
        language_model_only=True,
        limit_mm_per_prompt={"image": 0, "video": 0},
        gdn_prefill_backend="triton",
        compilation_config={"cudagraph_capture_sizes": [1, K + 1]},
        kv_cache_memory_bytes=8 << 30,
        gpu_memory_utilization=0.5,
        speculative_config=speculation,
        seed=0,
    )
    return engine, time.perf_counter() - began


def make_up_the_target() -> None:
    """The engine's own dummy weights are near zero, and packed ones are whatever lay in memory. These are sane."""
    from vllm.model_executor.model_loader import dummy_loader

    number = 0

    @torch.no_grad()
    def fill(layer: torch.nn.Module, _model_config: Any, *_: Any) -> None:
        nonlocal number
        for name, parameter in layer._parameters.items():
            if parameter is None or parameter.device.type == "meta":
                continue
            number += 1
            data = parameter.data
            generator = torch.Generator(data.device).manual_seed(number)
            if name.endswith("weight_packed"):
                data.copy_(
                    torch.randint(
                        -(2**31), 2**31, data.shape, generator=generator, device=data.device, dtype=torch.int64
                    ).to(torch.int32)
                )
            elif name.endswith("weight_scale"):
                data.fill_(0.02 / 4.6)  # codes from -8 to 7 have a deviation of 4.6
            elif not torch.is_floating_point(data):
                continue
            elif data.dim() == 1:
                if type(layer).__name__.endswith("NormGated"):
                    data.fill_(1.0)
                else:
                    data.uniform_(-1e-3, 1e-3, generator=generator)
            else:
                data.normal_(0, 0.3 if data.dim() == 3 else 0.02, generator=generator)

    dummy_loader.initialize_dummy_weights = fill


def prompt(length: int) -> list[int]:
    return torch.randint(1000, 200000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def generate(engine: Any, length: int, tokens: int, **sampling: Any) -> Any:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
    return engine.generate({"prompt_token_ids": prompt(length)}, parameters, use_tqdm=False)[0].outputs[0]


class Watch:
    """What the drafter was given and gave, step by step, since `begin`."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.modes: Counter[str] = Counter()
        self.windows: Counter[str] = Counter()
        self.facts: dict[str, Any] = {}
        self.model: Any = None
        self.on = False
        self._propose()
        self._sample()
        self._mode()
        self._attention()

    def begin(self) -> None:
        self.steps, self.modes, self.windows, self.on = [], Counter(), Counter(), True

    def _propose(self) -> None:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

        original = Proposer.propose

        def propose(proposer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return original(proposer, *args, **kwargs)
            step: dict[str, Any] = {}
            if not self.steps:
                following = kwargs["next_token_ids"]
                ids = torch.tensor([int(following[0]), MASK], device=following.device)
                step["taps"] = kwargs["target_hidden_states"].clone().cpu()
                step["embedded"] = proposer.model.embed_input_ids(ids).clone().cpu()
                self.model = proposer.model
                self.facts = cache_facts(proposer)
            step["anchor"] = int(kwargs["next_token_ids"][0])
            self.steps.append(step)
            drafted = original(proposer, *args, **kwargs)
            step["drafted"] = drafted[0].tolist()
            return drafted

        Proposer.propose = propose

    def _sample(self) -> None:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

        original = Proposer._sample_draft_tokens

        def sample(proposer: Any, hidden: torch.Tensor, *rest: Any) -> Any:
            if self.on and self.steps:
                logits = proposer.model.compute_logits(hidden).float()
                top = logits.topk(8, dim=-1)
                self.steps[-1] |= {"hidden": hidden.float().cpu(), "top": top.values.cpu(), "ids": top.indices.cpu()}
            return original(proposer, hidden, *rest)

        Proposer._sample_draft_tokens = sample

    def _mode(self) -> None:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

        original = Proposer._determine_batch_execution_and_padding

        def determine(proposer: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(proposer, *args, **kwargs)
            if self.on:
                self.modes[found[0].name] += 1
            return found

        Proposer._determine_batch_execution_and_padding = determine

    def _attention(self) -> None:
        from vllm.v1.attention.backends import flash_attn

        original = flash_attn.flash_attn_varlen_func

        def attend(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                who = "target" if kwargs.get("causal") else "drafter"
                size = kwargs.get("window_size")
                self.windows[f"{who} {kwargs['max_seqlen_k']} {tuple(size) if size is not None else None}"] += 1
            return original(*args, **kwargs)

        flash_attn.flash_attn_varlen_func = attend


def cache_facts(proposer: Any) -> dict[str, Any]:
    layers = proposer.vllm_config.compilation_config.static_forward_context
    specs = {
        type(layers[name].get_kv_cache_spec(proposer.vllm_config)).__name__ for name in proposer._draft_attn_layer_names
    }
    impl = layers[next(iter(proposer._draft_attn_layer_names))].impl
    return {
        "kv_specs": sorted(specs),
        "attention": type(impl).__name__,
        "flash_attention": getattr(impl, "vllm_flash_attn_version", None),
        "kernel": linear_kernel(proposer.model),
    }


def linear_kernel(model: Any) -> str:
    projection = model.model.layers[0].self_attn.qkv_proj
    scheme = getattr(projection, "scheme", None)
    return type(scheme.kernel).__name__ if scheme is not None else type(projection.quant_method).__name__


def drafts(work: Path, drafter: str, lengths: list[int], name: str) -> dict[str, Any]:
    """Start, generate greedily for prompts of `lengths`, write what the drafter did to WORK/NAME.pt."""
    watch = Watch()
    engine, seconds = start(work, drafter)
    found: dict[str, Any] = {"start_s": round(seconds, 1), "vllm": version(), "runs": {}}
    kept = {}
    for length in lengths:
        watch.begin()
        output = generate(engine, length, TOKENS, logprobs=2)
        watch.on = False
        logprobs = [{int(i): float(p.logprob) for i, p in at.items()} for at in output.logprobs]
        kept[length] = {"tokens": list(output.token_ids), "logprobs": logprobs, "steps": watch.steps}
        found["runs"][length] = {
            "steps": len(watch.steps),
            "graph_modes": dict(watch.modes),
            "attention": dict(watch.windows),
            "distinct_tokens": len(set(output.token_ids)),
        }
    found |= watch.facts
    if drafter.startswith("w4") and hasattr(watch.model.model, "_fused_kv_weight"):
        wanted = context_weight(read(work / drafter / "model.safetensors"))
        has = watch.model.model._fused_kv_weight.cpu()
        found["context_weight_is_the_dequantized"] = bool(has.dtype == wanted.dtype and torch.equal(has, wanted))
        found["context_weight_shape"] = list(has.shape)
    found["patches"] = in_place()
    torch.save(kept, work / f"{name}.pt")
    return found


def latency(work: Path, drafter: str) -> dict[str, Any]:
    """Median of 5 in ms of one request at a time, as if the acceptance length were 5."""
    engine, seconds = start(work, drafter, synthetic=5.0)
    found: dict[str, Any] = {"start_s": round(seconds, 1), "patches": in_place(), "ms": {}}
    for prompted, tokens in SHAPES:
        times = []
        for _ in range(7):
            began = time.perf_counter()
            output = generate(engine, prompted, tokens)
            times.append(1000 * (time.perf_counter() - began))
            if len(output.token_ids) != tokens:
                raise RuntimeError(f"{len(output.token_ids)} tokens, {tokens} were asked for")
        times = times[2:]
        found["ms"][f"{prompted}/{tokens}"] = {
            "median": round(statistics.median(times), 1),
            "all": [round(t, 1) for t in times],
        }
    return found


def in_place() -> dict[str, bool]:
    """Patch -> what its own marker says in this process."""
    import importlib.metadata
    import sys

    return {
        point.name: bool(sys.modules[point.module].is_in_place())
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.module in sys.modules
    }


def version() -> str:
    import vllm

    return f"{vllm.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}"


def alter(what: str) -> None:
    """Make this process's engine one that the patches do not know."""
    import vllm

    if what == "version":
        vllm.__version__ = "0.26.0"
    elif what == "class":
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

        DFlashQwen3Model._build_fused_kv_buffers = lambda self: None
    else:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

        FlashAttentionImpl.forward = lambda self, *args, **kwargs: None
