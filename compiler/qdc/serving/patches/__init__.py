"""Changes to the engine that a recipe may name, as packages which the engine itself loads.

Each patch is one module here (`gdn-short-verify` is `gdn_short_verify.py`) that imports nothing of qdc and offers
NAME, `apply()` and `is_in_place()`. In an image it becomes a folder of its own on PYTHONPATH, holding the module and
the metadata by which importlib.metadata finds its entry point in the group `vllm.general_plugins`.
Standard library only; a patch module is read here, never imported.
"""

from __future__ import annotations

from pathlib import Path

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes

GROUP = "vllm.general_plugins"
_FOLDER = Path(__file__).parent


def patch_names() -> list[str]:
    """The names of all patches."""
    return sorted(path.stem.replace("_", "-") for path in _FOLDER.glob("[a-z]*.py"))


def module_name(name: str) -> str:
    """The name under which the engine's interpreter imports patch `name`."""
    return "qdc_patch_" + name.replace("-", "_")


def patch_files(name: str) -> dict[str, bytes]:
    """Relative path -> content of the folder of patch `name`. Raises QdcError `serving.patch` if there is none."""
    if name not in patch_names():
        raise QdcError("serving.patch", f"there is no engine patch {name!r}", hint="known: " + ", ".join(patch_names()))
    module = module_name(name)
    distribution = f"{module}-1.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1\n"
    return {
        f"{module}.py": (_FOLDER / f"{name.replace('-', '_')}.py").read_bytes(),
        f"{distribution}/METADATA": metadata.encode(),
        f"{distribution}/entry_points.txt": f"[{GROUP}]\n{name} = {module}:apply\n".encode(),
    }


def patch_digest(name: str) -> str:
    """SHA-256 (64 hex digits) over paths and contents of `patch_files(name)`."""
    return canonical.digest({path: sha256_bytes(data) for path, data in patch_files(name).items()})
