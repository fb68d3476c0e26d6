"""An audit: claims in words, facts from bytes, one verdict each.

*proved*: the bytes show it; *refuted*: the bytes show otherwise, or contradict themselves; *recorded*: only the
image's own words say so; *unread*: it could not be decided. Nothing of the image is executed or imported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from qdc.audit import (
    claims,
    compliance,
    documents,
    drafters,
    history,
    integrity,
    machine_code,
    models,
    outside,
    packages,
    serving,
    target,
    texts,
)
from qdc.audit.claims import MANIFEST
from qdc.audit.container import Arguments, run_arguments
from qdc.audit.evidence import (
    PROVED,
    RECORDED,
    REFUTED,
    UNREAD,
    Claim,
    Evidence,
    Fact,
    Findings,
    Look,
    brief,
    reason,
    same,
)
from qdc.audit.integrity import Verdict, verdict
from qdc.audit.packages import Package
from qdc.core.errors import QdcError
from qdc.formats.image import Image
from qdc.manifest.content import product_fields
from qdc.manifest.diff.words import below


def audit(
    reader: Image,
    *,
    recipe: Mapping[str, Any] | None = None,
    require: Iterable[str] = (),
    expect: str | None = None,
    digests: bool | None = None,
    run: str | None = None,
) -> dict[str, Any]:
    """`{image, where, tags, anchored, verdicts: [{claim, verdict, value, evidence}], counts, transfer}`.

    `recipe`: resolved product fields whose leaves are claims; `require`: `path=value` texts; `expect`: the image
    ID that this must be (`sha256:` and 64 hex). Without it the report proves consistency only and says so.
    `digests`: whether every layer is read whole and held against its digest; else the digests of large layers and
    files stay unread. The default is to read all but what would have to be fetched.
    `run`: the words after `docker run` with which it is started (`-e K=4 IMAGE serve`).
    Raises QdcError only for a malformed `require` or `run` and an image whose configuration cannot be read at all.
    """
    whole = reader.transfer is None if digests is None else digests
    look = Look(reader)
    asked = [claims.requirement(text) for text in require]
    given = run_arguments(run) if run is not None else None
    expect = expect or next((str(claim.value) for claim in asked if claim.id == "image.id"), None)
    if recipe is not None:
        asked += claims.product_claims(product_fields(recipe), "recipe")
    rows = integrity.identity(reader, look, expect)
    findings = Findings()
    cut = integrity.cuts(reader)
    installed = packages.find(look)
    wanted = documents.wanted_files(look) | packages.wanted_files(look)
    found, hashed, known = integrity.layers(reader, look, wanted, whole)
    rows += [*integrity.blobs(reader, known, whole), *found, *cut, *_hidden(look)]
    if cut and not reader.files():
        findings.unread[""] = cut[0]["evidence"][0]["text"]
        told = asked
    else:
        told = _contents(look, hashed, installed, rows, findings, given, asked) + asked
    rows += _judge(look, told, findings, rows)
    integrity.soften(reader, rows)
    counts = Counter(row["verdict"] for row in rows)
    fetched, requests = reader.transfer() if reader.transfer is not None else (0, 0)
    return {
        "image": reader.image_id or None,
        "where": reader.where,
        "tags": list(reader.tags),
        "anchored": expect is not None,
        "verdicts": rows,
        "counts": {word: counts[word] for word in (PROVED, REFUTED, RECORDED, UNREAD)},
        "transfer": {"bytes": fetched, "requests": requests, "unverified": integrity.unverified(reader, rows)},
    }


def exit_code(report: Mapping[str, Any]) -> int:
    """1 if anything is refuted; 3 if nothing is, but something is unread; else 0."""
    counts = report["counts"]
    return 1 if counts[REFUTED] else 3 if counts[UNREAD] else 0


def _contents(
    look: Look,
    digests: dict[str, str],
    installed: list[Package],
    rows: list[Verdict],
    findings: Findings,
    run: Arguments | None,
    asked: list[Claim],
) -> list[Claim]:
    """What the image claims of itself. Its facts go into `findings`, verdicts about its own documents into `rows`."""
    manifest: dict[str, Any] | None = None
    try:
        manifest = look.json(MANIFEST)
    except QdcError as error:
        rows.append(verdict("manifest", UNREAD, None, [look.at(MANIFEST, reason(error))]))
    files = (manifest or {}).get("files")
    files = {str(path): str(digest) for path, digest in files.items()} if isinstance(files, dict) else {}
    started = serving.Serving(look, digests, files, run)
    if look.image.image_id:
        findings.facts |= started.findings.facts
        findings.unread |= started.findings.unread
        findings.claims += [*started.findings.claims, *started.claims]
        history.history_facts(look, findings)
    packages.package_facts(look, installed, digests, findings)
    config = _models(look, started, findings)
    started.plugin_window(findings)
    told: list[Claim] = []
    if started.serve is not None:
        told.append(Claim("serve.start", [*serving.START[0], *serving.START[1]], "qdc"))
        findings.facts |= serving.patch_facts(look, started.serve, digests)
        told += _patch_claims(started.serve, "serve.json")
    if manifest is not None:
        rows += documents.judge_documents(look, manifest, started.serve, digests)
        told += _manifest_claims(manifest)
    told += [*claims.label_claims(look), *claims.tag_claims(look)]
    cards = [str(claim.value) for claim in [*told, *asked] if claim.id == "deploy.hardware"]
    machine_code.machine_code_facts(look, cards, config, findings)
    compliance.compliance_facts(look, installed, started.arguments, findings)
    recorded = (started.serve or {}).get("environment")
    named = recorded if isinstance(recorded, dict) else {}
    outside.start_fault(look, findings)
    outside.outside_facts(look, started.arguments, outside.image_environment(look), named, findings)
    return told


def _models(look: Look, started: serving.Serving, findings: Findings) -> dict[str, Any]:
    """Facts of target and drafter: the folders that the engine is given, else the only ones in the image.

    The target's config.json, or nothing.
    """
    targets, drafts = models.find_models(look)
    folder = started.target or (targets[0] if len(targets) == 1 and not started.arguments else None)
    drafter = started.drafter or (drafts[0] if len(drafts) == 1 and not started.arguments else None)
    model = None
    if folder is not None:
        model = target.target_facts(look, folder, findings)
        if model is not None:
            texts.text_facts(look, model, findings)
    else:
        findings.unread["target.quantization."] = f"{len(targets)} target models were found"
    config = model.config or {} if model is not None else {}
    if drafter is not None:
        drafters.drafter_facts(look, drafter, model, findings)
        if "drafter." in findings.unread:
            return config
        drafters.plugin_window(look, findings)
    if not look.image.image_id:
        return config  # A folder starts nothing, and need not have both models.
    if started.knows("speculative-config"):
        _drafter_kind(look, started, started.speculation.get("method"), findings)
    else:
        _undecided_kind(look, drafts, findings)
    _largest_k(findings)
    return config


def _largest_k(findings: Findings) -> None:
    """No engine checks K against the draft block: here it is a contradiction."""
    limit, k = drafters.largest_k(findings), findings.facts.get("serve.k")
    if limit is not None and k is not None and type(k.value) is int and k.value > limit:
        k.problems.append(f"the drafter's block has room for {limit} draft tokens, K is {k.value}")


def _undecided_kind(look: Look, drafters: list[str], findings: Findings) -> None:
    """Where a script starts the engine: without a DFlash drafter in the image nothing can be dflash; with one,

    it may or may not be used.
    """
    if drafters:
        text = f"a DFlash drafter is in {drafters[0]}; whether it is used, the script decides"
        findings.facts["drafter.kind"] = Fact(
            None, [look.at(f"{drafters[0]}/config.json", text)], [], lambda _: [], False
        )
        return
    findings.unread["drafter."] = "no drafter was found"
    if look.image.cuts:
        return
    row = look.configuration("no folder of the image holds a DFlash drafter")
    findings.facts["drafter.kind"] = Fact(
        None, [row], [], lambda kind: ["no DFlash drafter is in the image"] if kind == "dflash" else [], False
    )


def _drafter_kind(look: Look, started: serving.Serving, method: Any, findings: Findings) -> None:
    """`drafter.kind` as the engine is told, which the drafter's own configuration must agree with."""
    stored = findings.facts.get("drafter.kind")
    kind = drafters.kind_of_method(str(method), stored.value if stored else None) if started.speculation else "none"
    problems = list(stored.problems) if stored is not None else []
    if kind == "dflash" and stored is None:
        problems.append("the engine is told dflash, but no DFlash drafter is where it looks")
    if stored is not None and stored.value != kind:
        problems.append(f"the engine is told {kind}, the weights are a {stored.value} drafter")
    head = findings.facts.get("target.mtp")
    if kind == "mtp" and "target.quantization." not in findings.unread and (head is None or not head.value):
        problems.append("the engine is told mtp, and the target stores no MTP head")
    rows = started.evidence("speculative-config", f"method {kind}")
    findings.facts["drafter.kind"] = Fact(kind, [*rows, *(stored.evidence if stored else [])], problems)
    if not started.speculation:
        findings.facts["drafter.swa.window"] = Fact(None, rows[:1])


