"""`given-base`: the layers of an image that the recipe names (`ref`, `oci`, `archive`), checked, as they are.

Input `source` is an OCI layout or one archive file. Layers that are files of their own are passed on, not copied.
"""

from __future__ import annotations

from pathlib import Path

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.formats import ranges
from qdc.formats.ranges import RangeReader
from qdc.image.base import is_stored, open_given, read_given


def run(context: Context) -> None:
    """-> base.json, packages.json, and each layer under the SHA-256 of its stored bytes."""
    given = read_given(open_given(context.inputs["source"]), context.report)
    for digest, blob in given.blobs.items():
        stored = is_stored(blob)
        if stored is not None:
            (context.output / digest).symlink_to(stored.resolve())
        else:
            _copy(blob, context.output / digest)
    write_json(context.output / "packages.json", given.packages)
    write_json(context.output / "base.json", given.base.as_json())


def _copy(blob: RangeReader, place: Path) -> None:
    try:
        with place.open("wb") as out:
            for chunk in ranges.chunks(blob):
                out.write(chunk)
    except OSError as error:
        raise QdcError(
            "stage.given-base.write", f"cannot write a layer: {error.strerror}", file=place, exit_code=COULD_NOT
        ) from error
