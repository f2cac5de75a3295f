"""The command line: `autoshard plan`, `explain`, `verify` and `export`, each with `--help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autoshard.cli import explain, export, plan, verify
from autoshard.errors import AutoshardError, ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 after an error or where `verify` finds a difference,
    2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="autoshard", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (plan, explain, verify, export):
        command.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        status: int | None = options.run(options)
    except (AutoshardError, OSError) as error:
        print(f"autoshard: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return status or 0
