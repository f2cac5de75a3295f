"""TRL's GRPOTrainer on dp_shard, whose answers a model on tp generates with each step's weights.

    pip install trl==1.16.0 datasets==5.2.0
    torchrun --nproc-per-node 2 examples/trl_grpo.py

`rollout_func` is TRL's hook for answers that are made elsewhere. It is called before each step:
here it hands the policy's weights to the generator, from memory, and generates.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import autoshard

LENGTH = 8


class ShardedGRPO(GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer without DDP: autoshard reduces the gradients."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(prepare, evaluation_mode=True)


def made() -> LlamaForCausalLM:
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0, eos_token_id=None)
    )


def numbers() -> PreTrainedTokenizerFast:
    """Token n is the number n."""
    known = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="0", eos_token="63")


def rollout(generator: Any, prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers to this rank's prompts, by the policy's weights of this step."""
    step = trainer.state.global_step
    report = autoshard.weights.transfer(trainer.model, generator, version=step).wait()
    assert report.version == step
    ids = torch.tensor([[int(word) for word in prompt.split()] for prompt in prompts])
    # every rank of tp generates for all of them
    each = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
    dist.all_gather(each, ids)
    torch.manual_seed(step)
    with torch.no_grad():
        text = generator.generate(
            torch.cat(each),
            max_new_tokens=LENGTH,
            min_new_tokens=LENGTH,
            do_sample=True,
            top_k=0,
            use_cache=False,
        )
    own = text[dist.get_rank() * len(ids) :][: len(ids), ids.shape[1] :]
    return {"prompt_ids": ids.tolist(), "completion_ids": own.tolist(), "logprobs": None}


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of even numbers."""
    return [sum(int(n) % 2 == 0 for n in text.split()) / LENGTH for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    policy, generator = made(), made().eval()
    common = {"inner": args.inner}
    policy.compile(backend="autoshard", options={"mesh": {"dp_shard": world}, **common})
    generator.compile(backend="autoshard", options={"mesh": {"tp": world}, **common}, dynamic=True)
    settings = GRPOConfig(
        "trained",
        max_steps=args.steps,
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=LENGTH,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    prompts = [f"{n} {n + 1} {n + 2} {n + 3}" for n in range(1, 33)]
    trainer = ShardedGRPO(
        policy,
        reward,
        args=settings,
        # with a name, which else is a hash that not every pyarrow can be pickled for
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="n"),
        processing_class=numbers(),
        rollout_func=partial(rollout, generator),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "reward" in entry:
                print(f"step {entry['step']} reward {entry['reward']:.3f}")


if __name__ == "__main__":
    main()
