"""Attention to ranges of keys beside torch's attention with the dense mask: numbers, time, peak.

    python benchmarks/masked_attention.py [--device cuda] [--length 4096] [--dtype float32] [--step]

A window of 256, packed documents of 512, both, left padding by a third: result and gradients of
autoshard::masked_attention, and of dense attention in the same dtype, as errors against dense
attention in float64. The first may be twice the second; more is a failure, and the exit status
says so. On a GPU 16-bit dtypes run torch's kernels of sequences of many lengths, all else blocks
of query rows. time and peak: of forward and backward, as ratios to the dense mask (peak on GPUs).

--step: a training step of a Llama that makes these masks itself, through Inductor: plain
torch.compile, autoshard with `recover_masks` off, and on; ratios to torch.compile.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.masked_attention import MASKED_ATTENTION
from autoshard.verification.comparison import furthest
from llama_model import Attention, Llama, Shape, loss_of
from world_one import compiled, peak_of, step

T = torch.Tensor
HEADS, SHARED, WIDTH = 8, 2, 64
WINDOW, DOCUMENT = 256, 512
FACTOR = 2.0  # of the error of dense attention in the same dtype
TURNS = 3
WARM = 3
WAYS: dict[str, dict[str, Any] | None] = {
    "torch.compile": None,
    "dense mask": {"mesh": {"tp": 1}, "planner": {"recover_masks": False}},
    "ranges": {"mesh": {"tp": 1}, "planner": {"recover_masks": True}},
}


def cases(length: int, device: str) -> dict[str, tuple[T | None, T | None, int | None]]:
    """(documents, visible, window) by name."""
    place = torch.arange(length, device=device)
    documents = (place // DOCUMENT)[None, None, None]
    visible = (place >= length // 3)[None, None, None]
    return {
        "window": (None, None, WINDOW),
        "documents": (documents, None, None),
        "documents and window": (documents, None, WINDOW),
        "left padding": (None, visible, None),
    }


def dense_mask(
    documents: T | None, visible: T | None, window: int | None, length: int, device: str
) -> T:
    """The mask that the ranges mean: bool [1, 1, rows, keys]."""
    place = torch.arange(length, device=device)
    mask = (place <= place[:, None])[None, None]
    if window is not None:
        mask = mask & (place[:, None] - place < window)
    if documents is not None:
        mask = mask & (documents.mT == documents)
    return mask if visible is None else mask & visible


def with_gradients(attend: Callable[..., T], inputs: list[T], weight: T) -> list[T]:
    """The result and the gradients of queries, keys and values."""
    own = [x.detach().requires_grad_() for x in inputs]
    made = attend(*own)
    return [made.detach(), *torch.autograd.grad((made * weight.to(made.dtype)).sum(), own)]


def error(found: list[T], wanted: list[T]) -> float:
    """The largest relative error of a result or a gradient, by its norm."""
    return furthest(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted))


def cost(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds, the least of some turns, and the bytes at the peak above what was there."""
    seconds = []
    peak = 0.0
    for _ in range(TURNS):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        seconds.append(time.perf_counter() - start)
    return min(seconds), peak


