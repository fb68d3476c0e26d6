"""Starts the artifact that is to be uploaded and checks it; see image_gate.py."""

from qdc.gate.image_gate import Options, exit_code, gate

__all__ = ["Options", "exit_code", "gate"]
