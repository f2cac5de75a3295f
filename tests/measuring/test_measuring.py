"""`autoshard measure`: the fit of links, the file, and two ranks that agree on both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autoshard import measuring as machine
from autoshard.cli import main
from autoshard.measuring import Sample, fitted
from autoshard.planning.cost import COLLECTIVES, Link, cluster, collective_seconds
from gloo_pool import GlooPool

QUICK = machine.Effort(((8, 16, 32), (4, 8, 8)), 2**12, (64, 4096), 1e-3)


def samples(link: Link, ranks: int = 4) -> list[Sample]:
    return [
        Sample(op, 4**power, ranks, collective_seconds(op, 4**power, ranks, link))
        for op in COLLECTIVES
        for power in range(4, 14)
    ]


@pytest.mark.parametrize(
    "latency, bandwidth", [(1.5e-6, 450e9), (20e-6, 2e9), (0.0, 1e9), (3e-4, 5e12)]
)
def test_the_fit_finds_the_link(latency: float, bandwidth: float) -> None:
    fit = fitted(samples(Link(latency, bandwidth, 1e9)))
    assert fit.latency == pytest.approx(latency, rel=1e-3, abs=1e-12)
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert fit.largest_error < 1e-3


def test_disturbed_samples_do_not_move_the_fit() -> None:
    found = samples(Link(5e-6, 50e9, 1e9))
    for at in (3, 17, 28):
        found[at] = found[at]._replace(seconds=10 * found[at].seconds)
    fit = fitted(found)
    assert fit.latency == pytest.approx(5e-6, rel=0.05)
    assert fit.bandwidth == pytest.approx(50e9, rel=0.05)


def test_times_that_fall_with_the_size_give_a_latency_alone() -> None:
    found = [Sample("all_gather", 4**power, 2, 1e-3 / power) for power in range(4, 10)]
    fit = fitted(found)
    assert 1e-4 < fit.latency < 1e-3 and fit.bandwidth > 1e9


def test_a_collective_that_takes_no_time_is_no_sample() -> None:
    with pytest.raises(ValueError, match="no time"):
        fitted([Sample("all_gather", 4, 2, 0.0)])


def test_one_process_writes_a_file_that_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(machine.EFFORTS, "cpu", QUICK)
    out = tmp_path / "machine.json"
    assert main(["measure", "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "no link was measured" in printed and "8 x 16 x 32" in printed
    read = cluster(str(out))
    body = json.loads(out.read_text())
    assert read.device.flops["half"] == body["tera_flops"]["half"] * 1e12 > 0
    assert read.efficiency.compute == read.efficiency.links == 1
    sheet = cluster("cpu")  # its link, at the rate that a program was assumed to get of it
    assert read.inside.bandwidth == pytest.approx(0.8 * sheet.inside.bandwidth, rel=1e-3)
    host, known = read.device.host, sheet.device.host
    assert host is not None and known is not None and read.device.kind == sheet.device.kind
    assert host.bandwidth == pytest.approx(0.8 * known.bandwidth, rel=1e-3)
    assert read.device.host_memory_bandwidth == 0.8 * sheet.device.host_memory_bandwidth


@pytest.mark.parametrize("name", ["machine.yaml", "nowhere/machine.json"])
def test_where_the_file_cannot_be(name: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["measure", "--device", "cpu", "--out", str(tmp_path / name)]) == 2
    assert "machine.json" in capsys.readouterr().err


def _two_nodes() -> Any:
    """Four ranks as two nodes of two."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        found = machine.measure_machine("cpu", QUICK)
    ranks = {kind: {each.ranks for each in every} for kind, every in found.samples.items()}
    return found.description(), ranks


@pytest.mark.slow
def test_ranks_measure_both_links_and_agree(gloo4: GlooPool) -> None:
    first, *others = gloo4(_two_nodes)
    assert all(other == first for other in others)
    description, ranks = first
    assert ranks == {"inside": {2}, "between": {2}}
    assert description["devices_per_node"] == 2
    assert description["inside"] != description["between"]
