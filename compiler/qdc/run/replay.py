"""The replay of a build's served drafter: what a gate compares the engine's own counters with."""

from __future__ import annotations

import json
from typing import Any

from qdc.graph.code import code_digests
from qdc.graph.expand import served
from qdc.graph.locks import lock_text, versions
from qdc.run.build import Build, Listener, artifact_json
from qdc.run.settings import Settings
from qdc.store.store import Store


def replay_served(
    store: Store, settings: Settings, record: dict[str, Any], listener: Listener
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """(evaluation, prompts with their accepted and proposed counts) at the served K and window, or None.

    A stage like any other: run once, then read from the store. Raises QdcError when it fails or when the build's
    artifacts are gone.
    """
    facts = {
        "code": code_digests(),
        "versions": versions(lock_text("train")),
        "chat_template": "",
        "serve_lock": "",
        "templates": {},
        "sources": {},
        "trees": {},
        "pins": {},
        "licences": [],
    }
    outputs = {stage["name"]: stage["output"] for stage in record["stages"]}
    instance = served(record["recipe"], facts, outputs)
    if instance is None:
        return None
    ran = Build(store, settings, [instance], listener).run()
    lines = store.read(ran[0].output, "prompts.jsonl").splitlines()
    return artifact_json(store, ran[0].output, "evaluation.json"), [json.loads(line) for line in lines]
