"""Training loops of libraries: the whole of each, with a small model made on the spot."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from scenarios.job import Job
from scenarios.surgery import llama


@contextlib.contextmanager
def processes(job: Job) -> Iterator[None]:
    """The environment in which a library finds the job's processes: one where it is serial."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    kept = {name: os.environ[name] for name in launched}
    if not job.sharded:
        for name in launched:
            del os.environ[name]
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    try:
        yield
    finally:
        os.environ.update(kept)
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def accelerated(job: Job) -> None:
    """accelerate: accumulation of gradients, clipping, a scheduler, the state dict."""
    from accelerate import Accelerator

    with processes(job):
        # else a scheduler steps once for each process, those of a tp axis too
        once = dict(step_scheduler_with_optimizer=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **once)
        net, compiled = job.pair()
        made = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
        optimizer = accelerator.prepare_optimizer(made)
        schedule = accelerator.prepare_scheduler(torch.optim.lr_scheduler.ExponentialLR(made, 0.9))
        for step in range(4):
            with accelerator.accumulate(compiled):
                loss = job.loss(compiled, step)
                job.record_loss(loss, step)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(net.parameters(), 0.1)
                    job.record(f"norm {step}", norm.item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        job.record(
            "same model", accelerator.unwrap_model(compiled, keep_torch_compile=False) is net
        )
        job.record_model(net)


def timm_ema(job: Job) -> None:
    """timm: a vision transformer, its optimizer factory, and ModelEmaV3 made before and after."""
    for name in ("nms", "qnms"):  # absent where torchvision was built for another torch
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor b, Tensor s, float t) -> Tensor")
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    job.tolerance = 1e-4  # AdamW divides the rounding of gradients that are almost zero by eps
    for when in ("before", "after"):
        torch.manual_seed(1)
        sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2)
        net = timm.create_model("vit_tiny_patch16_224", num_classes=8, **sizes)
        compiled = job.compile(net)
        images, labels = torch.randn(4, 3, 16, 16), torch.arange(4)
        rows = [part.chunk(job.ranks)[job.rank] for part in (images, labels)]
        if when == "after":
            compiled(rows[0])
        ema = ModelEmaV3(net, decay=0.8)
        optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-2, weight_decay=0.05, eps=1e-3)
        for _ in range(2):
            loss = F.cross_entropy(compiled(rows[0]), rows[1])
            job.record_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(net)
        job.record_model(net, when)
        job.record_model(ema.module, f"{when} EMA")
        with torch.no_grad():
            job.record_loss(F.cross_entropy(ema(rows[0]), rows[1]))


def lightning_fit(job: Job) -> None:
    """Lightning: fit, with a checkpoint from which another Trainer goes on."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = job.net()
            if job.sharded:
                options = {"mesh": job.sizes, "inner": job.inner}
                self.net.compile(backend="autoshard", options=options)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            job.record_loss(loss)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    parts = [job.rows(step) for step in range(4)]
    data = TensorDataset(*(torch.cat(both) for both in zip(*parts)))
    loader = DataLoader(data, batch_size=len(parts[0][0]))
    quiet = dict(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        gradient_clip_val=0.1,
    )
    with processes(job):
        first = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, **quiet)
        first.fit(module := Module(), loader)
        path = os.path.join(job.folder, f"{os.environ.get('RANK', 0)}.ckpt")
        first.save_checkpoint(path)
        job.record_model(module, "stopped")
        second = lightning.Trainer(accelerator="cpu", devices=1, max_steps=4, **quiet)
        second.fit(again := Module(), loader, ckpt_path=path, weights_only=False)
        job.record_model(again, "resumed")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(29))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _trl(job: Job, trainer: Any, config: Any, rows: list[dict[str, str]], **more: Any) -> None:
    """Three steps of a trainer of TRL, as the Trainer example shards one."""
    from datasets import Dataset

    tp = (job.sizes or {}).get("tp", 1)

    class Sharded(trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = lambda model, **_: model
            if tp > 1:
                self.accelerator.prepare_data_loader = lambda loader, **_: loader

        def get_tp_size(self) -> int:
            return tp

    with processes(job):
        model = llama(job)
        settings = config(
            job.folder,
            max_steps=3,
            per_device_train_batch_size=4 // job.ranks,
            train_sampling_strategy="sequential",
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            adam_epsilon=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        if job.sharded:
            model.compile(backend="autoshard", options={"mesh": job.sizes, "inner": job.inner})
        made = Sharded(
            model=model,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
            **more,
        )
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        job.record("steps", len(losses))
        job.record_model(model)


def supervised(job: Job) -> None:
    """TRL's SFTTrainer."""
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(str((i + j) % 29) for j in range(8))} for i in range(12)]
    _trl(job, SFTTrainer, SFTConfig, rows)


def preferred(job: Job) -> None:
    """TRL's DPOTrainer, with a reference model that stays on one device."""
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": f"{i} {i + 1}", "chosen": f" {i + 2} {i + 3}", "rejected": f" {i} {i}"}
        for i in range(12)
    ]
    reference = llama(job)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    _trl(job, DPOTrainer, DPOConfig, rows, ref_model=reference)
