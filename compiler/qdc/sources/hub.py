"""A hub's repositories, asked through `huggingface_hub`: which files a commit has, where they are, their digests.

Endpoint, token and offline mode are that library's own settings. It is imported when the first repository is asked
for. Files that could hold code (pickles, scripts) are not listed: nothing here would read them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qdc.core.errors import COULD_NOT, WRONG_USE
from qdc.core.spelling import suggestion
from qdc.sources.lock import safe
from qdc.sources.web import File

_SUFFIXES = (".json", ".jinja", ".safetensors", ".txt", ".model", ".md")
_SHARD = re.compile(r"(?:(?P<folder>.*)/)?(?P<split>[^/]+?)(?:-\d{5}-of-\d{5}[^/]*)?\.parquet\Z")
README = "README.md"


class HubError(Exception):
    """A refusal. `field`: of the source in the recipe that it speaks of."""

    def __init__(self, id: str, field: str, message: str, hint: str, exit_code: int = COULD_NOT) -> None:
        super().__init__(message)
        self.id, self.field, self.message, self.hint, self.exit_code = id, field, message, hint, exit_code


@dataclass(frozen=True)
class Listing:
    """`files`: path -> file, those that are locked; `readme`: for the licence of a data set."""

    files: dict[str, File]
    readme: File | None = None


def wanted(name: str) -> bool:
    """Whether a file at the top of a checkpoint is read: weights, configurations, tokenizers, texts."""
    return name.endswith(_SUFFIXES) or name.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))


def listing(identity: dict[str, Any]) -> Listing:
    """What an `hf` or `hf_dataset` source names. Raises HubError."""
    kind = "dataset" if "hf_dataset" in identity else "model"
    field = "hf_dataset" if kind == "dataset" else "hf"
    siblings = _siblings(kind, field, identity[field], identity["revision"])
    there = {item.rfilename: item for item in siblings if safe(item.rfilename)}
    if kind == "model":
        names = [name for name in there if "/" not in name and wanted(name)]
        if "config.json" not in names:
            hint = "name a repository with a Hugging Face checkpoint"
            raise HubError("lock.empty", field, f"`{identity[field]}` holds no config.json", hint, WRONG_USE)
        return Listing({name: _file(identity, there[name]) for name in sorted(names)})
    names = _of_splits(sorted(there), identity)
    readme = _file(identity, there[README]) if README in there else None
    return Listing({name: _file(identity, there[name]) for name in names}, readme)


def file(identity: dict[str, Any], path: str, size: int, sha256: str) -> File:
    """A file of a repository whose digest is known from a lock."""
    return File(_url(identity, path), _headers(), size, sha256)


def _file(identity: dict[str, Any], item: Any) -> File:
    lfs = item.lfs.sha256 if item.lfs is not None else None
    return File(_url(identity, item.rfilename), _headers(), item.size, lfs, item.blob_id)


def _url(identity: dict[str, Any], path: str) -> str:
    from huggingface_hub import hf_hub_url

    if "hf_dataset" in identity:
        return hf_hub_url(identity["hf_dataset"], path, repo_type="dataset", revision=identity["revision"])
    return hf_hub_url(identity["hf"], path, revision=identity["revision"])


def _headers() -> dict[str, str]:
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _siblings(kind: str, field: str, name: str, revision: str) -> list[Any]:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi()
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        info = ask(name, revision=revision, files_metadata=True, timeout=60)
    except GatedRepoError:
        hint = "accept its terms on its page in a browser, and log in: `hf auth login`, or set HF_TOKEN"
        raise HubError("lock.gated", field, f"`{name}` is gated, and the hub does not open it for you", hint) from None
    except RevisionNotFoundError:
        hint = "copy the 40 hex digits of a commit from the history of its files"
        raise HubError("lock.revision", "revision", f"`{name}` has no such commit", hint, WRONG_USE) from None
    except RepositoryNotFoundError:
        hint = "look at its spelling; for a private one, log in: `hf auth login`, or set HF_TOKEN"
        message = f"the hub has no {'data set' if kind == 'dataset' else 'model'} `{name}`, or does not show it to you"
        raise HubError("lock.absent", field, message, hint, WRONG_USE) from None
    except OfflineModeIsEnabled:
        hint = "unset HF_HUB_OFFLINE and run it again"
        raise HubError("lock.offline", field, "huggingface_hub is set to offline mode", hint) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise HubError("lock.hub", field, f"the hub answers {status} for `{name}`", _LATER) from None
    except (httpx.HTTPError, OSError, ValueError, TypeError, KeyError) as error:
        message = f"cannot reach the hub for `{name}`: {error or type(error).__name__}"
        raise HubError("lock.hub", field, message, _LATER) from None
    if info.sha != revision:
        message = f"asked for commit {revision}, the hub answers with {info.sha}: the revision has moved"
        hint = "look at the repository's history, and write the commit that you mean"
        raise HubError("lock.moved", "revision", message, hint, WRONG_USE)
    return list(info.siblings or [])


_LATER = "run the same command when it is back; what was fetched is kept"


def _of_splits(names: list[str], identity: dict[str, Any]) -> list[str]:
    """The parquet files of the splits: `data/SPLIT-00000-of-00001.parquet`, or those of the one folder that has them.

    Raises HubError where a split has none.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name in names:
        if match := _SHARD.match(name):
            found.setdefault(match["split"], {}).setdefault(match["folder"] or "", []).append(name)
    kept: list[str] = []
    for index, split in enumerate(identity["splits"]):
        folders = found.get(split, {})
        if "data" not in folders and len(folders) != 1:
            message = f"`{identity['hf_dataset']}` has no parquet files of the split `{split}`"
            if folders:
                message = f"`{identity['hf_dataset']}` has the split `{split}` in {', '.join(sorted(folders))}"
            hint = suggestion(split, sorted(found), "splits there") if found else "take one with parquet files"
            raise HubError("lock.split", f"splits.{index}", message, hint, WRONG_USE)
        kept += folders.get("data") or next(iter(folders.values()))
    return kept
