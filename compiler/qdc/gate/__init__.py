"""Runs a contract against the artifact that is to be uploaded; see image_gate.py."""

from qdc.gate.image_gate import Options, gate
from qdc.gate.report import exit_code

__all__ = ["Options", "exit_code", "gate"]
