"""Inference: logits of one batch, and text by `generate`, each weight on two ranks.

    torchrun --nproc-per-node 2 examples/inference.py

The model is compiled in place, so that `generate`, which calls the model itself, runs sharded too.
With a key-value cache each length of the cache is another shape: the first tokens compile, later
ones use what was compiled for any length.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8)
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
    )
    model = LlamaForCausalLM(config).eval()
    if not args.serial:
        # every process has the same batch; without a mesh autoshard would choose one
        options = {"mesh": {"tp": int(os.environ.get("WORLD_SIZE", 1))}, "inner": args.inner}
        model.compile(backend="autoshard", options=options)
    prompt = torch.arange(12).reshape(2, 6)
    with torch.inference_mode():
        logits = model(prompt, use_cache=False).logits
        text = model.generate(prompt, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0)
    if os.environ.get("RANK", "0") == "0":
        print("logits", " ".join(f"{x:.5f}" for x in logits[0, -1, :6].tolist()))
        for row in text.tolist():
            print("tokens", *row)
        print("compiled", len(autoshard.programs(model)), "graphs")


if __name__ == "__main__":
    main()
