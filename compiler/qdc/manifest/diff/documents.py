"""Two documents compared, in the words of the domain first, and then leaf by leaf so that nothing is hidden.

Takes content manifests, build records or recipes (mappings). Documents of the same kind are compared whole;
of different kinds, only the product fields that both hold. It knows no image and reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.core import canonical
from qdc.core.files import sha256_bytes
from qdc.manifest.content import LOCAL_SOURCES, product_fields
from qdc.manifest.diff import pair as rules
from qdc.manifest.diff.pair import Pair, Rule
from qdc.manifest.diff.words import Change, change, method, recipe_path, subject_of
from qdc.manifest.flat import ABSENT, arguments, flatten, get

EMPTY: Mapping[str, str] = {}
PRODUCT = ("target", "drafter", "serve", "deploy", "image")


def diff(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    without: tuple[str, ...] = (),
    templates: tuple[str | None, str | None] = (None, None),
    same_tensors: Mapping[str, str] = EMPTY,
) -> list[Change]:
    """`[{subject, path, from, to, text}]`, in a fixed order; empty if nothing differs.

    When something differs, weights that did not change are said to be unchanged (`from` equals `to`).
    Paths are recipe paths where the field is one, else paths of the documents compared. `without`: sections of the
    documents that are compared elsewhere; `templates`: the texts of the chat templates; `same_tensors`: `target` or
    `drafter` -> how other files hold the same tensors.
    """
    return [row for row, _ in told(a, b, without=without, templates=templates, same_tensors=same_tensors)]


def told(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    without: tuple[str, ...] = (),
    templates: tuple[str | None, str | None] = (None, None),
    same_tensors: Mapping[str, str] = EMPTY,
) -> list[tuple[Change, frozenset[str]]]:
    """`diff`, and beside each change the leaves of the documents that it tells. No leaf is in two changes."""
    kinds = (document_kind(a), document_kind(b))
    whole = kinds[0] == kinds[1]
    left, right = (_normal(side, whole, without, text) for side, text in zip((a, b), templates, strict=True))
    flat = (flatten(left), flatten(right))
    if not whole:
        _forget_unlike(left["recipe"], right["recipe"])
        flat = (_told_values(left), _told_values(right))
    differing = {
        path
        for path in flat[0].keys() | flat[1].keys()
        if path not in flat[0]
        or path not in flat[1]
        or canonical.dumps(flat[0][path]) != canonical.dumps(flat[1][path])
    }
    if not differing:
        return []
    pair = Pair(left, right, flat, differing, templates, same_tensors)
    rows: list[tuple[Change, frozenset[str]]] = []
    derived = {path for path in differing if path == "recipe_digest"} if pair.differ("recipe") else set()
    pair.differing -= derived
    for rule in RULES:
        before = frozenset(pair.differing)
        for row in rule(pair):
            rows.append((row, before - pair.differing))
            before = frozenset(pair.differing)
    rows += [
        (
            change(subject_of(path), recipe_path(path), flat[0].get(path, ABSENT), flat[1].get(path, ABSENT)),
            frozenset([path]),
        )
        for path in sorted(pair.differing)
    ]
    if derived:
        first = next(index for index, (_, paths) in enumerate(rows) if any(path.startswith("recipe") for path in paths))
        rows[first] = (rows[first][0], rows[first][1] | derived)
    return rows


def document_kind(document: Mapping[str, Any]) -> str:
    """`manifest`, `record` or `recipe`."""
    if "serving" in document and "artifacts" in document:
        return "manifest"
    return "record" if isinstance(document.get("stages"), list) else "recipe"


def product_of(document: Mapping[str, Any], template: str | None = None) -> dict[str, Any]:
    """The product fields that every kind of document holds: `target` {quantization, qad}, `drafter`, `serve`,

    `deploy`, `image`; of the chat template its digest, where the document or the `template`'s text gives it.
    """
    source = document if document_kind(document) == "recipe" else document.get("recipe") or {}
    digest = sha256_bytes(template.encode()) if template is not None else None
    product = product_fields({key: source[key] for key in PRODUCT if key in source}, digest)
    if isinstance(target := product.get("target"), dict):
        product["target"] = {key: target[key] for key in ("quantization", "qad") if key in target}
    return product


def _told_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of product fields; an absent field and a null one are the same recipe."""
    return {path: value for path, value in flatten(document).items() if value is not None}


