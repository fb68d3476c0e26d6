"""manifest.json and serve.json against each other, against the labels, and against the files they name.

Verdicts about digests: `manifest.*`, `files[..]`, `serve.weights[..]`, `serve.tokenizer`. It assumes nothing about
who wrote the documents: a consistent edit of all of them is found only by an image ID from elsewhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from qdc.audit.claims import MANIFEST
from qdc.audit.evidence import PROVED, RECORDED, REFUTED, UNREAD, Look
from qdc.audit.integrity import Verdict, verdict
from qdc.audit.serving import SERVE
from qdc.core import canonical
from qdc.manifest.flat import flatten

MODELS, OWN, SITE, PACKAGES = "opt/models/", "opt/qdc/", "opt/qdc/site/", "opt/qdc/packages.json"
_TELLING = (".safetensors", ".json", ".jinja", ".sh", ".yaml", ".yml", ".env", ".gguf", ".bin", ".pt")
_ADDED = ("template", "tokenizer", "packages")
_HEX = re.compile(r"[0-9a-f]{64}")


def wanted(path: str) -> bool:
    """Whether an audit needs a file's digest: models, qdc's own files, and any weights or templates."""
    own = path.startswith((MODELS, OWN)) and not path.startswith(SITE)
    return own or path.endswith((".safetensors", ".jinja"))


def telling(path: str) -> bool:
    """Whether a file that an image hides is worth a word: what decides what is served, and how."""
    return wanted(path) or path.endswith(_TELLING)


def small(path: str) -> bool:
    """Whether the bytes of a small file are likely to be asked for."""
    return (
        wanted(path) or path.endswith((*_TELLING, "METADATA", "RECORD", "entry_points.txt")) or path.startswith("etc/")
    )


def wanted_files(look: Look) -> set[str]:
    """Paths of the image whose digest an audit may need."""
    return {path for path in look.image.files() if wanted(path)}


def judge_documents(
    look: Look, manifest: Mapping[str, Any], serve: Mapping[str, Any] | None, digests: Mapping[str, str]
) -> list[Verdict]:
    """All verdicts about a qdc image's own documents."""
    rows = _manifest_itself(look, manifest)
    serving = manifest.get("serving")
    serving = serving if isinstance(serving, dict) else {}
    rows.append(_serving(look, serving, serve))
    files = manifest.get("files")
    files = {str(path): str(digest) for path, digest in files.items()} if isinstance(files, dict) else {}
    for path, digest in sorted(files.items()):
        rows.append(_file(look, f"files[{path}]", path, digest, digests, "the manifest"))
    for name, path in (("tokenizer", _model_path(serve, "tokenizer.json")), ("packages", PACKAGES)):
        rows.append(_file(look, f"serve.{name}", path, str(serving.get(name)), digests, "the manifest"))
    rows += _weights(look, serving, serve, digests)
    rows.append(_nothing_else(look, files, serving, serve))
    return rows


def _manifest_itself(look: Look, manifest: Mapping[str, Any]) -> list[Verdict]:
    data = look.image.read(MANIFEST)
    found = hashlib.sha256(data).hexdigest()
    labels = look.image.labels
    rows = []
    label = labels.get("io.qdc.manifest.digest")
    evidence = look.at(MANIFEST, f"sha256:{found}", show="| sha256sum")
    if label is None:
        rows.append(verdict("manifest.digest", RECORDED, f"sha256:{found}", [evidence]))
    else:
        same = label.removeprefix("sha256:") == found
        rows.append(
            verdict(
                "manifest.digest",
                PROVED if same else REFUTED,
                f"sha256:{found}",
                [evidence, look.configuration(f"label io.qdc.manifest.digest: {label}")],
            )
        )
    recipe = manifest.get("recipe")
    digest = canonical.digest(recipe)
    claims = [str(manifest.get("recipe_digest")), labels.get("io.qdc.recipe.digest", digest)]
    same = all(claim.removeprefix("sha256:") == digest for claim in claims)
    text = f"the recipe in the manifest has the digest {digest}"
    if not same:
        text += f"; claimed: {' and '.join(sorted(set(claims)))}"
    rows.append(verdict("manifest.recipe_digest", PROVED if same else REFUTED, digest, [look.at(MANIFEST, text)]))
    return rows


