"""Fine-tuning with LoRA: the base is frozen, adapters are trained, both are sharded.

    torchrun --nproc-per-node 2 examples/lora.py

A frozen weight has no gradient and no optimizer state; its shard is all that a rank keeps of it.
"""

from __future__ import annotations

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--serial", action="store_true", help="do not shard")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    call = model
    if not args.serial:
        # every process has the same batch; without a mesh autoshard would choose one
        options = {"mesh": {"tp": int(os.environ.get("WORLD_SIZE", 1))}, "inner": args.inner}
        call = torch.compile(model, backend="autoshard", options=options)
    tokens = torch.arange(32).repeat(4, 1) + torch.arange(4)[:, None]
    first = os.environ.get("RANK", "0") == "0"
    for step in range(args.steps):
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    if first:
        for kind, chosen in (("frozen", False), ("trained", True)):
            held = [p for p in model.parameters() if p.requires_grad is chosen]
            here = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in held)
            print(f"{kind}: rank 0 holds {here} of {sum(p.numel() for p in held)} elements")
            assert chosen or all(p.grad is None for p in held)


if __name__ == "__main__":
    main()
