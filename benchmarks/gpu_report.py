"""`make gpu`: what holds on this machine's devices, in one report.

    python benchmarks/gpu_report.py [--device cpu] [--out FOLDER] [--minutes 12] [SECTION ...]

Each section is a program of its own, with a time limit: one that fails or hangs costs its own
result only, and the report says why. The report is Markdown with what each section printed, and
JSON with its figures. On a machine without CUDA, `--device cpu` runs every section to its end at
sizes for a CPU: it shows that the report works, not what a GPU does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One program of the report.

    about: what it shows. command: after the interpreter; {device} and {json} are filled in.
    devices: the fewest it needs. share: of the report's time, at most.
    """

    about: str
    command: tuple[str, ...]
    devices: int = 1
    share: float = 0.15


def _world_one(model: str, share: float) -> Section:
    return Section(
        about=f"step, first step and peak of a {model} beside plain torch.compile; predicted peak",
        command=(
            *(str(HERE / "world_one.py"), "--model", model, "--device", "{device}"),
            *("--steps", "10", "--json", "{json}"),
        ),
        share=share,
    )


def _ranks(count: int, program: str, *arguments: str) -> tuple[str, ...]:
    given = ("--device", "{device}", "--json", "{json}", *arguments)
    return (*TORCHRUN, f"--nproc-per-node={count}", str(HERE / program), *given)


def _beside_rivals(devices: int) -> dict[str, Section]:
    """What several devices can show beside what is written by hand."""
    count = devices if devices < 8 else 8
    training = _ranks(count, "training.py", "--layers", "4", "--only")
    return {
        "tensor_parallel": Section(
            about="a training step beside parallelize_module and torch's async tensor parallelism",
            command=(*training, "tp"),
            share=0.2,
        ),
        "data_parallel": Section(
            about="a training step beside DDP and FSDP2",
            command=(*training, "dp"),
            share=0.2,
        ),
        "overlap": Section(
            about="layers on tp, with and without fused collectives",
            command=_ranks(count, "fused.py"),
            share=0.1,
        ),
    }


def sections(devices: int, device: str = "cuda") -> dict[str, Section]:
    """The sections by name, for a machine of so many devices; without one, what a CPU can show."""
    few = () if device == "cuda" else ("--layers", "2", "--tokens", "16", "--rounds", "1")
    shape = ("8192", "1024", "256") if device == "cpu" else ("32000", "8192", "2048")
    sizes = [part for pair in zip(("--vocab", "--rows", "--width"), shape) for part in pair]
    share = 0.25 if devices == 1 else 0.15  # of twice the minutes
    return {
        "two_ranks": Section(
            about="the sharded model beside the serial one, on every kind of mesh of two ranks",
            command=_ranks(2, "two_ranks.py"),
        ),
        "rank_of_many": Section(
            about="the program of one rank of eight: predicted seconds and bytes beside measured",
            command=(
                *(str(HERE / "rank_of_many.py"), "--device", "{device}"),
                *("--json", "{json}"),
            ),
            share=0.3 if devices == 1 else 0.1,
        ),
        "llama": _world_one("llama", share),
        "vit": _world_one("vit", share),
        "mixture": _world_one("mixture", share),
        "dropout": Section(
            about="dropout that does not depend on the mesh beside native dropout",
            command=(str(HERE / "dropout.py"), "--device", "{device}", "--json", "{json}"),
            share=0.1,
        ),
        "attention": Section(
            about="attention to windows, documents and padding beside the dense mask, and whether "
            "it is as exact",
            command=(
                *(str(HERE / "masked_attention.py"), "--device", "{device}"),
                *("--json", "{json}"),
            ),
            share=0.1,
        ),
        "loss": Section(
            about="a loss by chunks of rows beside whole logits: time, peak, predicted peak",
            command=(
                *(str(HERE / "chunked_loss.py"), "--device", "{device}", *sizes),
                *("--json", "{json}"),
            ),
            share=0.12,
        ),
        "host_states": Section(
            about="AdamW with its states on the host beside AdamW on the device, and whether it is "
            "as exact",
            command=(str(HERE / "host_states.py"), "--device", "{device}", "--json", "{json}"),
            share=0.1,
        ),
        "decode": Section(
            about="the time to the first token and tokens a second, beside serial decoding and, on "
            "several devices, transformers' tensor parallelism",
            command=_ranks(min(devices, 2), "generate.py", "--static", *few),
            share=0.15,
        ),
        **(_beside_rivals(devices) if devices > 1 else {}),
        "measure": Section(
            about="rates of products, memory and links, as a cluster file",
            command=(
                *TORCHRUN,
                f"--nproc-per-node={devices}",
                *("--no-python", str(Path(sys.executable).with_name("autoshard")), "measure"),
                *("--device", "{device}", "--out", "{json}"),
            ),
            share=0.2,
        ),
    }


