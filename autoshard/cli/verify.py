"""`autoshard verify MODEL --mesh tp=2,dp_shard=2`: is the sharded model the serial one?

`autoshard verify LOG --against LOG`: where do two runs part, by what they wrote of each step?
"""

import argparse
import json
import math
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
from autoshard.errors import ConfigError
from autoshard.runtime.files import parsed


def add_command(commands: Any) -> None:
    """Add `verify` to the subparsers of the command line."""
    shared = shared_arguments(mesh=None, batch=8, sequence=32, dtype=None, option=[])
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
    parser.add_argument(
        "--against",
        type=Path,
        metavar="LOG",
        help="MODEL is a log of gradients.log, this is another",
    )
    parser.set_defaults(run=run)


def compare_runs(logs: tuple[Path, Path], tolerance: float) -> int:
    """Print the first step at which a loss or norm of two runs differs by more than the tolerance,
    relative to the larger, and the steps beside it; the exit status."""
    both = [_steps(path) for path in logs]
    steps = list(zip(*both, strict=False))
    parted = next((i for i, (a, b) in enumerate(steps) if _apart(a, b) > tolerance), None)
    print(f"{len(both[0])} and {len(both[1])} steps; {len(steps)} are compared, to {tolerance:g}")
    shown = steps[-1:] if parted is None else steps[max(0, parted - 2) : parted + 3]
    for a, b in shown:
        told = "; ".join(f"{name} {a[name]!r} and {b[name]!r}" for name in _COMPARED)
        print(f"  step {a['step']}: {told}; apart by {_apart(a, b):.1e}")
    if not steps or parted is not None:
        print(f"DIFFERENT from step {parted}" if steps else "DIFFERENT: nothing to compare")
        return 1
    print("EQUAL")
    return 0


_COMPARED = ("loss", "grad_norm")


def _steps(path: Path) -> Any:
    def lines(text: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in text.splitlines()]
        return [{name: line[name] for name in ("step", *_COMPARED)} for line in found]

    remedy = "Give files that options={'gradients': {'log': path}} wrote."
    return parsed(path, "log", ConfigError, lines, "a log of a run", remedy).value


def _apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest relative difference of two steps; infinity where one is no number."""
    far = 0.0
    for name in _COMPARED:
        x, y = a[name], b[name]
        if x == y or repr(x) == repr(y) == "nan":
            continue
        if x is None or y is None or not (math.isfinite(x) and math.isfinite(y)):
            return math.inf
        far = max(far, abs(x - y) / max(abs(x), abs(y)))
    return far


def run(arguments: argparse.Namespace) -> int:
    """Verify and print; the exit status."""
    import torch

    from autoshard.verification import verify

    if arguments.against is not None:
        default = 1e-5 if arguments.tolerance is None else arguments.tolerance
        return compare_runs((Path(arguments.model), arguments.against), default)
    if arguments.mesh is None:
        raise ConfigError("verify has no mesh", remedy="Give --mesh tp=2, or a log and --against.")
    options, entries = options_and_entries(arguments.model, arguments.option)
    proof = verify(
        source_of(arguments, entries),
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


def source_of(arguments: argparse.Namespace, entries: dict[str, Any]) -> Any:
    """What makes the MODEL of a command, with its batch; checked before processes start."""
    from autoshard.model_source import check_named, is_factory

    source: str = arguments.model
    if is_factory(source):
        return source
    check_named(source, entries)
    return NamedModel(source, entries, arguments.batch, arguments.sequence)


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
