"""What an engine costs to make: time and peak memory, as multiples of the bytes of its weights.

    python benchmarks/export.py [--layers 8] [--width 1024] [--vocab 32000] [--dtype float16]
                                [--tp 2] [--json FILE]

A Llama is captured and planned for `tp` ranks, and the engine of rank 0 is built, with a key-value
cache, dynamic batch and sequence. The default has 80 million parameters a rank. Steps:

    plan      capture and plan of the model on meta tensors
    graph     the rank's graph from the plan
    weights   the rank's parts of the weights in the engine's dtype
    convert   the network, its collectives checked
    build     TensorRT's builder, and the file

Seconds are of the clock. Memory is how far the process's peak, as Linux counts it, is above what it
held before the first step, which is the model's own weights in float32. Needs TensorRT-RTX; no GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoshard.export.rank_graph import plan_inference, read_weights
from autoshard.export.serial_graph import WeightSource
from autoshard.export.spec import EngineSpec
from autoshard.export.to_tensorrt.build import build, checked_network
from autoshard.export.to_tensorrt.engine import builder_module

PAGE = resource.getpagesize()


def llama(layers: int, width: int, vocab: int) -> torch.nn.Module:
    """A Llama in float32 with grouped key-value heads."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=2048,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config)
    return model


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Peak:
    """The largest memory of a step, as Linux counts it (VmHWM, begun anew by clear_refs)."""

    bytes: int

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("VmHWM:")]
        self.bytes = int(line.split()[1]) * 1024


def measure(layers: int, width: int, vocab: int, tp: int, dtype: torch.dtype) -> dict[str, Any]:
    """One run: the sizes, and for each step its seconds and its peak."""
    trt = builder_module()
    model = llama(layers, width, vocab)
    before = resident()
    rows: list[dict[str, Any]] = []

    def step(name: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        with Peak() as peak:
            result = action()
        seconds = time.perf_counter() - start
        rows.append({"step": name, "seconds": seconds, "peak_bytes": peak.bytes - before})
        return result

    source = WeightSource(model)
    spec = EngineSpec(
        mesh={"tp": tp},
        dtype=dtype,
        dynamic={"batch": (1, 4, 8), "sequence": (1, 512, 1024)},
        max_length=2048,
    )
    plan = step("plan", lambda: plan_inference(model, spec))
    graph = step("graph", lambda: plan.rank_graph(0))
    weights = step("weights", lambda: read_weights(source, graph))
    network = step("convert", lambda: checked_network(trt, graph, weights))

    def write() -> int:
        with tempfile.TemporaryFile() as file:
            build(network, file)
            return file.tell()

    size = step("build", write)
    held = sum(tensor.nbytes for tensor in weights.values())
    for row in rows:
        row["peak_over_weights"] = row["peak_bytes"] / held
    return {
        "builder": f"{trt.__name__} {trt.__version__}",
        "tp": tp,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "weight_bytes": held,
        "model_bytes": sum(p.nbytes for p in model.parameters()),
        "engine_bytes": size,
        "engine_over_weights": size / held,
        "steps": rows,
    }


def main() -> None:
    """Print one run as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(
        options.layers, options.width, options.vocab, options.tp, getattr(torch, options.dtype)
    )
    print(
        f"{found['builder']}, rank 0 of {found['tp']}, {found['dtype']}: "
        f"{found['parameters'] / 1e6:.1f}M parameters, {found['weight_bytes'] / 1e6:.0f} MB; "
        f"engine {found['engine_bytes'] / 1e6:.0f} MB, {found['engine_over_weights']:.2f} x\n"
    )
    print("| step | seconds | peak MB | x weights |\n|---|---|---|---|")
    for row in found["steps"]:
        print(
            f"| {row['step']} | {row['seconds']:.2f} | {row['peak_bytes'] / 1e6:.0f} | "
            f"{row['peak_over_weights']:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
