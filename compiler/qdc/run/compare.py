"""`qdc diff`: what each side is, what two sides have in common, and the changes between them.

A side is a recipe, a lock, a content manifest, a build record, a build, an image or a model folder. Words of the
domain come from documents where both sides have them; of an image without qdc's documents, from what an audit reads
in its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdc.core.errors import QdcError
from qdc.formats import ranges
from qdc.formats.image import Image
from qdc.manifest.diff import contents, diff, document_kind, product_of
from qdc.manifest.diff.sides import lock_changes, measurement_changes
from qdc.manifest.diff.words import Change, change, said, short, subject_of
from qdc.manifest.flat import get
from qdc.run.references import refer
from qdc.store.store import Store

Unread = dict[str, str]
"""Claim id -> why it could not be compared."""
RECIPES = (".yaml", ".yml")
COMPARED = {
    "recipe": "recipes, manifests, builds, images and model folders, and its lock with locks",
    "lock": "locks, recipes that have one, manifests, builds and images of qdc",
    "manifest": "recipes, locks, manifests, builds, images and model folders",
    "build record": "recipes, build records, manifests, builds, images and model folders",
    "build": "recipes, locks, manifests, builds, images and model folders",
    "image": "recipes, locks, manifests, builds, images and model folders",
    "model folder": "recipes, manifests, builds, images and model folders",
}
_PLAIN = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_ELSEWHERE = ("serve.start", "serve.weights", "serve.chat_template", "target.chat_template", "serve.patches[",
              "serve.packages", "serve.engine.files", "target.weights", "drafter.weights")  # fmt: skip
"""Facts that other parts of a comparison tell."""
_ARGUMENT = re.compile(r"serve\.arguments\[(.+)\]")
_FIELDS = ("max-model-len", "max-num-seqs", "dtype", "speculative-config", "chat-template", "model",
           "enable-prefix-caching", "no-enable-prefix-caching")  # fmt: skip
"""Arguments of the engine that a recipe has a field for, or that other facts tell."""
_TEMPLATE = 1 << 20


@dataclass
class Side:
    """One side. `document`: manifest, record or recipe; `lock`: source -> what the lock says; `image`: bytes to read;

    `measurements`: of a build; None where the side has no such thing.
    """

    kind: str
    name: str
    document: dict[str, Any] | None = None
    lock: dict[str, Any] | None = None
    image: Image | None = None
    measurements: list[dict[str, Any]] | None = None
    template: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def compare(a: Side, b: Side) -> tuple[list[Change], Unread]:
    """All changes, domain words first, and what could not be read on one side or both.

    Raises QdcError `diff.kinds` where the sides have nothing in common.
    """
    changes: list[Change] = []
    unread: Unread = {}
    told: set[str] = set()
    common = False
    both = (a.image, b.image)
    if a.document is not None and b.document is not None:
        common = True
        without = ("lock", "files") if both[0] is not None and both[1] is not None else ("lock",)
        changes += _diff(a, b, a.document, b.document, without)
    elif both[0] is not None and both[1] is not None:
        common = True
        changes += _by_facts(a, b, unread)
    elif (a.document is not None and b.image is not None) or (b.document is not None and a.image is not None):
        common = True
        changes += _claims_against_bytes(a, b, unread)
    if a.lock is not None and b.lock is not None:
        common = True
        changes += lock_changes(*_alike(a.lock, b.lock))
    if both[0] is not None and both[1] is not None:
        told |= _told_files(changes)
        changes += _contents(a, b, told)
        if not changes and (a.kind == "model folder") == (b.kind == "model folder"):
            unread.clear()  # All that could be read or not is the same bytes.
    if a.measurements is not None and b.measurements is not None:
        common = True
        changes += measurement_changes(a.measurements, b.measurements)
    if not common:
        raise QdcError(
            "diff.kinds",
            f"`{a.name}` is a {a.kind} and `{b.name}` is a {b.kind}: they have nothing in common",
            hint=f"a {a.kind} can be compared with {COMPARED[a.kind]}",
        )
    return changes, unread


@contextmanager
def open_side(text: str, store: Store) -> Iterator[Side]:
    """What `text` names: a recipe or lock file, a manifest.json, a folder, or IMAGE. Raises QdcError."""
    path = Path(text)
    if text.endswith(RECIPES):
        yield _recipe(path)
    elif text.endswith(".lock"):
        if not path.is_file():
            raise QdcError("diff.missing", "there is no such file", file=path)
        yield Side("lock", text, lock=_lock_of(path.with_suffix(".yaml")))
    elif text.endswith(".json") and path.is_file():
        yield _document(path)
    else:
        reference = refer(text, store)
        if reference.build is not None:
            with _build(text, reference.build, store) as side:
                yield side
        else:
            from qdc.audit.images import open_image

            with open_image(str(reference.place), reference.name) as image:
                yield _image(text, str(reference.place), image)


def _recipe(path: Path) -> Side:
    from qdc.recipe.load import load

    loaded = load(path)
    return Side("recipe", str(path), loaded.data, _lock_of(path), template=loaded.chat_template)


def _lock_of(recipe: Path) -> dict[str, Any] | None:
    from qdc.sources.lock import read_lock

    locked = read_lock(recipe)
    return None if locked is None else {place: source.as_json() for place, source in locked.items()}


def _document(path: Path) -> Side:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise QdcError("diff.json", "this is not JSON", file=path) from None
    if not isinstance(value, dict):
        raise QdcError("diff.json", "this is no manifest and no build record", file=path)
    for name in ("manifest", "record", "recipe"):  # the answer of `qdc show --json`
        if isinstance(value.get(name), dict) and "schema" in value:
            value = value[name] if "target" not in value else value
    kind = {"record": "build record"}.get(document_kind(value), document_kind(value))
    lock = value.get("lock") if kind == "manifest" else None
    measured = value.get("measurements") if kind == "build record" else None
    return Side(kind, str(path), value, lock if isinstance(lock, dict) else None, measurements=measured)


@contextmanager
def _build(name: str, build: Mapping[str, Any], store: Store) -> Iterator[Side]:
    from qdc.image.layers import read_image
    from qdc.image.virtual import as_image
    from qdc.store.use import in_use

    with in_use(store.root), store.staging() as work:
        store.link_out(build["image"]["artifact"], work / "image")
        image = as_image(read_image(work / "image"), store.resolve, f"build {build['build']}")
        side = _image(name, "build", image)
        side.kind, side.measurements = "build", list(build.get("measurements") or [])
        yield side


def _image(name: str, place: str, image: Image) -> Side:
    from qdc.audit.claims import MANIFEST
    from qdc.audit.images import read_manifest

    if image.find(MANIFEST) is None:
        return Side("model folder" if place == "folder" else "image", name, image=image)
    manifest = read_manifest(image)
    lock = manifest.get("lock")
    return Side("image", name, manifest, lock if isinstance(lock, dict) else None, image)


def _alike(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both locks in one form: where one names only the digest of each source's files, so does the other."""
    short_form = [any(isinstance(value, str) for value in lock.values()) for lock in (a, b)]
    if short_form[0] == short_form[1]:
        return a, b
    from qdc.sources.lock import Locked

    def digests(lock: dict[str, Any]) -> dict[str, Any]:
        return {place: value if isinstance(value, str) else Locked.from_json(value).tree.digest
                for place, value in lock.items()}  # fmt: skip

    return digests(a), digests(b)


