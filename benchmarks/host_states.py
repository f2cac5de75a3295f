"""AdamW whose states lie in the host's memory beside AdamW on the device: time, memory, numbers.

    python benchmarks/host_states.py [--width 1024] [--device cuda] [--json PATH]

One process, the same gradients for both, taking turns. The time is the median of
`optimizer.step()`, the bytes are those of states on the device, which on a CPU is the host itself.
`differs` is the largest difference of the parameters after all steps, relative to how far they
moved: more than 1e-4 on CUDA, or any on a CPU, is a failure, and the exit status says so.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import autoshard
from autoshard.verification.comparison import furthest

STEPS = 8


def states_on(optimizer: torch.optim.Optimizer, device: str) -> int:
    """Bytes of states in the memory of a kind of device."""
    values = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
    return sum(v.numel() * v.element_size() for v in tensors if v.device.type == device)


def main() -> int:
    """Measure and print; 1 where the numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, help="1024; on CUDA 8192")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    on_cuda = args.device == "cuda"
    width = args.width or (8192 if on_cuda else 1024)
    with torch.device(args.device):
        begun = nn.Sequential(*(nn.Linear(width, width) for _ in range(args.layers)))
    models = {name: copy.deepcopy(begun) for name in ("device", "host")}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()
    }
    optimizers["host"] = autoshard.offload_optimizer(optimizers["host"])
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(STEPS):
        for one in begun.parameters():
            one.grad = torch.randn_like(one)
        for name, model in models.items():
            for own, one in zip(model.parameters(), begun.parameters()):
                own.grad = one.grad
            started = time.perf_counter()
            optimizers[name].step()
            if on_cuda:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    with torch.no_grad():
        ways = (models["host"], models["device"], begun)
        pairs = [*zip(*(model.parameters() for model in ways))]
        differs = furthest(float((a - b).abs().max() / (b - c).abs().max()) for a, b, c in pairs)
    rows = {
        name: {
            "ms": 1e3 * statistics.median(seconds[name][2:]),
            "device_mb": states_on(optimizer, args.device) / 1e6,
        }
        for name, optimizer in optimizers.items()
    }
    for name, row in rows.items():
        ratio = row["ms"] / rows["device"]["ms"]
        print(f"{name:8}{row['ms']:10.1f} ms a step{ratio:7.2f}{row['device_mb']:10.1f} MB there")
    print(f"differs by {differs:.1e}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "differs": differs}, indent=2) + "\n")
    return int(differs > (1e-4 if on_cuda else 0))


if __name__ == "__main__":
    raise SystemExit(main())