def _serving(look: Look, serving: Mapping[str, Any], serve: Mapping[str, Any] | None) -> Verdict:
    if serve is None:
        return verdict("manifest.serving", REFUTED, None, [look.absent(SERVE, "there is no serve.json")])
    own = {key: value for key, value in serve.items() if key != "manifest_digest"}
    told = {key: value for key, value in serving.items() if key not in _ADDED}
    if canonical.dumps(own) == canonical.dumps(told):
        text = "serve.json holds what the manifest says"
        return verdict("manifest.serving", PROVED, True, [look.at(SERVE, text)])
    left, right = flatten(told), flatten(own)
    odd = next(
        (
            path
            for path in sorted(left.keys() | right.keys())
            if path not in left or path not in right or canonical.dumps(left[path]) != canonical.dumps(right[path])
        ),
        "",
    )
    text = f"{odd} differs between serve.json and the manifest"
    return verdict("manifest.serving", REFUTED, False, [look.at(SERVE, text), look.at(MANIFEST, text)])


def _file(look: Look, claim: str, path: str, digest: str, digests: Mapping[str, str], who: str) -> Verdict:
    found = digests.get(path.strip("/"))
    if look.image.find(path) is None:
        return verdict(claim, REFUTED, None, [look.absent(path, f"{who} names it; it is not in the image")])
    if found is None:
        return verdict(claim, UNREAD, None, [look.at(path, "its bytes could not be hashed")])
    same = _HEX.fullmatch(digest) is not None and found == digest
    text = f"sha256:{found}" + ("" if same else f"; {who} says {digest}")
    return verdict(claim, PROVED if same else REFUTED, found, [look.at(path, text, show="| sha256sum")])


def _weights(
    look: Look, serving: Mapping[str, Any], serve: Mapping[str, Any] | None, digests: Mapping[str, str]
) -> list[Verdict]:
    rows: dict[str, Verdict] = {}
    for who, document in (("the manifest", serving), ("serve.json", serve or {})):
        for item in _listed(document):
            path, claim = str(item.get("path")), f"serve.weights[{item.get('path')}]"
            row = _file(look, claim, path, str(item.get("sha256")), digests, who)
            entry = look.image.find(path)
            if entry is not None and entry.size != item.get("size"):
                text = f"{entry.size} bytes; {who} says {item.get('size')}"
                row = verdict(claim, REFUTED, row["value"], [look.at(path, text)])
            if claim not in rows or row["verdict"] != PROVED:
                rows[claim] = row
    return [rows[claim] for claim in sorted(rows)]


def _nothing_else(
    look: Look, files: Mapping[str, str], serving: Mapping[str, Any], serve: Mapping[str, Any] | None
) -> Verdict:
    """No file among models and qdc's own that no document names (an engine or interpreter might load it)."""
    named = {path.strip("/") for path in files} | {SERVE, MANIFEST}
    named |= {str(item.get("path")).strip("/") for part in (serving, serve or {}) for item in _listed(part)}
    stray = [
        path
        for path in look.image.files()
        if path.startswith((MODELS, OWN)) and not path.startswith(SITE) and path not in named
    ]
    if stray:
        evidence = [look.at(path, "no document of the image names this file") for path in stray[:5]]
        return verdict("files.unnamed", REFUTED, stray, evidence)
    text = f"every file below /{MODELS} and /{OWN} is named, except packages in /{SITE}"
    return verdict("files.unnamed", PROVED, [], [look.at(MANIFEST, text)])


def _listed(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    weights = document.get("weights")
    return [item for item in weights if isinstance(item, dict)] if isinstance(weights, list) else []


def _model_path(serve: Mapping[str, Any] | None, name: str) -> str:
    """The tokenizer's path: in the folder that `--tokenizer` names, else in the target's."""
    words = (serve or {}).get("arguments")
    words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    for option in ("--tokenizer", "--model"):
        if option in words[:-1]:
            return f"{words[words.index(option) + 1].strip('/')}/{name}"
    return f"{MODELS}target/{name}"
