"""`autoshard verify MODEL --mesh tp=2,dp_shard=2`: is the sharded model the serial one?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autoshard.cli.arguments import (
    ProgressLine,
    finite,
    options_and_entries,
    positive,
    seed,
    shared_arguments,
)


def add_command(commands: Any) -> None:
    """Add `verify` to the subparsers of the command line."""
    shared = shared_arguments(mesh=..., batch=8, sequence=32, dtype=None, option=[])
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        parents=[shared],
        help="is the sharded model the serial one? (local processes, no GPU)",
        description="Trains a model serially and sharded on local processes and compares loss, "
        "outputs, gradients and parameters. A factory brings its batch; other models get random "
        "tokens. Exit status: 0 equal, 1 different or failed, 2 usage.",
    )
    parser.add_argument("--steps", type=positive, default=1, help="of training (default 1)")
    parser.add_argument("--lr", type=finite, default=0.1, help="learning rate of the steps (SGD)")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--tolerance", type=finite, help="default: by dtype and float64 run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify and print; the exit status."""
    import torch

    from autoshard.model_source import check_named, is_factory
    from autoshard.verification import verify

    options, entries = options_and_entries(arguments.model, arguments.option)
    source: Any = arguments.model
    if not is_factory(source):
        check_named(source, entries)  # before processes start
        source = NamedModel(source, entries, arguments.batch, arguments.sequence)
    proof = verify(
        source,
        mesh=arguments.mesh,
        steps=arguments.steps,
        lr=arguments.lr,
        seed=arguments.seed,
        dtype=None if arguments.dtype is None else getattr(torch, arguments.dtype),
        tolerance=arguments.tolerance,
        progress=ProgressLine(),
        **options,
    )
    print(proof)
    return 0 if proof.ok else 1


class NamedModel:
    """A causal language model of Hugging Face, in training mode, and a batch of random tokens."""

    def __init__(self, name: str, entries: dict[str, Any], batch: int, sequence: int) -> None:
        self.name = str(Path(name).resolve()) if Path(name).exists() else name
        self.entries, self.shape = entries, (batch, sequence)

    def __call__(self) -> Any:
        import torch

        from autoshard.model_source import load_model

        model = load_model(self.name, self.entries).train()
        config: Any = model.config
        tokens = torch.randint(config.get_text_config().vocab_size, self.shape)
        return model, (), {"input_ids": tokens, "labels": tokens}