def compared(
    masks: tuple[Any, ...], length: int, device: str, dtype: torch.dtype
) -> dict[str, float]:
    """Errors and ratios of one case."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (HEADS, SHARED, SHARED)
    inputs = [torch.randn(1, n, length, WIDTH, generator=generator, device=device) for n in heads]
    weight = torch.randn(inputs[0].shape, generator=generator, device=device)
    mask, small = dense_mask(*masks, length, device), [x.to(dtype) for x in inputs]

    def dense(q: T, k: T, v: T) -> T:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    def ranges(q: T, k: T, v: T) -> T:
        made: T = MASKED_ATTENTION(q, k, v, *masks, enable_gqa=True)
        return made

    exact = with_gradients(dense, [x.double() for x in small], weight)
    times, peaks = zip(
        *(cost(lambda f=f: with_gradients(f, small, weight), device) for f in (ranges, dense))
    )
    return {
        "error": error(with_gradients(ranges, small, weight), exact),
        "of_dense": error(with_gradients(dense, small, weight), exact),
        "ms": 1e3 * times[0],
        "time": times[0] / times[1],
        "peak": peaks[0] / peaks[1] if peaks[1] else float("nan"),
    }


class MaskedLlama(Llama):
    """A Llama whose attention reads a dense mask, made in its forward: ids to the loss.

    positions, visible: [batch, length], as Hugging Face's position_ids and attention_mask.
    """

    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__(shape)
        self.window = window
        for block in self.blocks:
            block.attention = _ByMask(shape)

    def forward(self, ids: T, positions: T | None = None, visible: T | None = None) -> T:
        documents = None
        if positions is not None:
            jumps = positions.diff(prepend=positions[:, :1] - 1) != 1
            documents = jumps.cumsum(-1)[:, None, None]
        if visible is not None:
            visible = visible[:, None, None]
        mask = dense_mask(documents, visible, self.window, ids.shape[1], str(ids.device))
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block.attention(block.attention_norm(x), self.cos, self.sin, mask)
            x = x + block.mlp(block.mlp_norm(x))
        return loss_of(self.head(self.norm(x)), ids)


class _ByMask(Attention):
    def forward(self, x: T, cos: T, sin: T, mask: T) -> T:
        y = F.scaled_dot_product_attention(*self.heads(x, cos, sin), mask)
        return self.o(y.transpose(1, 2).flatten(-2))


def steps(length: int, device: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """A training step of each case: milliseconds and megabytes of each way."""
    sizes = (32_000, 1024, 2816, 4, 16) if device == "cuda" else (512, 256, 704, 2, 4)
    shape = Shape(*sizes, length)
    rows = {}
    place = torch.arange(length, device=device)[None]
    for name, (documents, padded, window) in cases(length, device).items():
        positions = None if documents is None else place % DOCUMENT
        visible = None if padded is None else padded[0, 0]
        torch.compiler.reset()
        torch.manual_seed(0)
        with torch.device(device):
            first = MaskedLlama(shape, window).to(dtype)
            ids = torch.randint(shape.vocab, (1, length))
        calls = {}
        for way, options in WAYS.items():
            own = copy.deepcopy(first)
            whole = compiled(own, options)
            calls[way] = functools.partial(whole, positions=positions, visible=visible), own
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(WARM + 5):
            for way, call in calls.items():
                times[way].append(step(*call, ids))
        rows[name] = {
            way: (1e3 * statistics.median(times[way][WARM:]), peak_of(*call, ids) / 1e6)
            for way, call in calls.items()
        }
        base = rows[name]["torch.compile"]
        for way, (ms, peak) in rows[name].items():
            print(
                f"{name:22}{way:16}{ms:9.1f}{ms / base[0]:7.2f}{peak:10.1f}{peak / base[1]:7.2f}",
                flush=True,
            )
    return rows


def main() -> int:
    """Compare all cases; 1 where one is less exact than it may be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--length", type=int, help="default: 4096, and 1024 on a CPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--step", action="store_true", help="a whole training step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    length = args.length or (4096 if args.device == "cuda" else 1024)
    if args.step:
        print(f"{'':38}{'ms':>9}{'ratio':>7}{'peak MB':>10}{'ratio':>7}")
        found = steps(length, args.device, getattr(torch, args.dtype))
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n")
        return 0
    print(f"{'':22}{'error':>9}{'of dense':>10}{'ms':>8}{'time':>7}{'peak':>7}")
    rows, failed = {}, 0
    for name, masks in cases(length, args.device).items():
        row = rows[name] = compared(masks, length, args.device, getattr(torch, args.dtype))
        wrong = not row["error"] <= FACTOR * row["of_dense"]
        failed += wrong
        print(
            f"{name:22}{row['error']:9.1e}{row['of_dense']:10.1e}{row['ms']:8.2f}{row['time']:7.2f}"
            f"{row['peak']:7.2f}{'  WRONG' if wrong else ''}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
