"""Faults in a rule, a collective, a mask, a reduction or a gradient: `verify` catches each."""

from __future__ import annotations

from typing import Any

import pytest

import autoshard
from autoshard.verification.comparison import furthest
from autoshard.verification.proof import Proof
from faults import FAULTS, Fault, averaging, dropping, model


def proof(fault: Fault) -> Proof:
    return autoshard.verify(fault.make, mesh=dict(fault.mesh), processes=False)


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    monkeypatch.setattr(fault.place, fault.name, fault.faulty)
    found = proof(fault)
    assert not found.ok and "DIFFERENT" in str(found) and "WRONG" in str(found)
    wrong = {one.kind for one in found.comparisons if not one.ok}
    assert not wrong & set(fault.spared), found
    assert furthest(one.excess for one in found.comparisons) > 100, (
        f"hardly above the tolerance: {found}"
    )


@pytest.mark.parametrize("mesh", sorted({fault.mesh for fault in FAULTS.values()}))
def test_without_a_fault_there_is_none(mesh: tuple[tuple[str, int], ...]) -> None:
    found = autoshard.verify(model, mesh=dict(mesh), processes=False)
    assert found.ok and bool(found), found
    assert {one.kind for one in found.comparisons} == {"output", "gradient"}
    assert furthest(one.excess for one in found.comparisons) < 0.5, found


@pytest.mark.parametrize("make", [dropping, averaging])
def test_the_other_models_without_a_fault(make: Any) -> None:
    assert autoshard.verify(make, mesh={"tp": 2}, processes=False).ok


def test_threads_cannot_draw_apart() -> None:
    with pytest.raises(ValueError, match="verify this model in processes"):
        autoshard.verify(dropping, mesh={"dp_shard": 2, "tp": 2}, processes=False)
