"""Parts of a loaded recipe that several rules look at, each None (or empty) where the recipe has no such part.

What an engine can is read from `qdc.tables`; nothing here compares a version with a number of its own. A cell of a
table that is not established is None here, and a rule that reads it is silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.formats.draft_names import engine_name
from qdc.recipe.drafter import BlockDrafter
from qdc.recipe.load import Loaded, sources
from qdc.recipe.reading import Path_
from qdc.rules.modules import ignored, linears
from qdc.tables import engines, patches

BASE = ("target.base",)
"""`needs` of rules that read the target's headers."""
PUBLISHED = ("drafter.checkpoint", "drafter.training.*.init")
"""`needs` of rules that read a published drafter's headers."""


def drafted_block(loaded: Loaded) -> BlockDrafter | None:
    """The recipe's drafter where it drafts blocks from taps."""
    return loaded.model.drafter.block if loaded.model.drafter else None


def kind(loaded: Loaded) -> str | None:
    """Kind of the recipe's drafter, None without one."""
    return loaded.model.drafter.architecture.kind if loaded.model.drafter else None


def on_cpu(loaded: Loaded) -> bool:
    """Whether the recipe's hardware is a CPU."""
    return loaded.model.deploy.hardware == "cpu"


def has_ptq(loaded: Loaded) -> bool:
    """Whether the recipe quantizes its drafter."""
    return loaded.model.drafter is not None and loaded.model.drafter.ptq is not None


def has_published(loaded: Loaded) -> bool:
    """Whether the recipe names a published drafter, to serve it or to start from it."""
    return any(place[0] == "drafter" for place in sources(loaded.model))


def largest_k(block: BlockDrafter, draft_block: int | None = None) -> int:
    """Tokens that a draft block drafts at most: all but the anchor's, unless the anchor's slot drafts too."""
    size = draft_block or block.draft_block_size
    return size if block.sample_from_anchor or block.kind == "dspark" else size - 1


def target_text(loaded: Loaded) -> dict[str, Any] | None:
    """The text configuration of the target's base, where its headers are at hand."""
    facts = loaded.facts.get("target.base")
    return facts.text_config if facts is not None and facts.config is not None else None


def whole(value: Any) -> int | None:
    """A size from a file that others wrote: a whole number above 0, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def target_size(loaded: Loaded, name: str) -> int | None:
    """A size of the target's text configuration; None where it is not known, or is none."""
    return whole((target_text(loaded) or {}).get(name))


def target_place(loaded: Loaded, field: str) -> Path_:
    """Where the recipe says a size of the target: the field of a model that it trains, else the name of the base."""
    base: Path_ = ("target", "base")
    return (*base, "scratch", "architecture", field) if hasattr(loaded.model.target.base, "scratch") else base


def layer_kinds(loaded: Loaded) -> list[str]:
    """`layer_types` of the target's base; empty where nothing is known or said of them."""
    types = (target_text(loaded) or {}).get("layer_types")
    return [str(item) for item in types] if isinstance(types, list) else []


def is_hybrid(loaded: Loaded) -> bool:
    """Whether the target has layers with a recurrent state."""
    return "linear_attention" in layer_kinds(loaded)


def published(loaded: Loaded) -> Iterator[tuple[Path_, ModelFacts]]:
    """Every published drafter that the recipe names and whose headers are at hand: recipe path, facts."""
    for place in sources(loaded.model):
        facts = loaded.facts.get(".".join(map(str, place)))
        if place[0] == "drafter" and facts is not None and facts.config is not None:
            yield place, facts


def served_checkpoint(loaded: Loaded) -> ModelFacts | None:
    """Headers of the published drafter that is served, where they are at hand."""
    facts = loaded.facts.get("drafter.checkpoint")
    return facts if facts is not None and facts.config is not None else None


def inner_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A drafter's configuration and the one inside of it that speculators writes."""
    inner = config.get("transformer_layer_config")
    return [config, inner] if isinstance(inner, Mapping) else [config]


