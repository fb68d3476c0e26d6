"""Where bytes come from: what pins them, whether they are whole, who may have them, and what must not travel.

What a recipe's text alone shows to be unpinned is in `qdc.recipe.findings` (SRC01 to SRC03).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.recipe.data import FilePrompts
from qdc.recipe.fields import PathSource
from qdc.recipe.load import Loaded, sources
from qdc.recipe.reading import Path_
from qdc.recipe.serving import ArchiveBase, OciBase
from qdc.rules.registry import Found, Severity, Topic

TOPIC = Topic()
_SECRET = re.compile(r"\b(hf_|ghp_)[A-Za-z0-9]{20,}")


@TOPIC.rule(
    "SRC06",
    "error",
    summary="A safetensors file is cut short, or its header cannot be read.",
    why="A broken download fails late, or leaves weights that were never read.",
    fix="Fetch the file again with `qdc lock`, or copy it again.",
    evidence="Downloads that broke off were reported as errors of the reader: "
    "https://github.com/QwenLM/Qwen/issues/462 https://github.com/Comfy-Org/ComfyUI/issues/15602",
    failing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # a file of it lacks its last byte",
    passing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # the whole file",
    final="nothing can be built from it",
    needs=("*",),
)
def files_are_whole(loaded: Loaded) -> Iterator[Found]:
    for path, facts in checkpoints(loaded):
        for file, reason in facts.broken.items():
            yield Found(path, f"{file} cannot be read: {reason}", _again(path))


@TOPIC.rule(
    "SRC07",
    "error",
    summary="The index of a checkpoint's shards and its files do not agree.",
    why="Some engines serve a weight that they did not find as it was initialised.",
    fix="Fetch the missing file with `qdc lock`, or remove the file that the index does not name.",
    evidence="Weights of a missing shard were served as they were initialised: "
    "https://github.com/sgl-project/sglang/pull/32279; folders that lack files: "
    "https://github.com/huggingface/huggingface_hub/pull/4728",
    failing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # 1 file for an index of 2 shards",
    passing="target: {base: {hf: Qwen/Qwen3.5-4B}}  # both files",
    final="nothing can be built from it",
    needs=("*",),
)
def shards_are_complete(loaded: Loaded) -> Iterator[Found]:
    for path, facts in checkpoints(loaded):
        named = facts.weight_map
        if named is None:
            continue
        for shard in sorted(set(named.values()) - set(facts.shards)):
            count = sum(file == shard for file in named.values())
            message = f"the index names {shard} for {count} tensor{'s' if count > 1 else ''}, and it is not there"
            yield Found(path, message, _again(path))
        odd = [name for name, file in named.items() if file in facts.shards and not _holds(facts, name, file)]
        if odd:
            more = f" ({len(odd)} such tensors)" if len(odd) > 1 else ""
            message = f"{odd[0]} is not in {named[odd[0]]}, which the index names for it{more}"
            yield Found(path, message, _again(path))
        for shard in sorted(set(facts.shards) - set(named.values())):
            message = f"{shard} lies beside the index, which does not name it"
            yield Found(path, message, "name a checkpoint whose index names all of its files, or remove the file")


def _holds(facts: ModelFacts, name: str, file: str) -> bool:
    """Whether `file` has the tensor, or cannot be read (SRC06)."""
    return file in facts.broken or (name in facts.tensors and facts.tensors[name].file == file)


def checkpoints(loaded: Loaded) -> Iterator[tuple[Path_, ModelFacts]]:
    """The checkpoints that the recipe names and whose headers are known; the path is that of the source's name."""
    for place, source in sources(loaded.model).items():
        if (facts := loaded.facts.get(".".join(map(str, place)))) is not None:
            yield (*place, next(key for key in ("hf", "path", "url", "wheel") if hasattr(source, key))), facts


def _again(path: Path_) -> str:
    return "copy the checkpoint again" if path[-1] == "path" else "run `qdc lock` to fetch it again"


