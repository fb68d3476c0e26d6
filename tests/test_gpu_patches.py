"""The engine patches for GPUs without an engine: a stand-in of its modules, its versions, and the arithmetic."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qdc.methods import dflash, grid, packing
from qdc.serving.patches import swa_above_window as swa
from qdc.serving.patches import w4_drafter as w4
from qdc.tables import patches as table

PATCHES = [w4, swa]
FILES = {
    "__init__": "__version__ = {version!r}\n",
    "v1.attention.backend": "class AttentionMetadataBuilder:\n    def build_for_drafting(self): ...\n",
    "v1.attention.backends.flash_attn": """
class FlashAttentionImpl:
    def __init__(self):
        self.sliding_window = (-1, -1)
        self.seen = []
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None):
        if query == "fails":
            raise ValueError
        if attn_metadata is not None:
            self.seen.append(getattr(attn_metadata, "sliding_window", self.sliding_window))
        return output
class FlashAttentionMetadataBuilder:
    def build(self): ...
""",
    "v1.spec_decode.dflash": "class DFlashProposer:\n    def set_inputs_first_pass(self): ...\n",
    "model_executor.model_loader.base_loader": "class BaseModelLoader:\n    def load_model(self): ...\n",
    "model_executor.layers.linear": "class UnquantizedLinearMethod: ...\n",
    "model_executor.layers.quantization.compressed_tensors.compressed_tensors": """
class CompressedTensorsLinearMethod:
    def apply(self, layer, x, bias):
        return layer.scheme.apply_weights(layer, x, bias)
""",
    "model_executor.layers.quantization.compressed_tensors.schemes": """
class CompressedTensorsWNA16:
    num_bits = 4
    def apply_weights(self, layer, x, bias):
        return (x.float() @ layer.laid_out().float()).to(x.dtype)
""",
    "model_executor.models.qwen3_dflash": """
import torch
from torch.nn import Module
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
def get_draft_quant_config(vllm_config):
    return vllm_config
def _resolve_layer_attention(config, layer_idx):
    return config.engine_says
class DFlashQwen3Attention(Module):
    def forward(self, positions, hidden_states):
        return hidden_states @ self.qkv_proj.weight.T
class DFlashQwen3DecoderLayer:
    def __init__(self, vllm_config, *, config, layer_idx):
        window = _resolve_layer_attention(config, layer_idx)[0] if hasattr(config, "engine_says") else None
        self.self_attn = Module()
        self.self_attn.attn = Module()
        self.self_attn.attn.impl = FlashAttentionImpl()
        self.self_attn.attn.sliding_window = window
class DFlashQwen3Model(Module):
    def _build_context_kv_buffers(self, layers_attn, has_bias):
        self.fused = torch.cat([a.qkv_proj.weight[a.q_size :] for a in layers_attn])
    def _build_fused_kv_buffers(self):
        self._build_context_kv_buffers([layer.self_attn for layer in self.layers], False)
        self._num_attn_layers = len(self.layers)
    def precompute_and_store_context_kv(self, states):
        return states @ self.fused.T
