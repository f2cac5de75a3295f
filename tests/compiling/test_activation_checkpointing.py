"""Activation checkpointing: which collectives run twice, what is kept, and the same masks again."""

from __future__ import annotations

import copy
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
from traced import programs

N, TOKENS, HIDDEN, LAYERS = 8, 4096, 4096, 2
ACTIVATION = TOKENS * HIDDEN * 4
POLICIES = ("gathers", "all", "none")


class FeedForward(nn.Module):
    """Two pairs of linears after a norm each, so that one reduction lies inside the region."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.ups = nn.ModuleList([nn.Linear(HIDDEN, 4 * HIDDEN) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(4 * HIDDEN, HIDDEN) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs):
            x = x + down(F.gelu(up(norm(x))))
        return x


@functools.cache
def checkpointed(sequence: bool) -> dict[str, Program]:
    """Two checkpointed blocks under each policy, and without checkpointing ("off")."""
    settings = {"mesh": {"tp": N}, "hardware": "h100"}
    x = torch.zeros(1, TOKENS, HIDDEN, device="meta", requires_grad=True)
    found: dict[str, Program] = {}
    for how, names in (("full", POLICIES), ("off", ("off",))):
        torch.compiler.reset()
        with torch.device("meta"):
            model = Stack(how, FeedForward)
        planner = [
            {"sequence_parallel": sequence}
            | ({} if how == "off" else {"recompute_collectives": name})
            for name in names
        ]
        options = [{**settings, "planner": one} for one in planner]
        found.update(zip(names, programs(model, (x,), options)[0], strict=True))
    return found


def large(program: Program, phase: str) -> Counter[str]:
    """Collectives of whole activations."""
    return Counter(
        c.op for c in program.collectives() if c.phase == phase and c.bytes >= ACTIVATION
    )


def saved(program: Program) -> float:
    """What forward keeps for backward, in whole activations."""
    return sum(node.meta["val"].nbytes for node in program.joint.saved) / ACTIVATION


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_of_a_region_by_policy(sequence: bool) -> None:
    """The first norm is computed whole, and the last reduction is needed by nothing in backward."""
    made = checkpointed(sequence)
    once = large(made["off"], "backward")
    more = {name: large(made[name], "backward") - once for name in POLICIES}
    if sequence:
        gathers, reductions = Counter(all_gather=2 * LAYERS - 1), Counter(reduce_scatter=3)
    else:
        gathers, reductions = Counter(), Counter(all_reduce=3)
    assert more == {"none": Counter(), "gathers": gathers, "all": gathers + reductions}
    for program in made.values():
        assert large(program, "forward") == large(made["off"], "forward")


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_kept_by_policy(sequence: bool) -> None:
    kept = {name: saved(program) for name, program in checkpointed(sequence).items()}
    shard = 1 / N if sequence else 1
    assert kept["gathers"] - kept["all"] == 3 * shard
    assert kept["none"] - kept["gathers"] == (2 * LAYERS - 1 if sequence else 0)
    assert kept["none"] < kept["off"]


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
        self.blocks = nn.ModuleList([block() for _ in range(LAYERS)])

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


@pytest.mark.parametrize(
    ("how", "rng"),
    [
        ("full", "invariant"),
        ("selective", "tracker"),
        pytest.param("full", "tracker", marks=pytest.mark.slow),
        pytest.param("selective", "invariant", marks=pytest.mark.slow),
    ],
)
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


class ZerosThatWantGradients(nn.Module):
    """What T5 of Hugging Face does in a checkpointed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(16)
        zeros.requires_grad = True
        y = self.down(F.gelu(self.up(x))) + zeros
        return x + y if zeros.requires_grad else x


def test_a_leaf_made_in_a_region_does_not_break_the_graph() -> None:
    model, x = Stack("full", ZerosThatWantGradients), torch.randn(2, 8, 16)
    want = copy.deepcopy(model)
    want(x).backward()
    torch.compiler.reset()
    options = {"inner": "aot_eager", "rng": "invariant"}
    compiled: Any = torch.compile(model, backend="autoshard", fullgraph=True, options=options)
    compiled(x).backward()
    for got, expected in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)
    torch.compiler.reset()
    with pytest.raises(Exception, match="requires_grad"):  # of others, nothing changes
        torch.compile(want, backend="aot_eager", fullgraph=True)(x)
