"""`qdc lock`'s work: every source of a recipe resolved to file digests, and its files brought into the store.

What the old lock pins and the store has is not asked for again. Files are hashed as they arrive; what was fetched
is kept in the store when the work stops, and the lock is written by the caller, whole or not at all. This module
does not print.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.core.files import CHUNK, sha256_bytes
from qdc.formats.checkpoint import ModelFacts, read_facts
from qdc.formats.ranges import FileRange, RangeReader
from qdc.recipe.diagnostics import RecipeInvalid
from qdc.recipe.load import Loaded, LockState
from qdc.recipe.reading import Path_
from qdc.sources import archives, hub, index, web
from qdc.sources.lock import Locked, fitting, identity_digest, lockable
from qdc.store.seal import seal
from qdc.store.store import Store

if TYPE_CHECKING:
    from qdc.image.registry import Registry
    from qdc.sources.images import Blob

_SMALL = (".json", ".jinja", ".md")
_MB = 1_000_000
_LOOK = "name a source that holds a whole Hugging Face checkpoint"


class Listener(Protocol):
    """Told of each source: `done` and `total` in MB."""

    def started(self, name: str) -> None: ...
    def progress(self, name: str, done: int, total: int, note: str) -> None: ...
    def finished(self, name: str, seconds: float, output: str) -> None: ...


class Changed(Exception):
    """A source serves other bytes than the lock says. `state`: for the rule that speaks of it."""

    def __init__(self, state: LockState) -> None:
        super().__init__("changed")
        self.state = state


@dataclass(frozen=True)
class Result:
    """`entries`: the new lock; `fetched`: recipe path -> bytes that came over the network (absent: none)."""

    entries: dict[str, Locked]
    fetched: dict[str, int]


def lock(
    loaded: Loaded, store: Store, old: Mapping[str, Locked], listener: Listener, *, headers_only: bool = False
) -> Result:
    """Resolve and fetch; `headers_only` leaves weights and data where they are, with the digests that the hub gives.

    Raises Changed (SRC05), RecipeInvalid (a revision of zeros), and QdcError for what cannot be had.
    """
    wanted = lockable(loaded.model)
    refuse_zeros(loaded, wanted)
    known = {identity_digest(entry.identity): entry for entry in old.values() if _readable(entry)}
    kept = {identity_digest(entry.identity): entry for entry in fitting(loaded, old).values() if _readable(entry)}
    known |= kept
    entries, fetched = {}, {}
    for place, identity in wanted.items():
        source = _Source(loaded, store, place, identity, listener, headers_only)
        entry = known.get(identity_digest(identity))
        if entry is None:
            entries[place] = source.resolve()
        else:
            entries[place] = entry
            source.bring(entry)
        known[identity_digest(identity)] = entries[place]
        if source.bytes:
            fetched[place] = source.bytes
    return Result(entries, fetched)


def missing(store: Store, entry: Locked) -> list[str]:
    """The files of a source that the store lacks."""
    return [path for path, (size, sha256) in sorted(entry.files.items()) if not _has(store, sha256, size)]


def refuse_zeros(loaded: Loaded, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises RecipeInvalid with every commit or digest of zeros: the recipe's author did not know it."""
    found = []
    for place, identity in wanted.items():
        for field in ("revision", "sha256", "ref"):
            digits = str(identity.get(field, "?")).rpartition(":")[2]
            if not digits.strip("0"):
                message = f"this {'commit' if field == 'revision' else 'digest'} is only zeros: nobody wrote it down"
                hint = f"write the {len(digits)} hex digits of the one that you mean"
                found.append(loaded.document.diagnose("SRC13", "error", path_of(place, field), message, hint))
    if found:
        raise RecipeInvalid(found)


def path_of(place: str, *fields: str) -> Path_:
    """A recipe path as the document has it."""
    return tuple(int(part) if part.isdecimal() else part for part in ".".join((place, *fields)).split("."))


