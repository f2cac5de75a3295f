"""A small GRPO: a policy trains on dp_shard=2, and generates on tp=2 with its weights of each step.

    torchrun --nproc-per-node 2 examples/rl_loop.py

Both models lie in the same processes. `autoshard.weights.transfer` hands the policy's weights to
the generator: what a rank holds of both is copied, the rest is sent once, and no file is written.
Each step the generator samples several answers to each prompt. An answer is worth the share of its
tokens that are even, its advantage is how far that lies above the mean of its prompt's answers, and
the policy takes a step of AdamW on it.

Of each sampled token the generator's log-probability is compared with the policy's. They are of the
same weights to the bit, in sums that may have another order: they lie apart by what rounding does,
some 1e-6 at most in float32. A step later it is a million times as much; both are printed.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

PROMPTS, ANSWERS, LENGTH = 4, 16, 8


def made() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def log_probabilities(model: Any, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """Of each token behind the prompt, given those before it."""
    logits = model(input_ids=text, use_cache=False).logits[:, prompt - 1 : -1]
    chosen = text[:, prompt:, None]
    return logits.log_softmax(-1).gather(-1, chosen)[..., 0]


def rewards_of(text: torch.Tensor) -> torch.Tensor:
    return (text % 2 == 0).float().mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))

    policy, generator = made(), made().eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    options = {"inner": args.inner}
    trained = torch.compile(
        policy, backend="autoshard", options={"mesh": {"dp_shard": ranks}, **options}
    )
    generator.compile(backend="autoshard", options={"mesh": {"tp": ranks}, **options}, dynamic=True)

    prompts = torch.arange(1, 4 * PROMPTS + 1).reshape(PROMPTS, 4).repeat_interleave(ANSWERS, 0)
    own = slice(rank * len(prompts) // ranks, (rank + 1) * len(prompts) // ranks)
    for step in range(args.steps):
        with torch.no_grad():
            # every rank of tp samples the same tokens
            torch.manual_seed(step)
            text = generator.generate(
                prompts,
                max_new_tokens=LENGTH,
                min_new_tokens=LENGTH,
                do_sample=True,
                top_k=0,
                use_cache=False,  # a handful of tokens: one program for all lengths
            )
            rewards = rewards_of(text[:, 4:]).reshape(PROMPTS, ANSWERS)
            spread = rewards.std(1, keepdim=True) + 1e-4
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
            old = log_probabilities(generator, text, 4)

        # the batch of a dp_shard rank is its part of the answers
        new = log_probabilities(trained, text[own], 4)
        apart = (new.detach() - old[own]).abs().max()
        ratio = (new - old[own]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.minimum(ratio * advantages[own, None], clipped * advantages[own, None])
        (-gain.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

        report = autoshard.weights.transfer(trained, generator, version=step).wait()
        with torch.no_grad():
            stale = (log_probabilities(generator, text, 4) - old).abs().max()
        if ranks > 1:
            dist.all_reduce(apart, dist.ReduceOp.MAX)
        if rank == 0:
            print(
                f"step {step} reward {rewards.mean():.3f} apart {apart:.1e}, a step later "
                f"{stale:.1e}; received {report.received} bytes, copied {report.copied}"
            )


if __name__ == "__main__":
    main()
