"""A stage instance as data: what `expand` makes of a recipe, what `plan` decides about, what a cache can keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qdc.core import canonical

LOCK = "lock:"
"""How an input begins that the lock must name first; the recipe path follows."""
SCHEME = 1
"""Version of the key. Bump it when canonical JSON, the code digest or this document's shape changes."""


@dataclass(frozen=True)
class Instance:
    """`inputs`: role -> name of another instance, `tree:<64 hex>` for bytes that are known, or `lock:<recipe path>`."""

    name: str
    kind: str
    params: dict[str, Any]
    inputs: dict[str, str]
    code: str
    packages: dict[str, str]
    determinism: str
    environment: str
    lane: str

    def components(self, digests: dict[str, str]) -> dict[str, Any]:
        """All that the key covers; `digests`: role -> tree digest (64 hex) of each input."""
        return {
            "scheme": SCHEME,
            "stage": self.kind,
            "params": self.params,
            "inputs": dict(sorted(digests.items())),
            "code": self.code,
            "packages": self.packages,
            "determinism": self.determinism,
        }

    def key(self, digests: dict[str, str]) -> str:
        """SHA-256 (64 hex) of the components' canonical JSON."""
        return canonical.digest(self.components(digests))

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Instance:
        return cls(**value)