def _readable(entry: Locked) -> bool:
    try:
        return entry.facts is None or bool(ModelFacts.from_json(entry.facts))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _has(store: Store, sha256: str, size: int | None) -> bool:
    try:
        found = store.object_path(sha256).stat().st_size
    except OSError:
        return False
    return size is None or found == size


class _Source:
    """One source of a recipe. `bytes`: what came over the network for it."""

    def __init__(
        self,
        loaded: Loaded,
        store: Store,
        place: str,
        identity: dict[str, Any],
        listener: Listener,
        headers_only: bool,
    ) -> None:
        self.loaded, self.store, self.place, self.identity = loaded, store, place, identity
        self.listener, self.headers_only = listener, headers_only
        self.bytes = 0
        self.done = 0
        self.total = 0

    # What the caller asks for

    def resolve(self) -> Locked:
        """The entry of a source that no lock pins."""
        started = time.monotonic()
        self.listener.started(self.place)
        with self._placed():
            if "url" in self.identity or "wheel" in self.identity:
                entry = self._checkpoint(self._archive(), {})
            elif "ref" in self.identity:
                entry = Locked(self.identity, self._image(), None, None)
            else:
                entry = self._repository()
        if not missing(self.store, entry):
            self.store.add_tree(entry.tree)
        self.listener.finished(self.place, time.monotonic() - started, entry.tree.digest)
        return entry

    def bring(self, entry: Locked) -> None:
        """Fetch the files of a pinned source that the store lacks. Raises Changed where others come."""
        lacking = [] if self.headers_only else missing(self.store, entry)
        if lacking:
            started = time.monotonic()
            self.listener.started(self.place)
            with self._placed():
                self._again(entry, lacking)
            self.listener.finished(self.place, time.monotonic() - started, entry.tree.digest)
        if not missing(self.store, entry):
            self.store.add_tree(entry.tree)

    # How

    def _again(self, entry: Locked, lacking: list[str]) -> None:
        if not {"url", "wheel", "ref"}.isdisjoint(self.identity):
            files = self._image() if "ref" in self.identity else self._archive()
            for path, (_, sha256) in entry.files.items():
                if files.get(path, (0, ""))[1] != sha256:
                    raise self._changed(path, sha256, files.get(path, (0, "no such file"))[1])
            return
        self.total = sum(entry.files[path][0] for path in lacking)
        for path in lacking:
            size, sha256 = entry.files[path]
            try:
                self._fetch(path, hub.file(self.identity, path, size, sha256))
            except web.Differs as error:
                raise self._changed(path, sha256, error.now) from None
            except web.WebError as error:
                if error.status != 404:
                    raise
                raise self._changed(path, sha256, "no such file") from None

    def _changed(self, path: str, was: str, now: str) -> Changed:
        return Changed(LockState(changed={self.place: (path, was, now)}))

    def _repository(self) -> Locked:
        """An `hf` or `hf_dataset` source."""
        found = hub.listing(self.identity)
        left = {path: file for path, file in found.files.items() if self._left(path, file)}
        self.total = sum(file.size or 0 for path, file in found.files.items() if path not in left)
        files = {path: (file.size or 0, str(file.sha256)) for path, file in left.items()}
        files |= {path: self._fetch(path, file) for path, file in found.files.items() if path not in left}
        if "hf" in self.identity:
            return self._checkpoint(files, left)
        licence = None
        if found.readme is not None:
            sha256 = self._fetch(hub.README, found.readme)[1]
            licence = read_facts({hub.README: self.store.resolve(sha256).read_bytes()}, {}, self.place).licence
        return Locked(self.identity, files, None, licence)

    def _left(self, path: str, file: web.File) -> bool:
        """Whether the file's bytes stay where they are: those of weights and data, if only headers are wanted."""
        large = path.endswith((".safetensors", ".parquet"))
        return self.headers_only and large and file.sha256 is not None and not _has(self.store, file.sha256, file.size)

    def _checkpoint(self, files: dict[str, tuple[int, str]], left: Mapping[str, web.File]) -> Locked:
        """The entry of a checkpoint whose files are in the store, but those `left` on the hub."""
        small, weights = {}, dict[str, RangeReader]()
        for path, (_, sha256) in files.items():
            if path.endswith(".safetensors"):
                weights[path] = web.WebRange(left[path]) if path in left else FileRange(self.store.resolve(sha256))
            elif path.endswith(_SMALL):
                small[path] = self.store.resolve(sha256).read_bytes()
        facts = read_facts(small, weights, self.place)
        return Locked(self.identity, dict(sorted(files.items())), facts.as_json(), facts.licence)

    def _image(self) -> dict[str, tuple[int, str]]:
        """The OCI layout of a `ref` source, its files in the store but the layers that stay in the registry."""
        from qdc.image.registry import connect, parse
        from qdc.sources import images

        with connect(parse(self.identity["ref"])) as registry:
            found = images.listing(registry)
            self.total = sum(blob.size for blob in (found.config, *found.layers))
            files = {path: self._small(data) for path, data in found.documents.items()}
            try:
                self._blob(registry, found.config)
                images.check_config(self.store.resolve(found.config.sha256))
                if not self.headers_only:
                    for layer in found.layers:
                        self._blob(registry, layer)
            finally:
                self.bytes += registry.counts.received
        files |= {blob.path: (blob.size, blob.sha256) for blob in (found.config, *found.layers)}
        return dict(sorted(files.items()))

    def _small(self, data: bytes) -> tuple[int, str]:
        """A document's size and SHA-256, with its bytes in the store."""
        sha256 = sha256_bytes(data)
        if not _has(self.store, sha256, len(data)):
            with self.store.staging() as work:
                (work / "file").write_bytes(data)
                seal(work / "file")
                self.store.adopt(work / "file", sha256)
        return len(data), sha256

    def _blob(self, registry: Registry, blob: Blob) -> None:
        """Bring a blob into the store."""
        from qdc.sources.images import download

        if not _has(self.store, blob.sha256, blob.size):
            key = self._key(blob.path)
            with self.store.lock(f"fetch-{key}"):
                place = self.store.partial(key) / "bytes"

                def report(there: int, _: int) -> None:
                    note = f"MB, {blob.digest[:19]}"
                    self.listener.progress(self.place, (self.done + there) // _MB, self.total // _MB, note)

                download(registry, blob, place, report)
                seal(place)
                self.store.adopt(place, blob.sha256)
                self.store.forget_partial(key)
        self.done += blob.size

    def _archive(self) -> dict[str, tuple[int, str]]:
        """The checkpoint in a `url` or `wheel` source, its files in the store: path -> (size, SHA-256)."""
        if "wheel" in self.identity:
            file = index.find(self.identity["wheel"], self.identity["sha256"])
        else:
            file = web.File(self.identity["url"], {}, None, self.identity["sha256"])
        self.total = file.size or 0
        key = self._key("archive")
        with self.store.lock(f"fetch-{key}"):
            path = self._download(key, file)[2]
            if "wheel" in self.identity:
                found = archives.wheel_files(path, self.identity["file"], hub.wanted)
            else:
                found = archives.tar_files(path, hub.wanted)
            files = self._unpack(found)
            self.store.forget_partial(key)
        return files

    def _unpack(self, found: Iterator[tuple[str, IO[bytes]]]) -> dict[str, tuple[int, str]]:
        files: dict[str, tuple[int, str]] = {}
        with self.store.staging() as work:
            for name, stream in found:
                state, size = hashlib.sha256(), 0
                with (work / "file").open("wb") as copy:
                    while chunk := stream.read(CHUNK):
                        state.update(chunk)
                        size += copy.write(chunk)
                files[name] = (size, state.hexdigest())
                seal(work / "file")
                self.store.adopt(work / "file", state.hexdigest())
        return files

    def _fetch(self, path: str, file: web.File) -> tuple[int, str]:
        """A file's size and SHA-256, with its bytes in the store."""
        if file.sha256 is not None and _has(self.store, file.sha256, file.size):
            self.done += file.size or 0
            return self.store.object_path(file.sha256).stat().st_size, file.sha256
        key = self._key(path)
        with self.store.lock(f"fetch-{key}"):
            sha256, size, place = self._download(key, file)
            seal(place)
            self.store.adopt(place, sha256)
            self.store.forget_partial(key)
        return size, sha256

    def _download(self, key: str, file: web.File) -> tuple[str, int, Path]:
        place = self.store.partial(key) / "bytes"
        before = place.stat().st_size if place.is_file() else 0
        name = file.url.rpartition("/")[2].partition("?")[0]

        def report(there: int) -> None:
            self.listener.progress(self.place, (self.done + there) // _MB, self.total // _MB, f"MB, {name}")

        sha256, size = web.download(file, place, report)
        self.bytes += max(size - before, 0)
        self.done += size
        return sha256, size, place

    def _key(self, path: str) -> str:
        return canonical.digest([self.identity, path])

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """Turns what goes wrong with the source into an error at its place in the recipe."""
        try:
            yield
        except (hub.HubError, web.Differs, web.WebError, index.NotFound, archives.ArchiveError) as error:
            raise self._refused(error) from None
        except QdcError as error:
            if error.file is not None:
                raise
            field = "ref" if "ref" in self.identity else ""
            raise self._at(field, error.id, error.message, error.hint or _LOOK, error.exit_code) from None

    def _refused(self, error: Exception) -> QdcError:
        """`error` at the place of the recipe that it speaks of, with what to type."""
        address = "hf" if "hf" in self.identity else "hf_dataset" if "hf_dataset" in self.identity else None
        address = address or ("url" if "url" in self.identity else "wheel")
        what = f"`{self.identity[address]}`"
        if isinstance(error, hub.HubError):
            return self._at(error.field, error.id, error.message, error.hint, error.exit_code)
        if isinstance(error, web.Differs):
            hint = (
                "run the same command once more; if it says the same again, the bytes are not the ones that were named"
            )
            if address in ("url", "wheel"):
                message = f"the bytes of {what} have another SHA-256 than the recipe says: {error.now}"
                return self._at("sha256", "lock.digest", message, hint, COULD_NOT)
            message = f"a file of {what} is not what the hub's own list says: expected {error.was}, got {error.now}"
            return self._at(address, "lock.digest", message, hint, COULD_NOT)
        if isinstance(error, web.WebError):
            hint = "run the same command to go on: what was fetched is kept"
            code = COULD_NOT
            if error.status in (404, 410):
                hint, code = "look at the address: the server has nothing there", WRONG_USE
            elif error.status in (401, 403):
                hint = "log in: `hf auth login`, or set HF_TOKEN; for an index, its user and password in pip's settings"
            return self._at(address, "lock.fetch", f"cannot fetch {what}: {error.reason}", hint, code)
        if isinstance(error, index.NotFound):
            hint = "write the version and the SHA-256 of a wheel of that index; `pip config list` shows which it is"
            return self._at(address, "lock.wheel", f"no {what}: {error}", hint, WRONG_USE)
        field = "file" if address == "wheel" else address
        return self._at(field, "lock.archive", f"{what}: {error}", _LOOK, WRONG_USE)

    def _at(self, field: str, id: str, message: str, hint: str, exit_code: int) -> QdcError:
        path = path_of(self.place, field) if field else path_of(self.place)
        found = self.loaded.document.diagnose(id, "error", path, message, hint)
        return QdcError(
            id, message, file=found.file, line=found.line, column=found.column, hint=hint, exit_code=exit_code
        )
