"""Models and batches of the tests of pipelines, and their checkpoints."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.planning import Plan
from autoshard.verification.comparison import furthest
from model_case import SEQ, Batch, Case
from models import CASES
from side_by_side import Pair, difference, whole


def made(name: str) -> nn.Module:
    """transformers breaks the graph of a GPT-2 to warn that its config names no loss."""
    model = CASES[name].make_model()
    if name == "gpt2":
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


def batch(name: str, step: int) -> Batch:
    """Samples of unequal numbers of tokens that count."""
    found = CASES[name].make_batch(step)
    if found.get("labels", torch.zeros(1)).dim() == 2:
        found["labels"][0, : SEQ // 2] = -100
    return found


def optimizers_of(pair: Pair) -> list[torch.optim.Optimizer]:
    """One of the compiled model, one of the serial one."""
    models = (pair.model, pair.serial)
    return [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in models]


def clipped_step(pair: Pair, optimizers: list[torch.optim.Optimizer]) -> float:
    """Clip and step both; how far their norms are apart."""
    models = (pair.model, pair.serial)
    ours, theirs = (nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in models)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return difference(ours, theirs)


def evaluated(pair: Pair, case: Case, given: Batch, norm: float) -> dict[str, Any]:
    """Compare an evaluation too; all differences, and how much of the model this rank holds."""
    with torch.no_grad():
        if "labels" in given:
            pair.forward(lambda model: model(**given).logits)
        pair.forward(lambda model: case.loss(model, given))
    stored = [p for p in pair.model.parameters() if isinstance(p, DTensor)]
    return {
        "loss": pair.loss,
        "gradient": pair.gradient,
        "where": pair.where,
        "norm": norm,
        "held": sum(p.to_local().numel() for p in stored),
        "all": sum(p.numel() for p in pair.serial.parameters()),
    }


def stepped(
    mesh: dict[str, int], name: str = "llama", **options: Any
) -> tuple[nn.Module, Any, Any]:
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    settings = {"mesh": mesh, "inner": "eager", **options}
    compiled = torch.compile(model, backend="autoshard", options=settings)

    def step() -> None:
        CASES[name].loss(compiled, CASES[name].make_batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def moved(
    folder: str, first: dict[str, int], second: dict[str, int], plan: Plan | None = None
) -> float:
    """Saved from one mesh and loaded into another; the worst difference after another step. plan:
    of the first."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, step = stepped(first, plan=plan)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    other, other_optimizer, other_step = stepped(second)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(float("nan"))
    weights, moments = get_state_dict(other, other_optimizer)
    loaded = {"model": weights, "optimizer": moments}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    step()
    other_step()
    pairs = zip(model.parameters(), other.parameters())
    return furthest(difference(a, whole(b)) for a, b in pairs)


def read(name: str, mesh: dict[str, int]) -> dict[str, Any]:
    """What a user reads of a pipelined model: outputs, errors, whole weights, a state dict."""
    import autoshard

    model = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    compiled: Any = torch.compile(
        model, backend="autoshard", options={"mesh": mesh, "inner": "eager"}
    )
    with torch.no_grad():
        logits = model(**batch(name, 0)).logits
    output = compiled(**batch(name, 0))
    found: dict[str, Any] = {"logits": difference(output.logits, logits)}
    try:
        output.logits.sum().backward()
    except autoshard.AutoshardError as error:
        found["beside"] = str(error)
    output.loss.backward()
    try:
        output.loss.backward()
    except (autoshard.AutoshardError, RuntimeError) as error:
        found["again"] = str(error)
    state = autoshard.full_state_dict(model, rank0_only=False)
    assert state.keys() == before.keys()
    found["state"] = furthest(difference(state[key], value) for key, value in before.items())
    p = next(model.parameters())
    found["sum"] = difference(p.sum(), before[next(iter(before))].sum())
    with torch.no_grad():
        p[0] = 3.0
    found["write"] = float(p[0].sum()) - 3.0 * p.shape[1]
    return found


def differing(mesh: dict[str, int], rank_options: list[dict[str, Any]]) -> str:
    """The error of ranks that are given different options."""
    own = rank_options[int(os.environ["RANK"])]
    options = {"mesh": mesh, "inner": "eager", **own}
    compiled: Any = torch.compile(CASES["mlp"].make_model(), backend="autoshard", options=options)
    try:
        CASES["mlp"].loss(compiled, CASES["mlp"].make_batch(0))
    except Exception as error:  # Dynamo's, around ours
        return str(error)
    return ""
