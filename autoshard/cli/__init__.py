"""The command line, one file a command."""

from __future__ import annotations

from autoshard.cli.dispatch import main
