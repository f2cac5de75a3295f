"""Hugging Face's Trainer over a sharded model: it trains, evaluates, saves, resumes.

torchrun --nproc-per-node 2 examples/hf_trainer.py --steps 4
torchrun --nproc-per-node 2 examples/hf_trainer.py --steps 8 --resume --axis dp_shard
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autoshard


class ShardedTrainer(Trainer):
    """A Trainer without DDP, with checkpoints of one process; a tp axis works on one batch."""

    tp_size = 1

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # no DDP; what is left is the autocast of bf16=True and fp16=True
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(prepare, evaluation_mode=True)
        if self.tp_size > 1:
            self.accelerator.prepare_data_loader = lambda loader, **_: loader  # the same batches

    def get_tp_size(self) -> int:
        """Tokens and losses are counted once, not once a process of a tp axis."""
        return self.tp_size

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every process calls it, the first one writes."""
        self.model.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = autoshard.full_state_dict(self.optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, "optimizer.pt"))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))


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
    parser.add_argument("--axis", default="tp", choices=["tp", "dp_shard"])
    parser.add_argument("--folder", default="trained")
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16, by autocast")
    parser.add_argument("--resume", action="store_true", help="from the folder's last checkpoint")
    parser.add_argument("--serial", action="store_true", help="do not shard")
    args = parser.parse_args()
    model, world = tiny_llama(), int(os.environ.get("WORLD_SIZE", 1))
    if not args.serial:
        # in place, so that Trainer sees the model it knows
        options = {"mesh": {args.axis: world}, "inner": args.inner}
        model.compile(backend="autoshard", options=options)
    ShardedTrainer.tp_size = world if args.axis == "tp" else 1
    rows = 8 * ShardedTrainer.tp_size // world  # eight in all, on any mesh
    quiet = dict(disable_tqdm=True, report_to="none", use_cpu=not torch.cuda.is_available())
    data = dict(train_sampling_strategy="sequential", per_device_train_batch_size=rows)
    steps = dict(max_steps=args.steps, logging_steps=1, learning_rate=3e-3)
    saved = dict(save_steps=2, eval_steps=2, eval_strategy="steps", load_best_model_at_end=True)
    settings = TrainingArguments(
        args.folder, bf16=args.bf16, lr_scheduler_type="constant", **steps, **saved, **data, **quiet
    )
    trainer = ShardedTrainer(model, settings, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(os.path.join(args.folder, "best"))
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "grad_norm" in entry:
                norm = entry["grad_norm"]
                print(f"step {entry['step']} loss {entry['loss']:.6f} norm {norm:.4f}")
            elif "eval_loss" in entry:
                print(f"evaluated at {entry['step']}: {entry['eval_loss']:.6f}")
        print("compiled", len(autoshard.programs(model)), "graphs")


if __name__ == "__main__":
    main()
