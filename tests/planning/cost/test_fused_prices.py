"""What a plan is charged where collectives are one operator with the products beside them."""

from __future__ import annotations

import pytest

from autoshard.planning.cost import START_SECONDS, Fusing, cluster, fusing_for
from autoshard.planning.estimate import Layout, Training, profile, timing
from autoshard.planning.estimate.traffic import seconds
from autoshard.program import Program
from finished_ranks import Layers, layers, megatron


def test_the_option_is_obeyed_by_device_and_machine() -> None:
    h100 = cluster("h100")
    assert fusing_for("auto", True, 8, h100) == Fusing()
    assert fusing_for("auto", False, 8, h100) is None, "on CPUs"
    assert fusing_for("auto", True, 16, h100) is None, "over two machines"
    assert fusing_for(True, False, 16, h100) == Fusing(always=True)
    assert fusing_for(False, True, 8, h100) is None


def test_the_longer_of_the_two_is_charged() -> None:
    for communication, products in ((3e-4, 1e-4), (1e-4, 3e-4)):
        spared = Fusing().gain(communication, products)
        assert communication + products - spared == pytest.approx(3e-4 + START_SECONDS)
    assert Fusing().gain(1e-5, 1e-3) == 0.0 > Fusing(always=True).gain(1e-5, 1e-3)


def test_a_step_spares_what_each_fused_collective_does() -> None:
    build, _ = layers(Layers(512), (1, 2048, 512))
    plan = megatron(build, 2, sequence=True)
    plain, program = (
        build({"tp": 2}, plan=plan, planner={"fuse_collectives": f}) for f in (False, True)
    )
    machine, training, layout = cluster("h100").on({"tp": 2}), Training(), Layout()
    real = machine.real_links

    def took(one: Program) -> float:
        made = profile(one.serial, one.decisions, one.parameters, 2, machine, None, training)
        return timing(made, layout, training, machine).step

    of = profile(program.serial, program.decisions, program.parameters, 2, machine, None, training)
    beside = [one for one in of.sent if one.beside]
    assert len(beside) == sum(c.fused for c in program.collectives()) == 14
    spared = [
        min(
            seconds(one._replace(copied=0), {"tp": 2}, real), sum(of.forward[i] for i in one.beside)
        )
        - START_SECONDS
        for one in beside
    ]
    assert took(plain) - took(program) == pytest.approx(sum(spared))
