"""What differs between two recipes, locks, manifests, builds, images or model folders, in domain words first."""

from qdc.manifest.diff.documents import PRODUCT, diff, document_kind, product_of, told
from qdc.manifest.diff.words import drafter_kind

__all__ = ["PRODUCT", "diff", "document_kind", "drafter_kind", "product_of", "told"]