def _template(side: Side) -> str | None:
    """The text of the chat template that a manifest names, or the recipe's."""
    if side.template is not None or side.image is None:
        return side.template
    path = side.facts.get("template", "opt/models/target/chat_template.jinja")
    found = side.image.find(path)
    if found is None or found.size > _TEMPLATE:
        return None
    return side.image.read(path).decode("utf-8", "replace")


def _by_facts(a: Side, b: Side, unread: Unread) -> list[Change]:
    """Both sides by what an audit reads in their bytes."""
    from qdc.audit.serving import DEFAULT

    documents = [_facts(side) for side in (a, b)]
    why = [side.facts["unread"] for side in (a, b)]
    for id in sorted(why[0].keys() | why[1].keys()):
        if why[0].get(id) == why[1].get(id) == DEFAULT:
            continue
        sides = [name for name, reasons in zip("AB", why, strict=True) if id in reasons]
        unread[id] = f"{' and '.join(sides)}: {why[0].get(id) or why[1].get(id)}"
        for document in documents:
            _drop(document["recipe"], id)
    if any(id in ("drafter", "drafter.kind") for id in unread):
        _forget(documents, "drafter")
    if (a.kind == "model folder") != (b.kind == "model folder"):
        _only_common(documents)
    for side, document in zip((a, b), documents, strict=True):
        side.facts["weights"] = {side.facts["places"][item["path"]] for item in document["serving"]["weights"]}
    return _diff(a, b, documents[0], documents[1])


