"""Two documents compared, in the words of the domain first, and then leaf by leaf so that nothing is hidden.

Takes content manifests, build records or recipes (mappings). Documents of the same kind are compared whole;
of different kinds, only the product fields that both hold. It knows no image and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qdc.core import canonical
from qdc.manifest.content import product_fields
from qdc.manifest.flat import ABSENT, arguments, flatten, get

Change = dict[str, Any]
PRODUCT = ("target", "drafter", "serve", "deploy", "image")
KINDS = {"dflash": "DFlash", "ngram": "n-gram", "suffix": "suffix decoding", "mtp": "MTP", "eagle3": "EAGLE-3",
         "draft-model": "draft model", "none": "none", "checkpoint": "published checkpoint"}  # fmt: skip


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """`[{subject, path, from, to, text}]`, in a fixed order; empty if nothing differs.

    When something differs, weights that did not change are said to be unchanged (`from` equals `to`).
    Paths are recipe paths where the field is one, else paths of the documents compared.
    """
    kinds = (document_kind(a), document_kind(b))
    left, right = (_normal(document, kinds[0] == kinds[1]) for document in (a, b))
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
    pair = _Pair(left, right, flat, differing)
    if pair.differ("recipe"):
        pair.explain("recipe_digest")
    changes = [change for rule in _RULES for change in rule(pair)]
    return changes + [
        _change(_subject(path), _recipe_path(path), flat[0].get(path, ABSENT), flat[1].get(path, ABSENT))
        for path in sorted(pair.differing)
    ]


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


@dataclass
class _Pair:
    """Both documents, and the paths that differ and are not explained yet."""

    a: dict[str, Any]
    b: dict[str, Any]
    flat: tuple[dict[str, Any], dict[str, Any]]
    differing: set[str]

    def values(self, path: str) -> tuple[Any, Any]:
        return get(self.a, path), get(self.b, path)

    def differ(self, path: str) -> bool:
        """Whether anything at or below `path` is still unexplained."""
        return any(_below(other, path) for other in self.differing)

    def explain(self, *paths: str) -> None:
        """Everything at or below `paths` has been said."""
        self.differing -= {other for other in self.differing for path in paths if _below(other, path)}

    def explain_mirror(self, path: str, was: Any, now: Any) -> None:
        """`path` repeats a field: it has been said if it repeats just this change."""
        mirrored = self.values(path)
        if (str(mirrored[0]), str(mirrored[1])) == (str(was), str(now)):
            self.explain(path)


def _forget_unlike_templates(*products: dict[str, Any]) -> None:
    """A file name and a digest cannot be compared: leave the chat template out of both."""
    sections = [product["serve"] for product in products if isinstance(product.get("serve"), dict)]
    digests = {str(section.get("chat_template")).startswith("sha256:") for section in sections}
    if len(digests) > 1:
        for section in sections:
            section.pop("chat_template", None)


Rule = Callable[[_Pair], Iterator[Change]]


def _normal(document: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    if not whole:
        return {"recipe": product_of(document)}
    if document_kind(document) == "recipe":
        rest = {key: value for key, value in document.items() if key not in PRODUCT}
        return {
            "recipe": {key: document[key] for key in PRODUCT if key in document},
            **({"rest": rest} if rest else {}),
        }
    result = dict(document)
    serving = result.get("serving")
    if isinstance(serving, Mapping) and isinstance(serving.get("arguments"), list):
        result["serving"] = {**serving, "arguments": arguments(serving["arguments"])}
    return result


def _field(subject: str, path: str, words: str, *mirrors: str) -> Rule:
    """`words FROM -> TO` for one recipe field; `mirrors` are manifest paths that repeat it."""

    def rule(pair: _Pair) -> Iterator[Change]:
        if not pair.differ(f"recipe.{path}"):
            return
        was, now = pair.values(f"recipe.{path}")
        if isinstance(was, Mapping) or isinstance(now, Mapping):
            return
        pair.explain(f"recipe.{path}")
        for mirror in mirrors:
            pair.explain_mirror(mirror, was, now)
        yield _change(subject, path, was, now, f"{words} {_text(was)} -> {_text(now)}")

    return rule


def _section(subject: str, path: str, words: str) -> Rule:
    """`words none -> KEY` when a whole section appears or goes; its fields are not listed one by one."""

    def rule(pair: _Pair) -> Iterator[Change]:
        was, now = pair.values(f"recipe.{path}")
        if (was is None) == (now is None) or not pair.differ(f"recipe.{path}"):
            return
        pair.explain(f"recipe.{path}")
        yield _change(subject, path, was, now, f"{words} {_brief(was)} -> {_brief(now)}")

    return rule


def _names(subject: str, path: str, words: str) -> Rule:
    """`words: +added -removed` for a list of names."""

    def rule(pair: _Pair) -> Iterator[Change]:
        was, now = pair.values(f"recipe.{path}")
        lists = isinstance(was, list) and isinstance(now, list)
        if not pair.differ(f"recipe.{path}") or not lists or not all(isinstance(item, str) for item in was + now):
            return
        pair.explain(f"recipe.{path}")
        signs = [f"-{item}" for item in was if item not in now] + [f"+{item}" for item in now if item not in was]
        yield _change(subject, path, was, now, f"{words}: {' '.join(signs) or 'another order'}")

    return rule


def _weights(subject: str) -> Rule:
    """Whether the weight files of one model are the same bytes."""

    def rule(pair: _Pair) -> Iterator[Change]:
        was, now = (_weight_digests(document, subject) for document in (pair.a, pair.b))
        if was is None or now is None or (not was and not now):
            return
        if was == now:
            yield _change(subject, "serving.weights", was, now, f"{subject} unchanged (same weights digest)")
            return
        for path in list(pair.differing):
            if path.startswith("serving.weights[") and (f"/{subject}/" in path or path.endswith("[]")):
                pair.differing.discard(path)
        parts = [" ".join(_short(item["sha256"]) for item in side) or "none" for side in (was, now)]
        yield _change(subject, "serving.weights", was, now, f"{subject} weights {parts[0]} -> {parts[1]}")

    return rule


def _weight_digests(document: Mapping[str, Any], subject: str) -> list[dict[str, Any]] | None:
    listed = get(document, "serving.weights")
    if not isinstance(listed, list):
        return None
    return sorted(
        (item for item in listed if isinstance(item, dict) and f"/{subject}/" in str(item.get("path"))),
        key=lambda item: str(item["path"]),
    )


def _drafter_kind(pair: _Pair) -> Iterator[Change]:
    sides = [(get(document, "recipe.drafter"), get(document, "recipe.serve.k")) for document in (pair.a, pair.b)]
    kinds = [drafter_kind(drafter) for drafter, _ in sides]
    if kinds[0] == kinds[1] or not pair.differ("recipe.drafter"):
        return
    pair.explain("recipe.drafter", "recipe.serve.k")
    text = f"drafter: {KINDS.get(kinds[0], kinds[0])} -> {_describe(*sides[1])}"
    was, now = ({"drafter": drafter, "k": k} for drafter, k in sides)
    yield _change("drafter", "drafter", was, now, text)


def drafter_kind(drafter: Any) -> str:
    """`dflash`, `ngram`, ..; `checkpoint` for a published one; `none` without a drafter."""
    if not isinstance(drafter, Mapping):
        return "none"
    kind = get(drafter, "architecture.kind") or drafter.get("kind")
    return str(kind) if kind else "checkpoint" if "checkpoint" in drafter else "none"


def _describe(drafter: Any, k: Any) -> str:
    kind = drafter_kind(drafter)
    words = KINDS.get(kind, kind) + (f" K={k}" if k is not None and kind != "none" else "")
    for path, name in (("architecture.draft_block_size", "draft block"), ("swa.window", "window")):
        if (value := get(drafter, path)) is not None:
            words += f", {name} {value}"
    return words


def _digest_pair(subject: str, words: str, *paths: str) -> Rule:
    """`words changed (from -> to)`; the first path that differs names the digests, all are explained."""

    def rule(pair: _Pair) -> Iterator[Change]:
        found = [path for path in paths if pair.differ(path)]
        if found:
            was, now = pair.values(found[0])
            pair.explain(*paths)
            text = f"{words} changed ({_short(was)} -> {_short(now)})"
            yield _change(subject, _recipe_path(found[0]), was, now, text)

    return rule


_RULES: tuple[Rule, ...] = (
    _weights("target"),
    _section("target", "target.quantization", "target: quantization"),
    _field("target", "target.quantization.method", "target: grid"),
    _field("target", "target.quantization.scheme.bits", "target: bits", "target.scheme.bits"),
    _field("target", "target.quantization.scheme.group_size", "target: group size", "target.scheme.group_size"),
    _field("target", "target.quantization.scheme.symmetric", "target: symmetric", "target.scheme.symmetric"),
    _names("target", "target.quantization.ignore", "target: module mask, ignored"),
    _section("target", "target.qad", "target: QAD"),
    _field("target", "target.qad.trainable", "target: QAD trains", "target.trainable"),
    _field("target", "target.qad.optimizer.lr", "target: QAD lr"),
    _field("target", "target.qad.schedule.steps", "target: QAD steps"),
    _drafter_kind,
    _weights("drafter"),
    _field("serving", "serve.k", "K", "serving.arguments.speculative-config.num_speculative_tokens", "drafter.k"),
    _field("drafter", "drafter.architecture.draft_block_size", "draft block", "drafter.architecture.draft_block_size"),
    _field("drafter", "drafter.architecture.taps", "drafter taps", "drafter.architecture.taps", "drafter.taps"),
    _section("drafter", "drafter.ptq", "drafter: PTQ"),
    _field("drafter", "drafter.ptq.method", "drafter: PTQ", "drafter.ptq.method"),
    _field("drafter", "drafter.ptq.scheme.bits", "drafter: PTQ bits", "drafter.ptq.scheme.bits"),
    _field("drafter", "drafter.ptq.scheme.group_size", "drafter: PTQ group size", "drafter.ptq.scheme.group_size"),
    _section("drafter", "drafter.swa", "drafter window"),
    _field("drafter", "drafter.swa.window", "drafter window", "drafter.swa.window"),
    _field("drafter", "drafter.swa.semantics", "drafter window semantics", "drafter.swa.semantics"),
    _field("serving", "serve.engine.vllm", "engine vLLM", "serving.engine.version"),
    _field("serving", "serve.engine.platform", "engine platform", "serving.engine.platform"),
    _field("serving", "serve.engine.prefix_caching", "prefix caching"),
    _names("serving", "serve.engine.patches", "engine patches"),
    _field("serving", "serve.max_model_len", "max model length", "serving.arguments.max-model-len"),
    _field("serving", "serve.max_num_seqs", "max sequences", "serving.arguments.max-num-seqs"),
    _field("serving", "serve.dtype", "dtype", "serving.arguments.dtype"),
    _digest_pair("serving", "chat template", "serving.template", "recipe.serve.chat_template"),
    _digest_pair("serving", "tokenizer", "serving.tokenizer"),
    _digest_pair("serving", "runtime packages", "serving.packages"),
    _field("deploy", "deploy.hardware", "hardware"),
)


def _change(subject: str, path: str, was: Any, now: Any, text: str | None = None) -> Change:
    if text is None:
        text = f"{path} {_text(was)} -> {_text(now)}"
    return {
        "subject": subject,
        "path": path,
        "from": None if was is ABSENT else was,
        "to": None if now is ABSENT else now,
        "text": text,
    }


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith((f"{root}.", f"{root}["))


def _subject(path: str) -> str:
    first = _recipe_path(path).split(".")[0].split("[")[0]
    return {"serve": "serving"}.get(first, first)


def _recipe_path(path: str) -> str:
    return path.removeprefix("recipe.").removeprefix("rest.")


def _brief(section: Any) -> str:
    if section is None:
        return "none"
    for path in ("method", "grid.method", "window", "trainable"):
        if (value := get(section, path)) is not None:
            return str(value)
    return "some"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return _short(value)
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _short(digest: Any) -> str:
    text = str(digest).removeprefix("sha256:")
    return text[:12] if digest else "none"
