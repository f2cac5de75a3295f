"""Every rank of a running sharded job exports from the memory it holds; no GPU is needed.

    torchrun --nproc-per-node=2 examples/export_distributed.py OUT

Trains a tiny Llama for one step on a mesh of tp = 2, then writes OUT/trtllm, OUT/huggingface and,
where TensorRT-RTX or TensorRT 11 is installed, OUT/engines. No rank ever holds the whole model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autoshard


def tiny_llama() -> nn.Module:
    """A Llama of two layers with grouped key-value heads."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def can_build_engines() -> bool:
    """Whether a builder of engines with collectives is installed."""
    from autoshard.export.to_tensorrt import builder_module

    try:
        builder_module()
    except autoshard.export.ExportError:
        return False
    return True


def main(out: Path) -> None:
    """Train a step, export, and print from rank 0 what was written."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"mesh": {"tp": 2}, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    ids = torch.arange(32).view(4, 8)
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()

    autoshard.export.trtllm(model, out / "trtllm", mesh={"tp": 2}, dtype="float16")
    autoshard.export.huggingface(model, out / "huggingface", dtype="float16")
    if can_build_engines():
        autoshard.export.tensorrt(
            model,
            out / "engines",
            mesh={"tp": 2},
            dtype="float16",
            dynamic={"batch": (1, 1, 4), "sequence": (1, 16, 64)},
            max_length=64,
            compute_capability=("8.0", "8.9"),
        )
    dist.barrier()
    if dist.get_rank() == 0:
        for path in sorted(out.rglob("*")):
            if path.is_file():
                print(f"{path.stat().st_size:>12,}  {path.relative_to(out)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