def _diff(
    a: Side, b: Side, was: Mapping[str, Any], now: Mapping[str, Any], without: tuple[str, ...] = ()
) -> list[Change]:
    """The documents of two sides, with what only the sides' bytes can tell of them."""
    held = {}
    for subject in ("target", "drafter") if a.image is not None and b.image is not None else ():
        weights = [_weights_of(document, subject) for document in (was, now)]
        digests = [sorted(str(item["sha256"]) for item in side) for side in weights]
        if all(digests) and digests[0] != digests[1]:
            held[subject] = _same_tensors(a, weights[0], b, weights[1])
    found = {subject: words for subject, words in held.items() if words is not None}
    return diff(was, now, without=without, templates=(_template(a), _template(b)), same_tensors=found)


def _same_tensors(a: Side, was: list[dict[str, Any]], b: Side, now: list[dict[str, Any]]) -> str | None:
    from qdc.manifest.diff.tensors import same_tensors

    assert a.image is not None and b.image is not None
    places = [
        [side.facts.get("places", {}).get(item["path"], str(item["path"]).strip("/")) for item in weights]
        for side, weights in ((a, was), (b, now))
    ]
    return same_tensors(a.image, places[0], b.image, places[1])


def _facts(side: Side) -> dict[str, Any]:
    """The facts of an image as a document that `diff` takes: recipe paths nested, weights and template by digest."""
    from qdc.audit.audit import audit
    from qdc.audit.claims import MANIFEST
    from qdc.audit.evidence import plain

    assert side.image is not None
    recipe: dict[str, Any] = {}
    unread: Unread = {}
    places: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for row in audit(side.image)["verdicts"]:
        id, evidence = row["claim"], row["evidence"]
        if not id.startswith(("target.", "drafter.", "serve.")):
            continue
        if row["verdict"] == "recorded" and evidence and evidence[0]["path"] == f"/{MANIFEST}":
            continue  # Words of the image, and the other side has none.
        first = next((str(item["path"]) for item in evidence if str(item["path"]).startswith("/")), None)
        if first:
            places[id] = first.strip("/")
        argument = _ARGUMENT.fullmatch(id)
        if argument is not None and argument[1] not in _FIELDS and row["verdict"] != "unread":
            arguments[argument[1]] = row["value"]
        if id.startswith(_ELSEWHERE) or not _PLAIN.fullmatch(id):
            continue
        if row["verdict"] == "unread":
            unread[id] = next((item["text"] for item in evidence), "could not be read")
        else:
            _put(recipe, id.split("."), plain(row["value"]))
    weights = []
    for subject, ids in (
        ("target", ("target.quantization.scheme.bits", "target.quantization.modules")),
        ("drafter", ("drafter.architecture.draft_block_size", "drafter.architecture.taps")),
    ):
        folder = next((places[id].rpartition("/")[0] for id in ids if id in places), None)
        weights += [] if folder is None else _weights(side.image, folder, subject)
    side.facts["unread"] = unread
    side.facts["places"] = {item["path"]: item.pop("place") for item in weights}
    document: dict[str, Any] = {"recipe": recipe, "artifacts": {}, "serving": {"weights": weights}}
    if arguments:
        document["rest"] = {"serve": {"arguments": arguments}}
    if "serve.chat_template" in places:
        path = places["serve.chat_template"]
        side.facts["template"] = path
        document["serving"]["template"] = ranges.sha256(side.image.open(path))
    return document


