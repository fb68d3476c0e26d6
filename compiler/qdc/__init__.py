"""qdc: one recipe in, one digest-named container image out."""

__version__ = "0.1.0"
