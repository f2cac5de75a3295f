"""`autoshard explain MODEL --mesh tp=8`: what one rank would run, and why, as text or a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
    """Add `explain` to the subparsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="show the plan of a model on a mesh, without starting a process"
    )
    parser.add_argument(
        "model",
        help="a Hugging Face directory (only its config.json is read), a configuration class of "
        "transformers such as LlamaConfig, or module:factory",
    )
    parser.add_argument("--mesh", default="tp=8", help="axes and sizes (default tp=8)")
    parser.add_argument("--batch", type=int, default=1, help="of one call (default 1)")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens (default 2048)")
    parser.add_argument("--hardware", default="h100", help="a100, h100, h200, b200 or cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="configuration entries"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one HTML page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the text; write the page where one is asked for."""
    import torch

    from autoshard.names import parse_mesh
    from autoshard.plan_source import load_source
    from autoshard.tracing import trace

    mesh = parse_mesh(options.mesh)
    dtype = getattr(torch, options.dtype)
    source = load_source(options.model, options.batch, options.sequence, dtype, options.set)
    program = trace(
        source.model, source.args, source.kwargs, mesh=mesh, hardware=options.hardware
    )
    print(program.explain(), end="")
    if options.html is not None:
        program.explain_html(options.html)
        print(f"\nwrote {options.html}")
