"""Hugging Face's Trainer over a sharded model.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

Under torchrun, Trainer wraps the model in DistributedDataParallel and gives each process its own
batches. On a tp axis the processes are one worker: `ShardedTrainer` says so in three places.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autoshard


class ShardedTrainer(Trainer):
    """A Trainer whose processes work on one batch together."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model  # no DDP
        self.accelerator.prepare_data_loader = lambda loader, **_: loader  # the same batches

    def get_tp_size(self) -> int:
        """Tokens and losses are counted once, not once a process."""
        return self.args.world_size


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each sample counts up from its own number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 32)
        return {"input_ids": tokens, "labels": tokens}


def tiny_llama() -> nn.Module:
    """104 thousand parameters."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--serial", action="store_true", help="do not shard")
    args = parser.parse_args()
    model = tiny_llama()
    if not args.serial:
        # every process has the same batch; in place, so that Trainer sees the model it knows
        options = {"mesh": {"tp": int(os.environ.get("WORLD_SIZE", 1))}, "inner": args.inner}
        model.compile(backend="autoshard", options=options)
    with tempfile.TemporaryDirectory() as folder:
        quiet = dict(disable_tqdm=True, report_to="none", save_strategy="no")
        steps = dict(max_steps=args.steps, logging_steps=1, learning_rate=3e-3)
        cpu = not torch.cuda.is_available()
        settings = TrainingArguments(folder, use_cpu=cpu, **steps, **quiet)
        trainer = ShardedTrainer(model=model, args=settings, train_dataset=Counting())
        trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step']} loss {entry['loss']:.6f} norm {entry['grad_norm']:.4f}")
        print("compiled", len(autoshard.programs(model)), "graphs")


if __name__ == "__main__":
    main()