@TOPIC.rule(
    "SRC08",
    "error",
    summary="A `path` source does not exist or is no checkpoint, or (warning) it is outside the recipe's folder.",
    why="A path is never tried as a name on a hub: the start must be the bytes that you mean. What is outside the "
    "folder does not travel with the recipe; that alone can be accepted.",
    fix="Give a folder with a Hugging Face checkpoint, relative to the recipe's folder and below it.",
    evidence="A trainer given a path that does not exist started from a configuration of its own: "
    "https://github.com/nota-github/adaptfm-quant-dflash (scripts/train_drafter_finetune.sh)",
    failing="target: {base: {path: wieghts}}",
    passing="target: {base: {path: weights}}",
)
def paths_are_below_the_recipe(loaded: Loaded) -> Iterator[Found]:
    model = loaded.model
    given: list[tuple[Path_, str]] = [
        ((*place, "path"), source.path) for place, source in sources(model).items() if isinstance(source, PathSource)
    ]
    given += [(("data", n, "path"), entry.path) for n, entry in model.data.items() if isinstance(entry, FilePrompts)]
    base = model.image.base
    if isinstance(base, OciBase):
        given.append((("image", "base", "oci"), base.oci))
    elif isinstance(base, ArchiveBase):
        given.append((("image", "base", "archive"), base.archive))
    for path, name in given:
        if not (loaded.folder / name).resolve().is_relative_to(loaded.folder):
            hint = f"copy it to `{Path(name).name}` beside the recipe, so that it travels with it"
            yield Found(path, f"`{name}` is outside the recipe's folder", hint, "warning")


@TOPIC.rule(
    "SRC09",
    "error",
    summary="A text has the form of an access token.",
    why="The recipe is in every build record, and its product fields are in every image: the token would be published.",
    fix="Remove it, keep it in your own settings, and revoke it.",
    evidence="Follows from what the manifest and the build record hold.",
    failing='accept: [{rule: DRF02, because: "hf_abcdefghijklmnopqrstuvwx"}]',
    passing="accept: []",
    final="a secret must not be published",
)
def no_secrets(loaded: Loaded) -> Iterator[Found]:
    for path, text in _texts(loaded.data, ()):
        if (found := _SECRET.search(text)) is not None:
            start = found.group(1)
            yield Found(path, f"this text has the form of an access token (`{start}...`)", "remove it and revoke it")


@TOPIC.rule(
    "SRC10",
    "warning",
    summary="A checkpoint whose bytes enter the image has no licence, or one that forbids passing them on.",
    why="An image is handed to others. Under the contract `adaptfm` it is an error, because its parts must be "
    "distributable.",
    fix="Take a checkpoint with a licence that allows it, or accept the rule with the answer of its owner.",
    evidence="The contract's rule: https://adaptfm.gitlab.io/call-for-competition.html",
    failing="deploy: {contract: openai}  # and a checkpoint under CC-BY-NC-ND",
    passing="deploy: {contract: openai}  # and checkpoints under Apache-2.0 or MIT",
    needs=("*",),
)
def licences_allow_it(loaded: Loaded) -> Iterator[Found]:
    severity: Severity | None = "error" if loaded.model.deploy.contract == "adaptfm" else None
    for path, facts in checkpoints(loaded):
        forbids = re.findall(r"-(nc|nd)\b", facts.licence or "")
        if forbids:
            what = [{"nc": "commercial use", "nd": "passing changed copies on"}[word] for word in forbids]
            message = f"its licence, {facts.licence}, forbids {' and '.join(what)}"
            yield Found(path, message, "name a checkpoint that may be changed and passed on", severity)
        elif facts.licence is None and path[-1] != "path":
            message = "its README names no licence, so nobody may pass its weights on"
            yield Found(path, message, "name a checkpoint with a licence, or ask its owner for one", severity)


@TOPIC.rule(
    "SRC13",
    "warning",
    summary="A commit or a digest is all zeros.",
    why="Zeros stand for a commit that its authors did not publish: nothing can be fetched by them.",
    fix="Fill in the commit or digest of the bytes that you have.",
    evidence="Follows from what a hash is.",
    failing="image:\n  base:\n    ref: docker.io/vllm/vllm-openai@sha256:" + 64 * "0",
    passing="target:\n  quantization:\n    grid:\n      revision: 4f3c1a2b5d6e7f8091a2b3c4d5e6f708192a3b4c\n"
    "image:\n  base:\n    ref: docker.io/vllm/vllm-openai@sha256:" + 32 * "1f",
    final="nothing can be fetched by it",
)
def pins_are_filled_in(loaded: Loaded) -> Iterator[Found]:
    for path, text in _texts(loaded.data, ()):
        if path[-1] == "revision" and not text.strip("0"):
            yield Found(path, "this commit is not pinned: it is all zeros", "fill in the commit, 40 hex digits")
        elif path[-1] == "sha256" and not text.strip("0"):
            yield Found(path, "this digest is not pinned: it is all zeros", "fill in the SHA-256, 64 hex digits")
        elif path == ("image", "base", "ref") and not text.rpartition(":")[2].strip("0"):
            message = "this image is not pinned: its digest is all zeros"
            yield Found(path, message, "fill in the digest: `skopeo inspect docker://NAME` prints it")


def _texts(value: Any, path: Path_) -> Iterator[tuple[Path_, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index))
    elif isinstance(value, str):
        yield path, value
