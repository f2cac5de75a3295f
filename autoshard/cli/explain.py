"""`autoshard explain MODEL --mesh tp=8`: what one rank would run, and why, as text or a page."""

import argparse
from pathlib import Path
from typing import Any

from autoshard.cli.arguments import options_and_entries, shared_arguments


def add_command(commands: Any) -> None:
    """Add `explain` to the subparsers of the command line."""
    shared = shared_arguments(
        mesh="tp=8", batch=1, sequence=2048, dtype="bfloat16", hardware=None, option=[]
    )
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        parents=[shared],
        help="show the plan of a model on a mesh, without starting a process",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one HTML page")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the text; write the page where one is asked for."""
    import torch

    from autoshard.model_source import load_on_meta
    from autoshard.planning.cost import DEFAULT_HARDWARE
    from autoshard.tracing import trace

    options, entries = options_and_entries(arguments.model, arguments.option)
    dtype = getattr(torch, arguments.dtype)
    call = load_on_meta(arguments.model, arguments.batch, arguments.sequence, dtype, entries)
    program = trace(
        call.model,
        call.args,
        call.kwargs,
        mesh=arguments.mesh,
        hardware=DEFAULT_HARDWARE if arguments.hardware is None else arguments.hardware,
        **options,
    )
    print(program.explain(), end="")
    if arguments.html is not None:
        program.explain_html(arguments.html)
        print(f"\nwrote {arguments.html}")
