"""The command line, one file a command."""

from __future__ import annotations

from autoshard.cli.main import main

__all__ = ["main"]
