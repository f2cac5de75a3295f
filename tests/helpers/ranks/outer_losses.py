"""Pipelines trained by loops that compute the loss themselves, beside the serial model."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.verification.comparison import furthest
from joined_batch import Sizes, part
from model_case import HEADS, HIDDEN, LAYERS, SEQ, Batch, floats, ids
from models import CASES
from pipelined import clipped_step, made, optimizers_of
from side_by_side import Pair, difference


class Encoder(nn.Module):
    """torch's layers, a statistic without gradient, and an output that is made of no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale, x.detach().abs().sum((1, 2)), self.scale.square()


class Broken(nn.Module):
    """Two graphs, the second of which is given what needs a gradient, and an own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder(x)[0]
        torch._dynamo.graph_break()
        y = self.head(x * self.encoder.scale + x.sin())
        return y.square().mean(), y.detach().abs().sum((1, 2))


class Judged(nn.Module):
    """A second graph without parameters, which makes the loss of what the first one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder(x)[0]
        torch._dynamo.graph_break()
        return x.square().mean(), x.detach().abs().sum((1, 2))


def _next_tokens(output: Any, batch: Batch) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)


def _mixed_up(output: Any, batch: Batch) -> Tensor:
    """Soft labels: each picture's and its neighbour's."""
    hard = F.one_hot(batch["labels"], 8).float()
    return F.cross_entropy(output.logits, 0.7 * hard + 0.3 * hard.roll(1, 0))


def _of_outputs(output: Any, batch: Batch) -> Tensor:
    """Gradients of two outputs, and no mean over samples."""
    states, _, weights = output
    return (states - batch["y"]).square().sum().sqrt() + weights.sum() * 0.1


@dataclass(frozen=True)
class Loop:
    """A model, its batches, the loss of its output, and a number that the loop reads besides."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    inputs: tuple[str, ...]
    loss: Callable[[Any, Batch], Tensor]
    read: Callable[[Any, Batch], Tensor]


def _right(output: Any, batch: Batch) -> Tensor:
    labels = batch["labels"]
    found = output.logits.argmax(-1)
    shifted = (found[:, :-1], labels[:, 1:]) if labels.dim() == 2 else (found, labels)
    return (shifted[0] == shifted[1]).float().mean()


def _seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1234)
    return kind().train()


LOOPS: Mapping[str, Loop] = {
    "gpt2": Loop(
        lambda: made("gpt2"),
        lambda step: {"input_ids": ids(step), "labels": ids(step)},
        ("input_ids",),
        _next_tokens,
        _right,
    ),
    "vit": Loop(lambda: made("vit"), CASES["vit"].make_batch, ("pixel_values",), _mixed_up, _right),
    "encoder": Loop(
        lambda: _seeded(Encoder),
        lambda step: {"x": floats(step, SEQ, HIDDEN), "y": floats(step + 50, SEQ, HIDDEN)},
        ("x",),
        _of_outputs,
        lambda output, _: output[1].mean(),
    ),
    **{
        name: Loop(
            functools.partial(_seeded, kind),
            lambda step: {"x": floats(step, SEQ, HIDDEN)},
            ("x",),
            lambda output, _: output[0],
            lambda output, _: output[1].mean(),
        )
        for name, kind in (("broken", Broken), ("judged", Judged))
    },
}


def train(name: str, sizes: Sizes, micro: int, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps of `micro` backwards each, all but the last in `no_sync`, with clipping, an
    evaluation between them, and a last batch of half the samples."""
    import autoshard
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh, loop = init_mesh(sizes, "cpu"), LOOPS[name]
    ranks, own = mesh.batches, data_coordinate(mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pair = Pair(loop.build(), mesh=sizes, **{"inner": "eager", **options})
        pair.compiled = torch.compile(pair.model, backend="autoshard", options=pair.options)
        optimizers, norm, read = optimizers_of(pair), 0.0, 0.0
        for step in range(3):
            for i in range(micro):
                given = loop.make_batch(micro * step + i)
                if step == 2:
                    given = part(given, 2, 0)
                parts = [part(given, ranks, k) for k in range(ranks)]

                def output(model: Any, batch: Batch) -> Any:
                    return model(**{key: batch[key] for key in loop.inputs})

                outputs = [output(pair.serial, each) for each in parts]
                wants = [loop.loss(o, each) for o, each in zip(outputs, parts)]
                weighed = [(k + 1) * want for k, want in enumerate(wants)]
                (torch.stack(weighed).sum() / (ranks * micro)).backward()
                early = i + 1 < micro
                with autoshard.no_sync(pair.model) if early else contextlib.nullcontext():
                    found = output(pair.compiled, parts[own])
                    got = loop.loss(found, parts[own])
                    (got * (own + 1) / micro).backward()
                pair.loss = furthest([pair.loss, difference(got, wants[own])])
                numbers = loop.read(found, parts[own]), loop.read(outputs[own], parts[own])
                read = furthest([read, difference(*numbers)])
            pair.compare_gradients()
            norm = furthest([norm, clipped_step(pair, optimizers)])
            with torch.no_grad():
                evaluated = [
                    loop.loss(output(model.eval(), parts[own]), parts[own])
                    for model in (pair.compiled, pair.serial)
                ]
                for model in (pair.compiled, pair.serial):
                    model.train()
            pair.loss = furthest([pair.loss, difference(*evaluated)])
    after = (list(pair.model.parameters()), list(pair.serial.parameters()))
    weights = furthest(difference(a, b, floor=1e-2) for a, b in zip(*after))  # of zeros: rounding
    texts = [str(one.message) for one in said if "all forwards" in str(one.message)]
    return {
        "loss": pair.loss,
        "gradient": pair.gradient,
        "where": pair.where,
        "norm": norm,
        "read": read,
        "weights": weights,
        "said": texts,
    }