def _manifest_claims(manifest: Mapping[str, Any]) -> list[Claim]:
    told: list[Claim] = []
    recipe = manifest.get("recipe")
    if isinstance(recipe, dict):
        told += claims.product_claims(recipe, "manifest")
    target = manifest.get("target")
    if isinstance(target, dict):
        told.append(Claim("target.quantization.modules", target.get("census"), "manifest"))
        scheme = target.get("scheme")
        for field, value in scheme.items() if isinstance(scheme, dict) else []:
            told.append(Claim(f"target.quantization.scheme.{field}", value, "manifest"))
    drafter = manifest.get("drafter")
    if isinstance(drafter, dict) and "taps" in drafter:
        told.append(Claim("drafter.architecture.taps", drafter["taps"], "manifest"))
    section = manifest.get("serving")
    if isinstance(section, dict):
        told.append(Claim("serve.chat_template", f"sha256:{section.get('template')}", "manifest"))
        told += _patch_claims(section, "manifest")
    return told


def _patch_claims(document: Mapping[str, Any], source: str) -> list[Claim]:
    patches = document.get("patches")
    return [
        Claim(f"serve.patches[{item.get('name')}]", str(item.get("digest")).removeprefix("sha256:"), source)
        for item in (patches if isinstance(patches, list) else [])
        if isinstance(item, dict)
    ]