def _forget_unlike(*products: dict[str, Any]) -> None:
    """Leave out what the two forms of a document say in words that cannot be compared: of the chat template a file's

    name and a digest, of a local base that there is one and the digest of its files.
    """
    sections = [product["serve"] for product in products if isinstance(product.get("serve"), dict)]
    digests = {str(section.get("chat_template")).startswith("sha256:") for section in sections}
    if len(digests) > 1:
        for section in sections:
            section.pop("chat_template", None)
    bases = [get(product, "image.base") for product in products]
    local = [isinstance(base, Mapping) and any(base.get(name) is True for name in LOCAL_SOURCES) for base in bases]
    if local[0] != local[1] and all(isinstance(base, Mapping) for base in bases):
        other = bases[local.index(False)]
        if set(other) == {"tree"}:
            for product in products:
                product["image"] = {key: value for key, value in product["image"].items() if key != "base"}


def _normal(document: Mapping[str, Any], whole: bool, without: tuple[str, ...], template: str | None) -> dict[str, Any]:
    if not whole:
        return {"recipe": product_of(document, template)}
    if document_kind(document) == "recipe":
        rest = {key: value for key, value in document.items() if key not in PRODUCT}
        return {
            "recipe": {key: document[key] for key in PRODUCT if key in document},
            **({"rest": rest} if rest else {}),
        }
    result = {key: value for key, value in document.items() if key not in without}
    serving = result.get("serving")
    if isinstance(serving, Mapping) and isinstance(serving.get("arguments"), list):
        result["serving"] = {**serving, "arguments": arguments(serving["arguments"])}
    return result


RULES: tuple[Rule, ...] = (
    rules.weights("target"),
    rules.section("target", "target.quantization", "target: quantization", method),
    rules.leaf("target", "target.quantization.method", "target: grid", as_said=method),
    rules.leaf("target", "target.quantization.scheme.bits", "target: bits", "target.scheme.bits"),
    rules.leaf("target", "target.quantization.scheme.group_size", "target: group size", "target.scheme.group_size"),
    rules.leaf("target", "target.quantization.scheme.symmetric", "target: symmetric", "target.scheme.symmetric"),
    rules.names("target", "target.quantization.ignore", "target: module mask, ignored"),
    rules.section("target", "target.qad", "target: QAD"),
    rules.leaf("target", "target.qad.trainable", "target: QAD trains", "target.trainable"),
    rules.leaf("target", "target.qad.optimizer.lr", "target: QAD lr"),
    rules.leaf("target", "target.qad.schedule.steps", "target: QAD steps"),
    rules.drafter,
    rules.weights("drafter"),
    rules.leaf("serving", "serve.k", "K", "serving.arguments.speculative-config.num_speculative_tokens", "drafter.k"),
    rules.leaf(
        "drafter",
        "drafter.architecture.draft_block_size",
        "draft block",
        "drafter.architecture.draft_block_size",
    ),
    rules.leaf("drafter", "drafter.architecture.taps", "drafter taps", "drafter.architecture.taps", "drafter.taps"),
    rules.section("drafter", "drafter.ptq", "drafter PTQ:", method, "drafter.ptq", "drafter.calibration"),
    rules.leaf("drafter", "drafter.ptq.method", "drafter PTQ:", "drafter.ptq.method", as_said=method),
    rules.leaf("drafter", "drafter.ptq.scheme.bits", "drafter PTQ: bits", "drafter.ptq.scheme.bits"),
    rules.leaf("drafter", "drafter.ptq.scheme.group_size", "drafter PTQ: group size", "drafter.ptq.scheme.group_size"),
    rules.section("drafter", "drafter.swa", "drafter window"),
    rules.leaf("drafter", "drafter.swa.window", "drafter window", "drafter.swa.window"),
    rules.leaf("drafter", "drafter.swa.semantics", "drafter window semantics", "drafter.swa.semantics"),
    rules.leaf("serving", "serve.engine.vllm", "engine vLLM", "serving.engine.version"),
    rules.leaf("serving", "serve.engine.platform", "engine platform", "serving.engine.platform"),
    rules.leaf("serving", "serve.engine.prefix_caching", "prefix caching"),
    rules.names("serving", "serve.engine.patches", "engine patches"),
    rules.leaf("serving", "serve.max_model_len", "max model length", "serving.arguments.max-model-len"),
    rules.leaf("serving", "serve.max_num_seqs", "max sequences", "serving.arguments.max-num-seqs"),
    rules.leaf("serving", "serve.dtype", "dtype", "serving.arguments.dtype"),
    rules.template,
    rules.digests("serving", "tokenizer", "serving.tokenizer"),
    rules.digests("serving", "runtime packages", "serving.packages"),
    rules.leaf("deploy", "deploy.hardware", "hardware"),
)