def _weights(image: Image, folder: str, subject: str) -> list[dict[str, Any]]:
    root = f"{folder}/" if folder else ""
    return [
        {"path": f"/{subject}/{path.removeprefix(root)}", "size": entry.size, "place": path,
         "sha256": ranges.sha256(image.open(path))}
        for path, entry in image.files().items()
        if path.startswith(root) and path.endswith(".safetensors") and "/" not in path.removeprefix(root)
    ]  # fmt: skip


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a leaf; a section that is itself a value (`drafter.ptq` none) has no leaves."""
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        tree = inner
    tree[path[-1]] = value


def _drop(tree: dict[str, Any], id: str) -> None:
    *parents, last = id.split(".")
    for part in parents:
        inner = tree.get(part)
        if not isinstance(inner, dict):
            return
        tree = inner
    tree.pop(last, None)


def _only_common(documents: list[dict[str, Any]]) -> None:
    """A folder holds one model and starts nothing: leave out what only the image shows."""
    for document in documents:
        document["recipe"].pop("serve", None)
        document.pop("rest", None)
        document["serving"].pop("template", None)
    for subject in ("target", "drafter"):
        if not all(_weights_of(document, subject) for document in documents):
            _forget(documents, subject)


def _forget(documents: list[dict[str, Any]], subject: str) -> None:
    """Leave a model out of both: on one side it is not known, or not there to be compared."""
    for document in documents:
        gone = _weights_of(document, subject)
        document["recipe"].pop(subject, None)
        document["serving"]["weights"] = [item for item in document["serving"]["weights"] if item not in gone]


def _weights_of(document: Mapping[str, Any], subject: str) -> list[dict[str, Any]]:
    listed = get(document, "serving.weights")
    return [item for item in listed if f"/{subject}/" in str(item["path"])] if isinstance(listed, list) else []


def _claims_against_bytes(a: Side, b: Side, unread: Unread) -> list[Change]:
    """A document's product fields against the bytes of an image or folder that has no document of qdc."""
    from qdc.audit.audit import audit
    from qdc.audit.claims import product_claims

    left = a.document is not None and b.image is not None
    told, read = (a, b) if left else (b, a)
    assert told.document is not None and read.image is not None
    product = product_of(told.document, told.template)
    report = audit(read.image, recipe=product)
    claimed = {claim.id: claim.value for claim in product_claims(product, "recipe")}
    changes = []
    for row in report["verdicts"]:
        id = row["claim"]
        if id not in claimed:
            continue
        if row["verdict"] == "unread":
            unread[id] = next((item["text"] for item in row["evidence"]), "could not be read")
        elif any(item["path"] == "(recipe)" for item in row["evidence"]):
            was, now = (claimed[id], row["value"]) if left else (row["value"], claimed[id])
            changes.append(change(subject_of(id), id, was, now, f"{id} {said(was)} -> {said(now)}"))
    return changes


def _told_files(changes: list[Change]) -> set[str]:
    """Files of the images that a change of weights has named already."""
    return {
        str(item["path"]).strip("/")
        for row in changes
        if row["path"] == "serving.weights"
        for side in (row["from"], row["to"])
        for item in side or []
    }


def _contents(a: Side, b: Side, told: set[str]) -> list[Change]:
    assert a.image is not None and b.image is not None
    if "model folder" in (a.kind, b.kind) and a.kind != b.kind:
        return []
    told = told | a.facts.get("weights", set()) | b.facts.get("weights", set())
    rows = list(contents.file_changes(a.image, b.image, told))
    if a.kind == "model folder":
        return rows
    changes = [*contents.start_changes(a.image, b.image), *contents.package_changes(a.image, b.image), *rows,
               *contents.layer_changes(a.image, b.image)]  # fmt: skip
    ids = (a.image.image_id, b.image.image_id)
    if ids[0] != ids[1]:
        changes.append(change("image", "image.id", *ids, f"image ID {short(ids[0])} -> {short(ids[1])}"))
    return changes
