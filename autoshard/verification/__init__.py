"""Is the sharded model the serial one: loss, outputs and every gradient compared."""

from __future__ import annotations

from autoshard.verification.proof import Proof, verify

__all__ = [
    "Proof",
    "verify",
]