def _judge(look: Look, told: list[Claim], findings: Findings, judged: list[Verdict]) -> list[Verdict]:
    """A verdict for each claim and fact; a claim about what is `judged` already is held against that row."""
    groups = claims.by_id([*claims.leaves(told, findings.facts), *findings.claims])
    rows = []
    before: dict[str, list[Verdict]] = {}
    for row in judged:
        before.setdefault(row["claim"], []).append(row)
    for id in sorted({*groups, *findings.facts}):
        group = groups.get(id, [])
        if id in before:
            _hold(look, before[id], group)
            continue
        leaf = claims.SECTIONS[id] if id in claims.SECTIONS and _absent(group) else id
        fact = findings.facts.get(id) or findings.facts.get(leaf)
        if fact is not None:
            rows.append(_against_bytes(look, id, fact, group))
        else:
            inner = [claim for name in groups if below(name, id) and name != id for claim in groups[name]]
            rows.append(_against_words(look, id, group, inner, findings.why_unread(leaf)))
    if not told:
        for name, why in sorted(findings.unread.items()):
            rows.append(verdict(name.rstrip("."), UNREAD, None, [look.configuration(why)]))
    return rows


def _hold(look: Look, rows: list[Verdict], group: list[Claim]) -> None:
    """Claims against verdicts that rest on digests: one of the rows must have the claimed value."""
    for claim in group:
        fitting = [row for row in rows if same(_bare(claim.value), _bare(row["value"]))]
        for row in fitting:
            row["verdict"] = PROVED if row["verdict"] == RECORDED else row["verdict"]
        if not fitting:
            shown = brief(rows[0]["value"])
            rows[0]["evidence"].append(_word(look, claim, f"the bytes say {shown}"))
            rows[0]["verdict"] = REFUTED if rows[0]["verdict"] != UNREAD else UNREAD


