"""Families of mixtures of experts on two ranks, beside the serial model: loss, every gradient."""

from __future__ import annotations

import pytest
import torch

from autoshard.planning.mixtures import is_mixture
from autoshard.program import Program
from autoshard.runtime.operators.bound import unbound
from autoshard.runtime.operators.experts import exchanged_experts
from autoshard.verification.program_check import verify_program
from gradient_types import check_types
from mixture_families import FAMILIES, family
from traced import programs


def _checked(name: str, dtype: torch.dtype, tolerance: float, axis: str = "tp") -> Program:
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(1)
    ids, other = (torch.randint(0, 64, (2, 8), generator=generator) for _ in range(2))
    (program,), values = programs(
        family(name, dtype), (ids,), [{"mesh": {axis: 2}, "planner": {"ep_exchange": "rows"}}]
    )
    nodes = [node for node in program.serial.graph.nodes if is_mixture(node)]
    assert len(nodes) == FAMILIES[name][3]
    stored = program.stored()
    if axis == "ep":
        stored = {name: program.data[node][axis] for node, name in program.parameters.items()}
    experts = {k: s for k, s in stored.items() if ".experts." in k and "bias" not in k}
    assert experts and all(state.startswith("S") for state in experts.values())
    others = [[other if v is ids else v for v in values]] if axis == "ep" else []
    differences = verify_program(program, values, others=others)
    assert differences.worst_by_norm[1] < tolerance
    return program


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_its_serial_model(name: str) -> None:
    program = _checked(name, torch.float32, 1e-5)
    if name != "deepseek_v3":  # a head that all heads share is no shard to the checker
        check_types(program)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_ep_equals_its_serial_model(name: str) -> None:
    """Each rank has a batch of its own; rows travel to the ranks of their experts."""
    program = _checked(name, torch.float32, 1e-5, "ep")
    nodes = program.graph_module.graph.nodes
    exchanged = [n for n in nodes if unbound(n.target)[0] is exchanged_experts]
    assert len(exchanged) == FAMILIES[name][3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_bfloat16_equals_its_serial_model(name: str, axis: str) -> None:
    """As far as sums of two halves of 8 bits of mantissa can be those of the whole."""
    _checked(name, torch.bfloat16, 5e-2, axis)
