"""`autoshard plan`, `explain`, `verify`, `compile`, `export` and `measure`, each with `--help`."""

import argparse
import sys
from collections.abc import Sequence

from autoshard.cli import compile_ahead, explain, export, measure, plan, verify
from autoshard.errors import AutoshardError, ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 after an error or where `verify` finds a difference,
    2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="autoshard", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (plan, explain, verify, compile_ahead, export, measure):
        command.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        status: int | None = options.run(options)
    except (AutoshardError, OSError) as error:
        print(f"autoshard: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except RuntimeError as error:
        if not _is_of_dynamo(error):
            raise
        said = "\n  ".join(line for line in str(error).splitlines() if line.strip())
        print(f"autoshard: error: the model cannot be called: {said}", file=sys.stderr)
        return 1
    return status or 0


def _is_of_dynamo(error: Exception) -> bool:
    """Whether the model's own operators refused their operands while Dynamo traced it: sizes of a
    configuration that do not fit together. (By name: the command line imports torch late.)"""
    return any(kind.__name__ == "TorchDynamoException" for kind in type(error).__mro__)