def setting(config: Mapping[str, Any], name: str) -> Any:
    """`name` in a drafter's `dflash_config`, at its top level or in its inner configuration; None if nowhere."""
    own = config.get("dflash_config")
    places = [own, *inner_configs(config)] if isinstance(own, Mapping) else inner_configs(config)
    return next((place[name] for place in places if place.get(name) is not None), None)


def fact(loaded: Loaded, column: str) -> Any:
    """What the engine table says of the recipe's engine; None where nothing is established."""
    engine = loaded.model.serve.engine
    return engines.value(engine.vllm, engine.platform, column)


def lacks(loaded: Loaded, column: str) -> bool:
    """Whether the recipe's engine is known to lack a feature, and no declared patch provides it."""
    return fact(loaded, column) is False and column not in patched(loaded)


def patched(loaded: Loaded) -> set[str]:
    """What the declared patches provide to the recipe's engine."""
    engine = loaded.model.serve.engine
    return patches.provided(engine.patches, engine.vllm, engine.platform)


def written_at(loaded: Loaded, path: Path_, otherwise: Path_) -> Path_:
    """`path` where the recipe gives that field, else the field that the finding can point at."""
    return path if ".".join(map(str, path)) in loaded.origins else otherwise


def remedies(loaded: Loaded, column: str) -> str:
    """What to type for a feature that the engine lacks: a version that has it, a patch for this one."""
    engine = loaded.model.serve.engine
    newer = engines.first(engine.platform, column)
    named = patches.providing(column, engine.vllm, engine.platform)
    words = [f'write `vllm: "{newer}"` or later'] if newer else []
    return ", or ".join([*words, *(f"add the patch `{name}`" for name in named)])


def runner(loaded: Loaded) -> str | None:
    """The model runner: `v1`, `v2`, `list` (either, by the target's architecture), None where it is not known."""
    given = fact(loaded, "runner")
    return given if given == "v1" else loaded.model.serve.engine.runner or given


def drafter_linears(loaded: Loaded) -> dict[str, tuple[int | None, int | None]]:
    """(out, in) of every Linear of a block drafter by its name in the file; None where a size is not known.

    `fc` takes all taps side by side, so its input needs the target's width: known only with its headers. Of a
    published drafter the file says all.
    """
    shape = drafted_block(loaded)
    if shape is None:
        return {}
    if (facts := served_checkpoint(loaded)) is not None:
        return stored_linears(facts)
    width = shape.target_hidden_size or target_size(loaded, "hidden_size")
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads = shape.heads * shape.head_dim if shape.heads and shape.head_dim else None
    keys = shape.kv_heads * shape.head_dim if shape.kv_heads and shape.head_dim else None
    made: dict[str, tuple[int | None, int | None]] = {"fc": (hidden, len(shape.taps) * width if width else None)}
    for layer in range(shape.layers or 0):
        of = f"layers.{layer}."
        made |= {f"{of}self_attn.q_proj": (heads, hidden), f"{of}self_attn.o_proj": (hidden, heads)}
        made |= {f"{of}self_attn.{name}_proj": (keys, hidden) for name in "kv"}
        made |= {f"{of}mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        made[f"{of}mlp.down_proj"] = (hidden, inner)
    return made


def stored_linears(facts: ModelFacts) -> dict[str, tuple[int | None, int | None]]:
    """(out, in) of every unpacked Linear of a drafter's file."""
    return {name: linear.shape for name, linear in linears(facts).items() if not linear.packed}


def quantized_linears(loaded: Loaded) -> dict[str, tuple[int | None, int | None]]:
    """`drafter_linears` that `drafter.ptq` quantizes; needs the target's number of layers, else patterns with layer
    numbers match nothing."""
    ptq = loaded.model.drafter.ptq if loaded.model.drafter else None
    layers = len(layer_kinds(loaded))
    return {
        name: size
        for name, size in (drafter_linears(loaded) if ptq else {}).items()
        if ptq and not ignored(engine_name(name, layers), ptq.ignore)
    }
