"""Two documents compared, in the words of the domain first, and then leaf by leaf so that nothing is hidden.

Takes content manifests, build records or recipes (mappings). Documents of the same kind are compared whole;
of different kinds, only the product fields that both hold. It knows no image and reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdc.core import canonical
from qdc.manifest.content import product_fields
from qdc.manifest.diff import pair as rules
from qdc.manifest.diff.pair import Pair, Rule
from qdc.manifest.diff.words import Change, change, method, recipe_path, subject_of
from qdc.manifest.flat import ABSENT, arguments, flatten

PRODUCT = ("target", "drafter", "serve", "deploy", "image")


def diff(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    without: tuple[str, ...] = (),
    templates: tuple[str | None, str | None] = (None, None),
) -> list[Change]:
    """`[{subject, path, from, to, text}]`, in a fixed order; empty if nothing differs.

    When something differs, weights that did not change are said to be unchanged (`from` equals `to`).
    Paths are recipe paths where the field is one, else paths of the documents compared. `without`: sections of the
    documents that are compared elsewhere; `templates`: the texts of the chat templates.
    """
    return [row for row, _ in told(a, b, without=without, templates=templates)]


def told(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    without: tuple[str, ...] = (),
    templates: tuple[str | None, str | None] = (None, None),
) -> list[tuple[Change, frozenset[str]]]:
    """`diff`, and beside each change the leaves of the documents that it tells. No leaf is in two changes."""
    kinds = (document_kind(a), document_kind(b))
    left, right = (_normal(document, kinds[0] == kinds[1], without) for document in (a, b))
    if kinds[0] != kinds[1]:
        _forget_unlike_templates(left["recipe"], right["recipe"])
    flat = (flatten(left), flatten(right))
    differing = {
        path
        for path in flat[0].keys() | flat[1].keys()
        if path not in flat[0]
        or path not in flat[1]
        or canonical.dumps(flat[0][path]) != canonical.dumps(flat[1][path])
    }
    if not differing:
        return []
    pair = Pair(left, right, flat, differing, templates)
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


def product_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The product fields that every kind of document holds: `target` {quantization, qad}, `drafter`, `serve`,

    `deploy`, `image`; of the chat template only its digest, where the document has it.
    """
    source = document if document_kind(document) == "recipe" else document.get("recipe") or {}
    product = product_fields({key: source[key] for key in PRODUCT if key in source})
    if isinstance(target := product.get("target"), dict):
        product["target"] = {key: target[key] for key in ("quantization", "qad") if key in target}
    return product


def _forget_unlike_templates(*products: dict[str, Any]) -> None:
    """A file name and a digest cannot be compared: leave the chat template out of both."""
    sections = [product["serve"] for product in products if isinstance(product.get("serve"), dict)]
    digests = {str(section.get("chat_template")).startswith("sha256:") for section in sections}
    if len(digests) > 1:
        for section in sections:
            section.pop("chat_template", None)


def _normal(document: Mapping[str, Any], whole: bool, without: tuple[str, ...]) -> dict[str, Any]:
    if not whole:
        return {"recipe": product_of(document)}
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
    rules.field("target", "target.quantization.method", "target: grid", as_said=method),
    rules.field("target", "target.quantization.scheme.bits", "target: bits", "target.scheme.bits"),
    rules.field("target", "target.quantization.scheme.group_size", "target: group size", "target.scheme.group_size"),
    rules.field("target", "target.quantization.scheme.symmetric", "target: symmetric", "target.scheme.symmetric"),
    rules.names("target", "target.quantization.ignore", "target: module mask, ignored"),
    rules.section("target", "target.qad", "target: QAD"),
    rules.field("target", "target.qad.trainable", "target: QAD trains", "target.trainable"),
    rules.field("target", "target.qad.optimizer.lr", "target: QAD lr"),
    rules.field("target", "target.qad.schedule.steps", "target: QAD steps"),
    rules.drafter,
    rules.weights("drafter"),
    rules.field("serving", "serve.k", "K", "serving.arguments.speculative-config.num_speculative_tokens", "drafter.k"),
    rules.field(
        "drafter",
        "drafter.architecture.draft_block_size",
        "draft block",
        "drafter.architecture.draft_block_size",
    ),
    rules.field("drafter", "drafter.architecture.taps", "drafter taps", "drafter.architecture.taps", "drafter.taps"),
    rules.section("drafter", "drafter.ptq", "drafter PTQ:", method),
    rules.field("drafter", "drafter.ptq.method", "drafter PTQ:", "drafter.ptq.method", as_said=method),
    rules.field("drafter", "drafter.ptq.scheme.bits", "drafter PTQ: bits", "drafter.ptq.scheme.bits"),
    rules.field("drafter", "drafter.ptq.scheme.group_size", "drafter PTQ: group size", "drafter.ptq.scheme.group_size"),
    rules.section("drafter", "drafter.swa", "drafter window"),
    rules.field("drafter", "drafter.swa.window", "drafter window", "drafter.swa.window"),
    rules.field("drafter", "drafter.swa.semantics", "drafter window semantics", "drafter.swa.semantics"),
    rules.field("serving", "serve.engine.vllm", "engine vLLM", "serving.engine.version"),
    rules.field("serving", "serve.engine.platform", "engine platform", "serving.engine.platform"),
    rules.field("serving", "serve.engine.prefix_caching", "prefix caching"),
    rules.names("serving", "serve.engine.patches", "engine patches"),
    rules.field("serving", "serve.max_model_len", "max model length", "serving.arguments.max-model-len"),
    rules.field("serving", "serve.max_num_seqs", "max sequences", "serving.arguments.max-num-seqs"),
    rules.field("serving", "serve.dtype", "dtype", "serving.arguments.dtype"),
    rules.template,
    rules.digests("serving", "tokenizer", "serving.tokenizer"),
    rules.digests("serving", "runtime packages", "serving.packages"),
    rules.field("deploy", "deploy.hardware", "hardware"),
)
