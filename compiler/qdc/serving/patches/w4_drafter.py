"""Engine patch `w4-drafter`: a DFlash drafter in compressed-tensors W4A16 (pack-quantized) loads and drafts.

The engine projects the context for all layers at once by one dense matrix, which it cuts out of the `weight` of each
layer's q, k and v projection; a quantized projection has none, and the engine dies at loading. Up to 0.24.0 the
attention reads the same `weight`. This:
  - gives that matrix the very values which the quantized projection multiplies by, as its answer to the identity
    after the kernel has laid out its weights. Every sum has one term that is not zero, so the answer is the
    dequantized weight to the bit, whatever the kernel stores. It is built once, at the first use (the engine's
    profiling, before any graph is captured), and again after weights are loaded anew. Nothing is quantized again;
    BF16 copies of k and v stay in memory (52 MB for 5 layers of 2 x 1024 x 2560);
  - calls the projection in the attention, where the engine reads its weight (0.22.0 to 0.24.0);
  - tells the drafter's quantization which of its layers are fused, so that `ignore` finds them. (The configuration
    itself does reach the layers in all these versions.)
Nothing of it runs inside a captured graph except the projection, which the engine's other layers call as well.
Loaded by the engine as a general plugin in every process. Ends the process unless the engine is one of the versions
below and every function that is replaced or relied on has the examined source; a drafter that is quantized in another
way is an exception at loading. A drafter that is not quantized is served as without this patch.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

NAME = "w4-drafter"
MODULE = "vllm.model_executor.models.qwen3_dflash"
_QUANTIZATION = "vllm.model_executor.layers.quantization.compressed_tensors"
_EVERY = {
    f"{_QUANTIZATION}.compressed_tensors:CompressedTensorsLinearMethod.apply": (
        "dae6d8d03d4dece7eb5275d34759110ed9489397deb8d587e77d4460874d3075"
    ),
    f"{_QUANTIZATION}.schemes:CompressedTensorsWNA16.apply_weights": (
        "7560e8139c47af3606304a13dd4aee4aaa5ec8f9a7a7f050d73e8001c575ec5f"
    ),
}
_UP_TO_024 = {
    f"{MODULE}:DFlashQwen3Attention.forward": "24601b9c3069990b212563ac16f5e128465f7df3b41248d1bc59073194207751",
    f"{MODULE}:DFlashQwen3Model._build_fused_kv_buffers": (
        "9f3773792f95589258b7a296097d2464a936696c78923d52f62e30c4e320c6ef"
    ),
    f"{MODULE}:DFlashQwen3Model.precompute_and_store_context_kv": (
        "6459b73ca548baf9d30ca7ba64618c1f51b227aafc86e26c3d172aec97e478ff"
    ),
    f"{MODULE}:DFlashQwen3ForCausalLM.load_weights": "c833f9b429e0f940cf02ae8d32ac2511f92dfe8133ab50d91c7c95009817ee67",
    f"{MODULE}:get_draft_quant_config": "ec7c319b4091c873bd92296ba8bfcded67c5db48278c60089ed430936f1b52ee",
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model": (
        "a839ceabfe051b2e5239c190e65eaf2950d85ffcd891384d7cb03bc9f785d49a"
    ),
}
_025 = {
    f"{MODULE}:DFlashQwen3Attention.forward": "6b3ab49ade555c12fddbcde045f11abe602d0b4171624ff96b1081e36e5caba3",
    f"{MODULE}:DFlashQwen3Model._build_context_kv_buffers": (
        "e6c3eaee863438c8bb96b99be438ac5cc95743c207c1dd7c2fd6e9f1a4e70ef8"
    ),
    f"{MODULE}:DFlashQwen3Model._build_fused_kv_buffers": (
        "bdc093254db47a5426756bbfa2b4fbe62f5f666b5411f926ecda191147096120"
    ),
    f"{MODULE}:DFlashQwen3Model.precompute_and_store_context_kv": (
        "bc9ec66b7684ff1360cc2434d594a527f035e8cca4b8b7ba05c00acba8107bbe"
    ),
    f"{MODULE}:DFlashQwen3ForCausalLM.load_weights": "bb34028767d9e301fb9c23604f66e1b8a2b7ccfd2513bce7db0bba96e4ccca12",
    f"{MODULE}:get_draft_quant_config": "af647150664771a7300d89e8fd75375a887182b5f46a0acfd101c4c19dc79fc8",
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model": (
        "820d6f6570faf6236b561512e4263cb6d6fb200a13ae90506afd707e93998a9a"
    ),
}
SOURCES: dict[str, dict[str, str]] = {
    "0.22.0": {**_EVERY, **_UP_TO_024},
    "0.22.1": {**_EVERY, **_UP_TO_024},
    "0.23.0": {**_EVERY, **_UP_TO_024},
    "0.24.0": {**_EVERY, **_UP_TO_024},
    "0.25.0": {**_EVERY, **_025},
    "0.25.1": {**_EVERY, **_025},
}
"""Engine version -> place (`module:name`) -> SHA-256 of the examined source."""
CALLS_THE_PROJECTION = ("0.25.0", "0.25.1")
_LOADING = "_qdc_loading"
_BUILT = "_num_attn_layers"  # the engine's own sign that its buffers are built
log = logging.getLogger(f"vllm.{__name__}")


def apply() -> None:
    """Put the changed functions in place; a second call does nothing. Ends the process where it does not fit."""
    if is_in_place():
        return
    examine()
    engine = importlib.import_module(MODULE)
    _replace(engine, "get_draft_quant_config", _with_fused_names)
    _replace(engine.DFlashQwen3Model, "_build_fused_kv_buffers", _build)
    _replace(engine.DFlashQwen3Model, "precompute_and_store_context_kv", _build_first)
    _replace(engine.DFlashQwen3ForCausalLM, "load_weights", _load)
    if _version() not in CALLS_THE_PROJECTION:
        _replace(engine.DFlashQwen3Attention, "forward", lambda original: attention)
    if not is_in_place():
        stop("the functions could not be replaced")


def is_in_place() -> bool:
    """Whether this process runs the changed functions."""
    if _version() not in SOURCES:
        return False
    engine = importlib.import_module(MODULE)
    try:
        functions = [
            engine.get_draft_quant_config,
            engine.DFlashQwen3Model._build_fused_kv_buffers,
            engine.DFlashQwen3Model.precompute_and_store_context_kv,
            engine.DFlashQwen3ForCausalLM.load_weights,
        ]
        if _version() not in CALLS_THE_PROJECTION:
            functions.append(engine.DFlashQwen3Attention.forward)
    except AttributeError:
        return False
    return all(getattr(function, "__qdc_patch__", None) == NAME for function in functions)


def examine() -> None:
    """End the process unless this engine is a known version whose functions have the examined source."""
    version = _version()
    if version not in SOURCES:
        stop(f"vLLM {version} was not examined; known: {', '.join(SOURCES)}")
    for place, digest in SOURCES[version].items():
        module, _, name = place.partition(":")
        try:
            source = inspect.getsource(attrgetter(name)(importlib.import_module(module)))
        except (AttributeError, ImportError, OSError, TypeError) as error:
            stop(f"vLLM {version}: {place}: {error}")
        found = hashlib.sha256(source.encode()).hexdigest()
        if found != digest:
            stop(f"vLLM {version}: {place} is not the examined source (SHA-256 {found})")


def stop(why: str) -> NoReturn:
    """End the process with one line on stderr."""
    raise SystemExit(f"qdc: the engine patch {NAME} does not fit: {why}")


def dense_weight(projection: Any) -> torch.Tensor:
    """What a quantized linear layer multiplies by: [out, in], in its dtype, after its kernel has its weights.

    Raises RuntimeError where the answer cannot be a weight (not finite, or zero throughout).
    """
    import torch

    device = next(projection.parameters()).device
    identity = torch.eye(projection.input_size, dtype=projection.params_dtype, device=device)
    weight: torch.Tensor = projection.quant_method.apply(projection, identity, None).t()
    if not bool(weight.isfinite().all()) or not bool(weight.any()):
        raise RuntimeError(f"{NAME}: {getattr(projection, 'prefix', 'a projection')} answers the identity by no weight")
    return weight


def attention(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The drafter's attention over its queries, [tokens, hidden]; the projection is called, its weight not read."""
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    q = _by_head(self.q_norm, q, self.head_dim)
    k = _by_head(self.k_norm, k, self.head_dim)
    q, k = self.rotary_emb(positions, q, k)
    output, _ = self.o_proj(self.attn(q, k, v))
    return output