class DFlashQwen3ForCausalLM(Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    def load_weights(self, weights):
        for projection in weights:
            projection.reset()
        self.model._build_fused_kv_buffers()
""",
}


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture(params=["0.22.1", "0.25.1"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in under the name `vllm`, whose functions count as the examined ones."""
    for name, text in FILES.items():
        place = tmp_path / "vllm" / (name.replace(".", "/") + ".py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text.replace("{version!r}", repr(request.param)).lstrip())
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    importlib.invalidate_caches()
    for patch in PATCHES:
        monkeypatch.setattr(patch, "SOURCES", {request.param: digests(patch, request.param)})
    yield importlib.import_module(w4.MODULE)
    forget()


def digests(patch: Any, version: str) -> dict[str, str]:
    """As `SOURCES` has them, of the stand-in's functions."""
    found = {}
    for place in patch.SOURCES[version]:
        module, _, name = place.partition(":")
        source = inspect.getsource(attrgetter(name)(importlib.import_module(module)))
        found[place] = hashlib.sha256(source.encode()).hexdigest()
    return found


class Projection(torch.nn.Module):
    """A W4A16 layer whose kernel stores its weights transposed and in another order, once it has laid them out."""

    def __init__(self, outputs: int, inputs: int, seed: int, group: int = 32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(outputs, inputs, generator=generator).to(torch.bfloat16)
        self.scale = grid.absmax_scale(weight, group)
        self.codes = grid.encode(weight, self.scale)
        self.weight_packed = torch.nn.Parameter(packing.pack_codes(self.codes), requires_grad=False)
        self.order = torch.randperm(inputs, generator=generator)
        self.input_size, self.params_dtype, self.ready = inputs, torch.bfloat16, False
        self.scheme = module("model_executor.layers.quantization.compressed_tensors.schemes").CompressedTensorsWNA16()
        methods = module("model_executor.layers.quantization.compressed_tensors.compressed_tensors")
        self.quant_method = methods.CompressedTensorsLinearMethod()

    def reset(self) -> None:
        self.ready = False

    def lay_out(self) -> None:
        self.stored = grid.decode(packing.unpack_codes(self.weight_packed.data), self.scale)[:, self.order]
        self.ready = True

    def laid_out(self) -> torch.Tensor:
        assert self.ready, "the kernel was asked before it had its weights"
        return self.stored[:, self.order.argsort()].T

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.quant_method.apply(self, x, None), None


def module(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")


def drafter(engine: Any, projections: list[Any], q_size: int = 32) -> Any:
    model = engine.DFlashQwen3ForCausalLM()
    model.model = engine.DFlashQwen3Model()
    layers = []
    for projection in projections:
        layer = torch.nn.Module()
        layer.self_attn = engine.DFlashQwen3Attention()
        layer.self_attn.qkv_proj, layer.self_attn.q_size = projection, q_size
        layers.append(layer)
    model.model.layers = torch.nn.ModuleList(layers)
    return model


# What the patches know


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.NAME)
def test_the_table_of_patches_names_exactly_the_versions_that_were_examined(patch: Any) -> None:
    row = table.row(patch.NAME)
    assert row is not None and (row.first, row.last) == (min(patch.SOURCES), max(patch.SOURCES))
    assert list(patch.SOURCES) == ["0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1"]
    for places in patch.SOURCES.values():
        assert places and all(len(digest) == 64 and int(digest, 16) for digest in places.values())


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.NAME)
def test_a_patch_is_put_in_place_once_and_says_so(engine: Any, patch: Any) -> None:
    assert not patch.is_in_place()
    patch.apply()
    assert patch.is_in_place()
    before = engine.DFlashQwen3Model._build_fused_kv_buffers, engine.DFlashQwen3DecoderLayer.__init__
    patch.apply()
    assert (engine.DFlashQwen3Model._build_fused_kv_buffers, engine.DFlashQwen3DecoderLayer.__init__) == before


def test_both_patches_fit_together_in_either_order(engine: Any) -> None:
    for patch in (*PATCHES, *PATCHES[::-1]):
        patch.apply()
    assert all(patch.is_in_place() for patch in PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.NAME)
@pytest.mark.parametrize("version", ["0.21.0", "0.26.0", "0.25.1rc1"])
def test_a_version_that_was_not_examined_ends_the_process_with_one_line(
    engine: Any, patch: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    with pytest.raises(SystemExit) as stopped:
        patch.apply()
    assert f"vLLM {version} was not examined" in str(stopped.value.code) and "\n" not in str(stopped.value.code)
    assert not patch.is_in_place()


def test_a_build_of_a_known_version_is_known(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", sys.modules["vllm"].__version__ + "+cu129")
    for patch in PATCHES:
        patch.apply()
        assert patch.is_in_place()


@pytest.mark.parametrize("change", ["another", "gone"])
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.NAME)
def test_a_change_of_any_examined_function_ends_the_process(engine: Any, patch: Any, change: str) -> None:
    for place in next(iter(patch.SOURCES.values())):
        name = place.partition(":")[2]
        holder, _, last = name.rpartition(".")
        owner = importlib.import_module(place.partition(":")[0])
        owner = attrgetter(holder)(owner) if holder else owner
        original = owner.__dict__[last]
        delattr(owner, last)
        if change == "another":
            setattr(owner, last, lambda *_: None)
        with pytest.raises(SystemExit, match=name.replace(".", r"\.")):
            patch.apply()
        setattr(owner, last, original)
    patch.apply()


# w4-drafter


def test_the_dense_weight_is_the_dequantized_one_to_the_bit_whatever_the_kernel_stores(engine: Any) -> None:
    projection = Projection(96, 64, seed=1)
    projection.lay_out()
    found = w4.dense_weight(projection)
    wanted = grid.decode(projection.codes, projection.scale)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
    assert not torch.equal(projection.stored, wanted)


@pytest.mark.parametrize("fault", [0.0, float("nan"), float("inf")])
def test_an_answer_that_is_no_weight_is_an_error(engine: Any, fault: float) -> None:
    projection = Projection(96, 64, seed=1)
    projection.lay_out()
    projection.stored.fill_(fault)
    with pytest.raises(RuntimeError, match="by no weight"):
        w4.dense_weight(projection)


def test_the_context_is_projected_by_the_quantized_weights_from_the_first_use_on(engine: Any) -> None:
    w4.apply()
    projections = [Projection(96, 64, seed) for seed in (1, 2)]
    model = drafter(engine, projections)
    states = torch.randn(5, 64).to(torch.bfloat16)
    for seed in (3, 4):  # loaded, then loaded anew
        model.load_weights(projections)
        for projection in projections:
            projection.lay_out()
        model.model.precompute_and_store_context_kv(states)
        wanted = torch.cat([grid.decode(p.codes, p.scale)[32:] for p in projections])
        assert torch.equal(model.model.fused, wanted)
        assert not any(hasattr(projection, "weight") for projection in projections)
        for projection in projections:
            projection.codes = projection.codes.roll(seed, dims=0)
            projection.weight_packed.data = packing.pack_codes(projection.codes)


def test_a_dense_drafter_is_built_as_ever_and_at_once(engine: Any) -> None:
    w4.apply()
    projection = torch.nn.Linear(64, 96, bias=False)
    projection.quant_method = module("model_executor.layers.linear").UnquantizedLinearMethod()
    projection.reset = lambda: None
    model = drafter(engine, [projection])
    model.load_weights([projection])
    assert torch.equal(model.model.fused, projection.weight[32:])


def test_another_scheme_and_another_drafter_are_refused(engine: Any) -> None:
    w4.apply()
    eight = Projection(96, 64, seed=1)
    eight.scheme.num_bits = 8
    foreign = Projection(96, 64, seed=1)
    foreign.scheme = object()
    for projection in (eight, foreign):
        with pytest.raises(RuntimeError, match="knows compressed-tensors W4A16"):
            drafter(engine, [projection]).load_weights([])
    other = drafter(engine, [Projection(96, 64, seed=1)]).model
    other.__class__ = type("Successor", (engine.DFlashQwen3Model,), {})
    with pytest.raises(RuntimeError, match="not Successor"):
        other._build_fused_kv_buffers()


def test_the_drafters_quantization_knows_which_layers_are_fused(engine: Any) -> None:
    w4.apply()
    config = SimpleNamespace(packed_modules_mapping={})
    assert engine.get_draft_quant_config(config) is config
    assert config.packed_modules_mapping == {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert engine.get_draft_quant_config(None) is None


def test_the_attention_calls_the_projection_where_the_version_reads_its_weight(engine: Any) -> None:
    w4.apply()
    attention = engine.DFlashQwen3Attention()
    attention.qkv_proj = Projection(16 + 8 + 8, 64, seed=1)
    attention.qkv_proj.lay_out()
    attention.q_size, attention.kv_size, attention.head_dim = 16, 8, 4
    attention.q_norm, attention.k_norm = (lambda x: 2 * x), (lambda x: 3 * x)
    attention.rotary_emb = lambda positions, q, k: (q + positions, k)
    attention.attn = lambda q, k, v: torch.cat([q, k, v], dim=-1)
    attention.o_proj = lambda x: (x, None)
    x = torch.randn(5, 64).to(torch.bfloat16)
    if sys.modules["vllm"].__version__ in w4.CALLS_THE_PROJECTION:
        with pytest.raises(AttributeError, match="weight"):  # the stand-in's own
            attention(1, x)
        return
    q, k, v = attention.qkv_proj(x)[0].split([16, 8, 8], dim=-1)
    assert torch.equal(attention(1, x), torch.cat([2 * q + 1, 3 * k, v], dim=-1))


# swa-above-window


@pytest.mark.parametrize("window", [1, 2, 5, 16, 40])
def test_what_a_query_sees_is_the_dense_mask_of_the_training(window: int) -> None:
    """With or without the window by the rule, for any context and block: the same keys."""
    for context in range(1, 40):
        for block in (1, 4, 16):
            left, right = swa.sides(window, context + block)
            query = torch.arange(context, context + block).unsqueeze(1)
            key = torch.arange(context + block)
            seen = (key >= query - left) & (key <= query + right) if left >= 0 else torch.ones(block, context + block)
            anchors = torch.tensor([[context]])
            of_context = dflash.context_mask(anchors, context, block, window)[0, 0]
            wanted = torch.cat([of_context, dflash.own_mask(block, window)], dim=-1) == 0
            assert torch.equal(seen.bool(), wanted)
            assert (left >= 0) == (context + block > window)


CONFIGS: list[tuple[dict[str, Any], int | str]] = [
    ({"layer_types": [swa.SLIDING] * 2, "sliding_window": 9, "dflash_config": {"causal": False}}, 9),
    ({"layer_types": [swa.SLIDING], "sliding_window": 9, "dflash_config": {"causal": False, "swa_window_size": 7}}, 7),
    ({"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 7}}, 7),
    ({"layer_types": ["full_attention"], "dflash_config": {"use_swa": True, "swa_window_size": 7}}, 7),
    ({"layer_types": [swa.SLIDING], "sliding_window": 9, "dflash_config": {}}, "is causal"),
    ({"layer_types": [swa.SLIDING], "sliding_window": 9, "dflash_config": {"causal": None}}, "is causal"),
    ({"layer_types": [swa.SLIDING, "full_attention"], "sliding_window": 9}, "by turns"),
    ({"layer_types": ["full_attention"], "dflash_config": {}}, "has no window"),
    ({}, "has no window"),
    ({"dflash_config": {"use_swa": True}}, "not a whole number"),
    ({"dflash_config": {"use_swa": True, "swa_window_size": 0}}, "not a whole number"),
    ({"dflash_config": {"use_swa": True, "swa_window_size": True}}, "not a whole number"),
]


@pytest.mark.parametrize(("config", "wanted"), CONFIGS)
def test_the_window_is_the_one_of_the_drafters_config(config: dict[str, Any], wanted: int | str) -> None:
    if isinstance(wanted, int):
        assert swa.window_of(SimpleNamespace(**config)) == wanted
        return
    with pytest.raises(RuntimeError, match=wanted):
        swa.window_of(SimpleNamespace(**config))


def layer(engine: Any, says: tuple[int | None, bool] = (9, False)) -> Any:
    config = SimpleNamespace(**CONFIGS[0][0])
    if sys.modules["vllm"].__version__ in swa.OWN_WINDOW:
        config.engine_says = says
    return engine.DFlashQwen3DecoderLayer(None, config=config, layer_idx=0).self_attn.attn


def call(layer: Any, longest: int, query: str = "", **changes: Any) -> Any:
    own = {"sliding_window": (-1, -1)} if sys.modules["vllm"].__version__ in swa.OWN_WINDOW else {}
    metadata = SimpleNamespace(**{"max_seq_len": longest, "causal": False, **own, **changes})
    return metadata, layer.impl.forward(layer, query, None, None, None, metadata, output="out")


def test_each_call_has_the_window_exactly_if_a_sequence_is_longer(engine: Any) -> None:
    swa.apply()
    attention = layer(engine)
    assert attention.sliding_window is None, "the KV cache is a full one"
    for longest, wanted in ((8, (-1, -1)), (9, (-1, -1)), (10, (8, 8)), (9, (-1, -1)), (5000, (8, 8))):
        metadata, answer = call(attention, longest)
        assert answer == "out" and attention.impl.seen[-1] == wanted
        assert attention.impl.sliding_window == getattr(metadata, "sliding_window", (-1, -1)) == (-1, -1)
    assert attention.impl.forward(attention, "", None, None, None, None, output="profile") == "profile"
    with pytest.raises(ValueError):
        call(attention, 10, query="fails")
    assert attention.impl.sliding_window == (-1, -1), "a failure leaves no window behind"


def test_a_call_that_cannot_be_windowed_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    swa.apply()
    attention = layer(engine)
    with pytest.raises(RuntimeError, match="is causal"):
        call(attention, 5, causal=True)
    monkeypatch.setattr(swa, "_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        call(attention, 5)


def test_another_backend_or_a_window_of_its_own_is_refused(engine: Any) -> None:
    swa.apply()
    attention = layer(engine)
    with pytest.raises(RuntimeError, match="FLASH_ATTN"):
        swa.arm(SimpleNamespace(impl=object(), sliding_window=None), 9)
    attention.sliding_window = 9
    with pytest.raises(RuntimeError, match="of its own"):
        swa.arm(attention, 9)


def test_the_engine_must_read_the_same_window(engine: Any) -> None:
    swa.apply()
    if sys.modules["vllm"].__version__ not in swa.OWN_WINDOW:
        return
    for says in ((8, False), (9, True), (None, False)):
        with pytest.raises(RuntimeError, match="takes the drafter's window for"):
            layer(engine, says)