def environment(device: str) -> dict[str, Any]:
    """Versions and devices."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    if device == "cuda":
        found |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "gigabytes": torch.cuda.get_device_properties(0).total_memory / 1e9,
        }
    return found


def ran(section: Section, device: str, target: Path, limit: float) -> dict[str, Any]:
    """What a section printed, its figures, and how it ended."""
    given = {"{device}": device, "{json}": str(target)}
    command = [given.get(part, part) for part in section.command]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=limit)
        status = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks too
        printed, errors = process.communicate()
        status = f"stopped after {limit:.0f} s"
    return {
        "status": "ok" if status == "exit status 0" else status,
        "seconds": round(time.monotonic() - started, 1),
        "printed": printed.strip(),
        "errors": "" if status == "exit status 0" else "\n".join(errors.splitlines()[-25:]),
        "figures": json.loads(target.read_text()) if target.is_file() else None,
    }


def markdown(about: dict[str, Any], results: dict[str, dict[str, Any]], known: Any) -> str:
    """The report as text."""
    rows = [f"| {key} | {value} |" for key, value in about.items()]
    lines = ["# Measured by `make gpu`", "", "| | |", "|---|---|", *rows, ""]
    lines += ["| section | result | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {one['status']} | {one['seconds']} |" for name, one in results.items()]
    for name, one in results.items():
        lines += ["", f"## {name}: {known[name].about}", "", "```", one["printed"], "```"]
        if one["errors"]:
            lines += ["", f"{one['status']}:", "", "```", one["errors"], "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sections and write the report; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    has_cuda = torch.cuda.is_available()
    parser.add_argument("names", nargs="*", metavar="SECTION")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_cuda else "cpu")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/measured, build/measured on a CPU"
    )
    parser.add_argument("--minutes", type=float, help="for all: 12; of several devices 16")
    args = parser.parse_args()
    devices = torch.cuda.device_count() if args.device == "cuda" else 2
    minutes = args.minutes or (12.0 if devices == 1 else 16.0)
    known = sections(devices, args.device)
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"no section is named {', '.join(unknown)}; there are {', '.join(known)}")
    out = args.out or Path("benchmarks/measured" if args.device == "cuda" else "build/measured")
    out.mkdir(parents=True, exist_ok=True)
    about = environment(args.device)
    title = str((about.get("devices") or ["cpu"])[0]).lower().replace(" ", "-")
    name_of = out / (f"{title}-x{devices}" if args.device == "cuda" else title)
    results: dict[str, dict[str, Any]] = {}
    ends = time.monotonic() + 60 * minutes
    for name in args.names or known:
        number = f"[{len(results) + 1}/{len(args.names or known)}]"
        print(f"{number} {name}: {known[name].about}", file=sys.stderr, flush=True)
        target = out / f".{name}.json"
        target.unlink(missing_ok=True)
        limit = min(ends - time.monotonic(), 60 * minutes * known[name].share)
        if limit < 5:
            results[name] = {
                "status": "no time left",
                "seconds": 0,
                "printed": "",
                "errors": "",
                "figures": None,
            }
        else:
            results[name] = ran(known[name], args.device, target, limit)
        target.unlink(missing_ok=True)
        print(f"{number} {name}: {results[name]['status']}", file=sys.stderr, flush=True)
        # written after each section: a machine that is taken away leaves what is done
        name_of.with_suffix(".md").write_text(markdown(about, results, known))
        body = {"environment": about, "sections": results}
        name_of.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    print(f"wrote {name_of}.md and {name_of}.json")
    return sum(one["status"] != "ok" for one in results.values())


if __name__ == "__main__":
    raise SystemExit(main())
