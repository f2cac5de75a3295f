"""`autoshard measure --out machine.json`: what this machine does in truth, for `autoshard plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cli.arguments import ProgressLine

if TYPE_CHECKING:
    from autoshard.measuring import Measured


def add_command(commands: Any) -> None:
    """Add `measure` to the subparsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "measure",
        help="a cluster file of this machine, measured in about a minute",
        description="Times matrix products, memory and, where torchrun started several ranks "
        "(torchrun --no-python --nproc-per-node 8 autoshard measure), every collective inside and "
        "between nodes; prints them and writes a file for --hardware.",
    )
    parser.add_argument("--out", type=Path, help="write the cluster file (.json) here")
    parser.add_argument(
        "--device", help="cpu, or the kind of accelerator (default: cuda where it is)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print and write, on the first rank; ConfigError where --out is not a .json file."""
    import torch

    from autoshard.errors import ConfigError
    from autoshard.measuring import measure_machine
    from autoshard.runtime.agreement import world_axis
    from autoshard.runtime.mesh import start_world

    out: Path | None = arguments.out
    if out is not None and (out.suffix != ".json" or not out.absolute().parent.is_dir()):
        raise ConfigError(
            f"--out {out} is no .json file in a folder that exists",
            remedy="Write it as --out machine.json.",
        )
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        start_world(device)
    first = world_axis().rank == 0
    line = ProgressLine()
    quiet = lambda what, done, total: None  # noqa: E731
    measured = measure_machine(device, progress=line if first else quiet)
    if not first:
        return
    print(text(measured))
    if out is not None:
        measured.save(out)
        print(f"\nwrote {out}: autoshard plan MODEL --world N --hardware {out}")


def text(measured: Measured) -> str:
    """Tables of the products and of the collectives, each beside what the fitted link says."""
    from autoshard.explain import human, table
    from autoshard.planning.cost import Link, collective_seconds

    products = [
        [each.kind, f"{each.rows} x {each.inner} x {each.columns}", f"{each.rate / 1e12:.3g}"]
        for each in measured.products
    ]
    found = [
        f"{measured.name}: memory {measured.memory / 1e9:.4g} GB/s, read plus written\n",
        table(["product", "size", "TFLOP/s"], products, right=(2,)),
    ]
    for kind, samples in measured.samples.items():
        fit = measured.fits[kind]
        link = Link(fit.latency, fit.bandwidth, measured.memory)
        rows = [
            [
                each.op,
                human(each.nbytes),
                f"{1e6 * each.seconds:.1f}",
                f"{1e6 * collective_seconds(each.op, each.nbytes, each.ranks, link):.1f}",
            ]
            for each in samples
        ]
        where = "inside a node" if kind == "inside" else "between nodes"
        found += [
            f"\n{samples[0].ranks} ranks {where}: {1e6 * fit.latency:.3g} us a step, "
            f"{fit.bandwidth / 1e9:.3g} GB/s a rank; the fit's error: median "
            f"{100 * fit.median_error:.0f}%, largest {100 * fit.largest_error:.0f}%\n",
            table(["collective", "size", "us", "fitted us"], rows, right=(1, 2, 3)),
        ]
    if not measured.samples:
        found.append("\none rank: no link was measured; the file has those of the data sheet")
    return "\n".join(line.rstrip() for line in found)
