"""Train with data and tensor parallelism, export from live memory, generate text; no GPU.

    torchrun --nproc-per-node=4 examples/train_then_export.py OUT

Four processes, dp_shard = 2 x tp = 2, teach a tiny Llama the letters of a sentence. What they hold
then becomes a TensorRT-LLM checkpoint, a Hugging Face directory and TensorRT engines of two ranks.
The network inside the engines is run on the CPU, layer by layer, by the two ranks that built it,
and continues the sentence.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autoshard

TEXT = "a model that is trained in shards is served in shards. "
LETTERS = sorted(set(TEXT))
STEPS, WINDOW, PROMPT = 100, 32, "a model that is "
SIZES: dict[str, Any] = {
    "mesh": {"tp": 2},
    "dynamic": {"batch": (1, 1, 4), "sequence": (1, 16, 32)},
    "max_length": 64,
}


def tiny_llama() -> nn.Module:
    """A Llama of letters."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=len(LETTERS) + len(LETTERS) % 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def batch(step: int) -> torch.Tensor:
    """Four windows of the text [4, WINDOW], another set for each data-parallel rank."""
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT * 4])
    first = 8 * step + 4 * (dist.get_rank() // 2 if dist.is_initialized() else 0)
    starts = [(first + i) * 5 % len(TEXT) for i in range(4)]
    return torch.stack([ids[start : start + WINDOW] for start in starts])


def train() -> nn.Module:
    """The trained model, its parameters stored as shards."""
    torch.manual_seed(0)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    options = {"mesh": {"dp_shard": 2, "tp": 2}, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    for step in range(STEPS):
        ids = batch(step)
        loss = compiled(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            say(f"step {step}: loss {loss.item():.3f}")
    return model


def generated(model: nn.Module) -> str:
    """What the network of the engines says after PROMPT, run on the CPU by ranks 0 and 1."""
    from autoshard.export import EngineSpec
    from autoshard.export.to_tensorrt import cpu_engine, networks
    from autoshard.runtime.collectives import Axis

    group = dist.new_group([0, 1])
    found = networks(model, EngineSpec(**SIZES))
    if not found:
        return ""
    axis = Axis("tp", 2, dist.get_rank(), group.group_name)
    engine = cpu_engine(found[0], axis, group)
    prompt = [LETTERS.index(letter) for letter in PROMPT]
    (answer,) = engine.generate([prompt], 40)
    return "".join(LETTERS[token] if token < len(LETTERS) else "?" for token in answer)


def say(text: str) -> None:
    """Print once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(out: Path) -> None:
    """Train, export, generate."""
    model = train()
    autoshard.export.trtllm(model, out / "trtllm", mesh={"tp": 2}, dtype="float16")
    autoshard.export.huggingface(model, out / "huggingface")
    autoshard.export.tensorrt(model, out / "engines", **SIZES)
    for path in sorted(out.rglob("*")):
        if path.is_file():
            say(f"{path.stat().st_size:>12,}  {path.relative_to(out)}")
    answer = generated(model)
    say(f"{PROMPT}[{answer}]")
    dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
