"""One process, no GPU: a model becomes a TensorRT-LLM checkpoint for 2 x 2 ranks, a Hugging Face
directory and, where TensorRT-RTX or TensorRT 11 is installed, engines of 2 ranks.

    python examples/export_single_device.py OUT [HUGGING_FACE_DIRECTORY]

Without a directory to read, a tiny Llama with random weights is exported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import autoshard


def tiny_llama() -> nn.Module:
    """A Llama of two layers with grouped key-value heads."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def main(out: Path, source: str | None) -> None:
    """Export to OUT/trtllm, OUT/huggingface and OUT/engines, and print what was written."""
    if source is None:
        model = tiny_llama()
    else:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    autoshard.export.trtllm(model, out / "trtllm", mesh={"tp": 2, "pp": 2}, dtype="float16")
    autoshard.export.huggingface(model, out / "huggingface", dtype="float16")
    try:
        autoshard.export.tensorrt(
            model,
            out / "engines",
            mesh={"tp": 2},
            dtype="float16",
            dynamic={"batch": (1, 1, 4), "sequence": (1, 64, 128)},
            max_length=128,
        )
    except autoshard.export.ExportError as error:
        print(f"no engines: {error}")
    for path in sorted(out.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>12,}  {path.relative_to(out)}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