def _by_head(norm: Any, x: torch.Tensor, width: int) -> torch.Tensor:
    heads = x.view(*x.shape[:-1], x.shape[-1] // width, width)
    return norm(heads).view(x.shape)


def _quantized(model: Any) -> list[Any]:
    """The q, k and v projections that are quantized. Raises RuntimeError for another scheme than W4A16."""
    linear = importlib.import_module("vllm.model_executor.layers.linear")
    schemes = importlib.import_module(f"{_QUANTIZATION}.schemes")
    found = []
    for layer in model.layers:
        projection = layer.self_attn.qkv_proj
        if isinstance(projection.quant_method, linear.UnquantizedLinearMethod):
            continue
        scheme = getattr(projection, "scheme", None)
        if not isinstance(scheme, schemes.CompressedTensorsWNA16) or scheme.num_bits != 4:
            raise RuntimeError(f"{NAME}: knows compressed-tensors W4A16, not {type(scheme).__name__}")
        found.append(projection)
    return found


def _build(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """DFlashQwen3Model._build_fused_kv_buffers: for the time of the call each quantized projection has a `weight`."""

    def build(self: Any) -> None:
        projections = _quantized(self)
        if not projections:
            original(self)
            return
        if type(self) is not importlib.import_module(MODULE).DFlashQwen3Model:
            raise RuntimeError(f"{NAME}: knows the DFlash drafter, not {type(self).__name__}")
        if self.__dict__.get(_LOADING):  # the kernels lay out their weights after this
            self.__dict__.pop(_BUILT, None)
            return
        try:
            for projection in projections:
                projection.__dict__["weight"] = dense_weight(projection)
            original(self)
        finally:
            for projection in projections:
                projection.__dict__.pop("weight", None)
        log.info("%s: the context's k and v of %d quantized layers are dense", NAME, len(projections))

    return build


def _build_first(original: Callable[..., None]) -> Callable[..., None]:
    def precompute(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, _BUILT):
            self._build_fused_kv_buffers()
        original(self, *args, **kwargs)

    return precompute


def _load(original: Callable[[Any, Iterable[Any]], Any]) -> Callable[[Any, Iterable[Any]], Any]:
    def load_weights(self: Any, weights: Iterable[Any]) -> Any:
        self.model.__dict__[_LOADING] = True
        try:
            return original(self, weights)
        finally:
            del self.model.__dict__[_LOADING]

    return load_weights


def _with_fused_names(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_draft_quant_config(vllm_config: Any) -> Any:
        config = original(vllm_config)
        if config is not None:
            model = importlib.import_module(MODULE).DFlashQwen3ForCausalLM
            config.packed_modules_mapping = dict(model.packed_modules_mapping)
        return config

    return get_draft_quant_config


def _replace(holder: Any, name: str, change: Callable[[Any], Any]) -> None:
    function: Any = change(getattr(holder, name))
    function.__qdc_patch__ = NAME
    setattr(holder, name, function)


def _version() -> str:
    return str(importlib.import_module("vllm").__version__).split("+")[0]
