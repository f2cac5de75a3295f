"""The command line, one file a command."""

from autoshard.cli.dispatch import main