def _bare(value: Any) -> Any:
    return value.removeprefix("sha256:") if isinstance(value, str) else value


def _absent(group: list[Claim]) -> bool:
    return bool(group) and all(claim.value is None for claim in group)


def _against_bytes(look: Look, id: str, fact: Fact, group: list[Claim]) -> Verdict:
    evidence, refuted = list(fact.evidence), bool(fact.problems) and bool(group)
    shown = {item["text"] for item in evidence}
    evidence += [{**_place(fact), "text": problem} for problem in fact.problems if problem not in shown]
    for claim in group:
        against = fact.against(claim.value)
        if against:
            refuted = True
            evidence += [_word(look, claim, "; ".join(against[:3]))]
    known = fact.decides or fact.value is not None
    sure = fact.decides if group else known and not fact.problems
    word = REFUTED if refuted else UNREAD if not sure else PROVED if group else RECORDED
    return verdict(id, word, fact.value, evidence)


def _against_words(look: Look, id: str, group: list[Claim], inner: list[Claim], why: str | None) -> Verdict:
    """By what the manifest says alone. `inner`: claims about parts of `id`, which speak against its being absent."""
    parts = [claim for claim in inner if claim.source == "manifest" and claim.value is not None]
    if parts and group[0].value in (None, [], {}):
        text = f"the manifest says {parts[0].id} {brief(parts[0].value)}"
        return verdict(
            id, REFUTED, None, [_word(look, group[0], text), _word(look, parts[0], "only the manifest says so")]
        )
    own = [claim for claim in group if claim.source == "manifest"]
    others = [claim for claim in group if claim.source != "manifest"]
    if why is not None or not own:
        text = why or "nothing in the image says or shows it"
        value = group[0].value
        return verdict(id, UNREAD, value, [look.configuration(f"{group[0].source}: {brief(value)}; {text}")])
    value = own[0].value
    odd = [claim for claim in group if not same(claim.value, value)]
    evidence = [_word(look, own[0], "only the manifest says so")]
    if odd:
        evidence += [_word(look, claim, f"the manifest says {brief(value)}") for claim in odd]
    elif others:
        evidence += [_word(look, claim, "agrees with the manifest") for claim in others]
    return verdict(id, REFUTED if odd else RECORDED, value, evidence)


def _word(look: Look, claim: Claim, text: str) -> Evidence:
    """Where a claim is made."""
    text = f"{claim.source} claims {brief(claim.value)}: {text}"
    if claim.evidence:
        return {**claim.evidence[0], "text": text}
    if claim.source != "manifest":
        return {
            "layer": None,
            "path": f"({claim.source})",
            "offset": None,
            "length": None,
            "text": text,
            "command": None,
        }
    needle = f'"{claim.id.rpartition(".")[2]}": {json.dumps(claim.value, ensure_ascii=False)}'.encode()
    if look.image.read(MANIFEST).count(needle) == 1:
        return look.spot(MANIFEST, needle, text)
    return look.at(MANIFEST, text)


def _place(fact: Fact) -> Evidence:
    empty = {"layer": None, "path": None, "offset": None, "length": None, "command": None}
    return {**empty, **(fact.evidence[0] if fact.evidence else {})}


def _hidden(look: Look) -> list[Verdict]:
    """Files that decide what is served and that a later layer hides: recorded, because the image does not show them."""
    found = [item for item in look.image.hidden if documents.telling(item.entry.path)]
    if not found:
        return []
    evidence = [
        {
            "layer": look.image.origin(item.entry),
            "path": f"/{item.entry.path}",
            "offset": item.entry.offset,
            "length": item.entry.size,
            "text": f"hidden by /{item.by} in layer {item.by_layer}",
            "command": look.image.excerpt(item.entry, item.entry.offset, item.entry.size),
        }
        for item in found[:20]
    ]
    paths = [item.entry.path for item in found[:200]]
    if len(found) > len(paths):
        evidence.append({**integrity.EMPTY, "text": f"and {len(found) - len(paths)} more"})
    return [verdict("image.hidden", RECORDED, paths, evidence)]
