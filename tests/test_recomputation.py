"""Activation checkpointing: which collectives run twice, what is kept, and the same masks again."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autoshard.program import Program
from test_communication import ACTIVATION, HIDDEN, MODELS, N_RANKS, TOKENS, LanguageModel
from traced import programs

LAYERS = 2
POLICIES = ("gathers", "all", "none")
SMALL = ACTIVATION // 16


@functools.cache
def checkpointed(sequence: bool) -> dict[str, Program]:
    """A Llama of two checkpointed layers under each policy, and without checkpointing ("off")."""
    settings = {"mesh": {"tp": N_RANKS}, "hardware": "h100", "sequence_parallel": sequence}
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    found: dict[str, Program] = {}
    for names in (POLICIES, ("off",)):
        torch.compiler.reset()
        with torch.device("meta"):
            model = LanguageModel(MODELS["llama"](LAYERS), True)
        options = [settings]
        if names == POLICIES:
            model.body.gradient_checkpointing_enable({"use_reentrant": False})
            options = [{**settings, "recompute_collectives": name} for name in names]
        found.update(zip(names, programs(model, (ids,), options)[0], strict=True))
    return found


def backward(program: Program) -> Counter[str]:
    return Counter(c.op for c in program.collectives()
                   if c.phase == "backward" and c.bytes > SMALL)


def forward(program: Program) -> Counter[str]:
    return Counter(c.op for c in program.collectives()
                   if c.phase == "forward" and c.bytes > SMALL)


def saved(program: Program) -> int:
    """Bytes that forward keeps for backward."""
    return sum(node.meta["val"].nbytes for node in program.joint.saved)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_collectives_of_a_region_by_policy() -> None:
    """Each layer has two gathers and two reductions; its last reduction lies on the boundary."""
    made = checkpointed(True)
    once = backward(made["off"])
    assert once["all_gather"] and once["reduce_scatter"] and not once["all_reduce"]
    more = {name: backward(made[name]) - once for name in POLICIES}
    assert more == {
        "none": Counter(),
        "gathers": Counter(all_gather=2 * LAYERS),
        "all": Counter(all_gather=2 * LAYERS, reduce_scatter=LAYERS),
    }
    assert len({tuple(sorted(forward(p).items())) for p in made.values()}) == 1


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_reductions_of_a_region_without_sequence_parallelism() -> None:
    made = checkpointed(False)
    once = backward(made["off"])
    more = {name: backward(made[name]) - once for name in POLICIES}
    assert more == {"none": Counter(), "gathers": Counter(), "all": Counter(all_reduce=LAYERS)}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_kept_by_policy(sequence: bool) -> None:
    bytes_of = {name: saved(program) for name, program in checkpointed(sequence).items()}
    assert bytes_of["all"] < bytes_of["gathers"] <= bytes_of["none"] < bytes_of["off"] / 2
    whole = 2 * LAYERS * ACTIVATION if sequence else 0  # gathered values that "none" keeps
    assert bytes_of["none"] - bytes_of["gathers"] == whole
    share = ACTIVATION // (N_RANKS if sequence else 1)
    assert bytes_of["gathers"] - bytes_of["all"] == LAYERS * share


class Block(nn.Module):
    """Attention and a feed-forward net with dropout everywhere."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        x = x + F.dropout(self.out(found.transpose(1, 2).flatten(-2)), self.p)
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(x)), self.p)), self.p)


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Stack(nn.Module):
    def __init__(self, how: str, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.how == "off":
                x = block(x)
            elif self.how == "selective":
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    context_fn=functools.partial(
                        create_selective_checkpoint_contexts, save_matmuls
                    ),
                )
            else:
                x = checkpoint(block, x, use_reentrant=False)
        return x.square().sum()


def stack(how: str) -> Stack:
    torch.manual_seed(0)
    return Stack(how)


@pytest.mark.parametrize("rng", ["invariant", "tracker"])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_masks_are_computed_again_and_are_the_same(how: str, rng: str) -> None:
    """Gradients with and without recomputation, from AOTAutograd's graphs, bit for bit."""
    results = []
    for each in (how, "off"):
        torch.compiler.reset()
        model = stack(each)
        compiled: Any = torch.compile(
            model, backend="autoshard", options={"inner": "aot_eager", "rng": rng}
        )
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(2)
        compiled(x).backward()
        compiled(x).backward()
        results.append([p.grad for p in model.parameters()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert float(torch.stack([g.norm() for g in results[0]]).min()) > 0


def kept(how: str) -> list[fx.Node]:
    torch.compiler.reset()
    x = torch.randn(2, 8, 16)
    (program,), _ = programs(stack(how), (x,), [{"mesh": {"tp": 2}, "outputs": "replicate"}])
    return list(program.joint.saved)


def test_no_mask_is_kept() -> None:
    """What is kept of checkpointed blocks: their inputs, by policy matmuls, sums, and the seed."""
    def elements(how: str) -> int:
        return sum(n.meta["val"].numel() for n in kept(how) if n.meta["val"].is_floating_point())

    for how in ("full", "selective"):
        masks = [n for n in kept(how) if not n.meta["val"].is_floating_point()]
        assert {tuple(n.meta["val"].shape) for n in masks} == {()}, masks
    assert elements("full") < elements("selective") < elements("off")
