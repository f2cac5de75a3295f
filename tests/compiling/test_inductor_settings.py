"""Settings of Inductor reach it, from options and from torch.compile's modes; wrong ones do not.

What makes Inductor keep the order of the collectives, and reduce buckets in place.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor import config

from autoshard.compiling import check_inductor
from autoshard.compiling.inductor_order import IN_PLACE, order_dependencies, reduce_in_place
from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.passes.base import Context
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.lib.bucketing import ALL_REDUCE, REDUCE_SCATTER
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.compat.inductor import _unlogged
from bucketed import between, program, reductions, wait_of


def settings(**how: Any) -> list[tuple[bool, bool]]:
    """Whether Inductor shall tune products, and capture CUDA graphs: in the forward and in the
    backward of a model that is compiled with `how`."""
    found = []

    def inner(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        found.append((config.max_autotune, config.triton.cudagraphs))
        return boxed_nop(gm, inputs)

    with (
        mock.patch("torch._inductor.compile_fx.compile_fx_inner", inner),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.compile(nn.Linear(4, 4), backend="autoshard", **how)(
            torch.ones(2, 4)
        ).sum().backward()
    return found


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_settings_reach_inductor() -> None:
    tuned = {"options": {"inductor": {"max_autotune": True}}}
    assert settings(**tuned) == [(True, False)] * 2
    assert settings(mode="max-autotune-no-cudagraphs") == [(True, False)] * 2
    # a mode with CUDA graphs has none on a CPU, as of torch's own backend
    assert settings(mode="reduce-overhead") == [(False, False)] * 2
    assert not config.max_autotune


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        ({"cuda_graphs": True}, "cpu", "the model is on cpu"),
        ({"inductor": {"max_autotun": True}}, "cuda", "Did you mean 'max_autotune'"),
        ({"inductor": {"triton.cudagraphs": True}}, "cuda", "Say cuda_graphs=True"),
        ({"cuda_graphs": True, "inner": "eager"}, "cuda", "inner is 'eager'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_inductor(Config.from_options(options), device)
    check_inductor(Config.from_options({"cuda_graphs": True}), "cuda")


def is_product(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def test_the_order_is_held_by_products() -> None:
    """For Inductor: starts before the next product, waits after the last, in every bucket."""
    backward = program({"dp_shard": 2}, zero=2, planner={"bucket_bytes": 100_000}).joint.backward
    assert backward is not None
    found = order_dependencies(backward.graph)
    starts = [n for n in backward.graph.nodes if n.target is REDUCE_SCATTER]
    for start in starts[:-1]:
        first = next(n for n in between(backward.graph, start, wait_of(start)) if is_product(n))
        assert start in found[first]
        (held,) = found[wait_of(start)]
        assert is_product(held) and start < held < wait_of(start)
        assert all(one < node for node, ones in found.items() for one in ones)
    assert starts[-1] not in found, "nothing is left to overlap with"


def test_an_all_reduce_writes_to_the_bucket_that_only_it_reads() -> None:
    """One that fills a bucket by itself reads a gradient, which others may read too."""
    gm = reductions([[64], [10, 10], [1000], [64], [10]])
    BucketGradients(("offline:dp",), 900).run(gm, Context(Axis("tp", 1, 0, "")))
    reduce_in_place(gm.graph)
    targets = [n.target for n in gm.graph.nodes if n.target in (ALL_REDUCE, IN_PLACE)]
    assert Counter(targets) == {IN_PLACE: 1, ALL_REDUCE: 2}


@pytest.mark.parametrize("read", [False, True])
def test_graphs_are_printed_for_who_reads_them(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._aot_autograd import graph_compile

    monkeypatch.setattr(
        logging.getLogger("torch.__trace"), "handlers", [logging.NullHandler()] * read
    )
    usual = graph_compile._log_fw_bw_graphs
    with _unlogged():
        assert (graph_compile._log_fw_bw_graphs is usual) == read
    assert graph_compile._log_fw_bw_graphs is usual
