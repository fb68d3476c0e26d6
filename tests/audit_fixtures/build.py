"""Which fixture is made how. Every id of expected.yaml is here, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from audit_fixtures import folders, images, models, submissions, tampered
from audit_fixtures.kernels import fatbin, library
from audit_fixtures.pieces import Fixture, Folder
from audit_fixtures.submissions import DFLASH, SITE, ngram

EXPECTED = Path(__file__).with_name("expected.yaml")
K = images.speculation
MAKERS: dict[str, Callable[[], Fixture | Folder]] = {
    "sixth-place": lambda: submissions.sixth(env=ngram(20), sourced=DFLASH),
    "sixth-place-agreeing": lambda: submissions.sixth(env=DFLASH, sourced=DFLASH),
    "sixth-place-docker-run": lambda: submissions.sixth(env=DFLASH, sourced=DFLASH),
    "sixth-place-env-believed": lambda: submissions.sixth(env=ngram(20), sourced=DFLASH),
    "sixth-place-launcher": lambda: submissions.sixth(env=ngram(20), sourced=DFLASH, start=submissions.SIXTH_START),
    "sixth-place-no-config": lambda: submissions.sixth(env=DFLASH, sourced=None),
    "lying-tag-r6v2": lambda: submissions.sixth(env=DFLASH, sourced=ngram(20), tag="team:dflash-r6v2"),
    "lying-tag-r6v12": lambda: submissions.sixth(env=ngram(40), sourced=None, tag="team:dflash-r6v12", drafter=False),
    "second-place": submissions.second,
    "second-place-stale-eos": lambda: submissions.second(eos=60),
    "third-place": submissions.third,
    "third-place-without-the-variable": lambda: submissions.third(window=None),
    "third-place-silent-default": lambda: submissions.third(path="/opt/eqc/configs/serve.yaml"),
    "flattened-docker": lambda: images.flattened("docker", False),
    "flattened-docker-change": lambda: images.flattened("docker", True),
    "flattened-podman": lambda: images.flattened("podman", False),
    "flattened-podman-change": lambda: images.flattened("podman", True),
    "layered": lambda: images.served(K()),
    "committed-drafter": lambda: images.committed(drafter=True),
    "committed-quietly": lambda: images.committed(drafter=False),
    "retagged": images.retagged,
    "no-start": images.no_start,
    "shadowed-weights": images.shadowed,
    "k-computed": lambda: images.scripted(images.COMPUTED),
    "k-by-default": lambda: images.scripted(images.DEFAULTED),
    "k-by-environment": lambda: images.scripted(images.DEFAULTED, env=("K=7",)),
    "k-by-docker-run": lambda: images.scripted(images.DEFAULTED),
    "k-in-configuration-file": images.configured,
    "flag-given-twice": lambda: images.scripted(images.BEATEN),
    "hub-model": lambda: images.served(None, model="Qwen/Qwen3.5-4B"),
    "ngram-with-drafter-weights": lambda: images.ngram_with_weights(4, "team:dflash-final"),
    "drafter-not-there": lambda: images.served(K(model="/models/drafter-v2")),
    "unknown-engine-variable": lambda: images.served(K(), env=("VLLM_MARLIN_INPUT_DTYPE=int8", "VLLM_NO_SUCH=1")),
    "window-only-in-arguments": images.window_in_arguments,
    "half-window": images.half_window,
    "causal-window": images.causal_window,
    "drafter-of-another-target": images.wrong_target,
    "k-above-block": lambda: images.served(K(16)),
    "synthetic-acceptance": lambda: images.served(
        K(rejection_sample_method="synthetic", synthetic_acceptance_length=8)
    ),
    "lossy-acceptance": lambda: images.served(K(rejection_sample_method="fly"), version="0.33.0"),
    "two-engines": images.two_engines,
    "answers-by-endpoint": images.by_endpoint,
    "stock-native": lambda: images.kernels(fa2=("sm_86", "compute_80")),
    "stock-older-minor": lambda: images.kernels(fa2=("sm_80", "compute_80")),
    "stock-wrong-card": lambda: images.kernels(fa2=("sm_90", "sm_90a")),
    "stock-core-wrong-card": lambda: images.kernels(fa2=("sm_80",), core=("sm_89",)),
    "stock-unneeded-library": lambda: images.kernels(
        fa2=("sm_80", "sm_86"), extra={f"{SITE}/vllm/_flashmla_C.abi3.so": library(fatbin("sm_100f"))}
    ),
    "nvcc-two-architectures": lambda: images.compiled("two.so"),
    "nvcc-another-card": lambda: images.compiled("ada.so"),
    "nvcc-ptx-alone": lambda: images.compiled("ptx.so"),
    "nvcc-compressed": lambda: images.compiled("compressed.so"),
    "qdc-untouched": tampered.untouched,
    "qdc-weights-byte": tampered.weights,
    "qdc-drafter-byte": lambda: tampered.weights(tampered.DRAFTER),
    "qdc-config-byte": tampered.drafter_config,
    "qdc-manifest-byte": tampered.manifest,
    "qdc-label": tampered.label,
    "qdc-layer-swapped": tampered.swapped_layer,
    "qdc-layer-renamed": tampered.relabelled_blobs,
    "qdc-consistent": tampered.consistent,
    "qdc-consistent-expected": tampered.consistent,
    "qdc-other-k": tampered.other_k,
    "qdc-other-start": tampered.other_start,
    "folder-compressed-tensors": lambda: Folder(models.target("ct")),
    "folder-awq": lambda: Folder(models.target("awq")),
    "folder-gptq": lambda: Folder(models.target("gptq")),
    "folder-gptq-asymmetric": lambda: Folder(models.target("gptq", symmetric=False)),
    "folder-ct-bits": lambda: folders.told("ct", models.declared_ct(bits=8)),
    "folder-ct-group": lambda: folders.told("ct", models.declared_ct(group=128)),
    "folder-ct-symmetric": lambda: folders.told("ct", models.declared_ct(symmetric=True), symmetric=False),
    "folder-awq-bits": lambda: folders.told("awq", models.declared_awq(bits=8)),
    "folder-awq-group": lambda: folders.told("awq", models.declared_awq(group=64)),
    "folder-gptq-group": lambda: folders.told("gptq", models.declared_gptq(group=64)),
    "folder-gptq-symmetric": lambda: folders.told("gptq", models.declared_gptq(symmetric=True), symmetric=False),
    "folder-lie-unclaimed": lambda: folders.told("ct", models.declared_ct(group=128)),
    "folder-mask": folders.mask_lies,
    "folder-one-module-plain": folders.one_module_plain,
    "folder-companion-missing": folders.companion_missing,
    "folder-eos-differ": lambda: folders.eos([2, 4], 2),
    "folder-eos-beyond": lambda: folders.eos(63, 63, rows=48),
    "folder-shards": folders.whole_shards,
    "folder-missing-shard": folders.missing_shard,
    "folder-unnamed-shard": folders.unnamed_shard,
    "folder-cut": folders.cut_file,
    "folder-untied": folders.untied,
    "folder-mtp-promised": folders.mtp_promised,
    "folder-drafter": lambda: Folder(models.drafter()),
    "folder-drafter-speculators": folders.speculators,
    "folder-drafter-shifted": folders.speculators,
}


def expectations() -> list[dict[str, Any]]:
    """The rows of expected.yaml: id, fault, require, run, expect, expected, exit."""
    rows: list[dict[str, Any]] = yaml.safe_load(EXPECTED.read_text())
    return rows


def write(id: str, folder: Path) -> str:
    """Make the fixture below `folder`; the reference that `qdc audit` takes."""
    made = MAKERS[id]()
    return made.write(folder)


def original() -> str:
    """The image ID that `expect: original` means."""
    return tampered.original_id()
