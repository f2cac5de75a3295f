"""The command `autoshard verify module:function --mesh tp=4,dp_shard=2`."""

from __future__ import annotations

import argparse
import ast
import sys
import time
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parsers."""
    parser = commands.add_parser(
        "verify",
        help="is the sharded model the serial one? (local processes, no GPU)",
        description="Trains a model serially and sharded on local processes and compares loss, "
        "outputs, gradients and parameters. Exit status: 0 equal, 1 different or failed, 2 usage.",
    )
    parser.add_argument(
        "model",
        help="module:function that returns (model, args), (model, args, kwargs) or a model that "
        "is called without arguments; or a Hugging Face directory of a causal language model",
    )
    parser.add_argument("--mesh", required=True, metavar="tp=2,dp_shard=2")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="an option of the backend, such as sequence_parallel=False; may be repeated",
    )
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="aot_eager")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--steps", type=_positive, default=1)
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of the steps (SGD)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, help="default: by dtype and float64 run")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all of it")
    parser.add_argument("--batch", type=_positive, default=8, help="rows, for a directory")
    parser.add_argument("--length", type=_positive, default=32, help="tokens, for a directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify and print; the exit status."""
    import torch

    from autoshard.errors import ConfigError
    from autoshard.names import parse_mesh
    from autoshard.verification import verify

    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    source: Any = options.model
    if (Path(source) / "config.json").is_file():
        source = Pretrained(source, options.batch, options.length)
    try:
        proof = verify(
            source,
            mesh=parse_mesh(options.mesh),
            options={"inner": options.inner, **dict(options.option)},
            steps=options.steps,
            lr=options.lr,
            seed=options.seed,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            tolerance=options.tolerance,
            limit=options.limit,
            progress=progress,
        )
    except ConfigError as error:
        print(f"autoshard: error: {error}", file=sys.stderr)
        return 2
    print(proof)
    return 0 if proof.ok else 1


class Pretrained:
    """A causal language model of a directory, in training mode, and a batch of random tokens."""

    def __init__(self, directory: str, rows: int, length: int) -> None:
        self.directory, self.rows, self.length = str(Path(directory).resolve()), rows, length

    def __call__(self) -> Any:
        import torch

        from autoshard.export import load_model

        model = load_model(self.directory).train()
        config: Any = model.config
        tokens = torch.randint(config.get_text_config().vocab_size, (self.rows, self.length))
        return model, (), {"input_ids": tokens, "labels": tokens}


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
