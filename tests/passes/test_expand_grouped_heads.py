"""expand_grouped_heads changes no value; where heads need no repetition, it says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autoshard.passes.base import Context, Report
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.graph_meta import DIFF, PASS
from capturing import Recorder, check

T = torch.Tensor


def attention(
    heads: int, kv: int, n: int, *, dynamic: bool = False, **kwargs: Any
) -> tuple[Report, Recorder]:
    reports: list[Report] = []

    def rewrite(gm: fx.GraphModule) -> None:
        reports.append(ExpandGroupedHeads().run(gm, Context(Axis("tp", n, 0, ""))))

    class Model(nn.Module):
        counts = (heads, kv, kv)

        def forward(self, *inputs: T) -> T:
            q, k, v = (
                x.view(*x.shape[:2], h, 4).transpose(1, 2) for x, h in zip(inputs, self.counts)
            )
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)

    inputs = [torch.randn(3, 6, 4 * h, requires_grad=True) for h in (heads, kv, kv)]
    recorder = check(Model(), inputs, rewrite=rewrite, dynamic=dynamic)
    with torch.no_grad():
        check(Model(), inputs, rewrite=rewrite, backward=False, tolerance=0, around=torch.no_grad)
    return reports[0], recorder


@pytest.mark.parametrize("heads,kv,n", [(8, 2, 4), (4, 1, 2), (6, 3, 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_expands_heads_that_do_not_divide(heads: int, kv: int, n: int, dynamic: bool) -> None:
    report, recorder = attention(heads, kv, n, dynamic=dynamic)
    assert (report.hits, report.skips) == (1, [])
    node = recorder.graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )[0]
    assert not node.kwargs.get("enable_gqa")
    for operand in node.args[:3]:
        assert operand.meta["val"].shape[1] == heads
        assert operand.meta[DIFF]
    assert node.args[1].meta["custom"][PASS] == "expand_grouped_heads"
    assert "test_expand_grouped_heads.py" in node.args[1].meta["stack_trace"]


def test_expands_with_other_arguments() -> None:
    report, _ = attention(8, 2, 4, is_causal=True, scale=0.3)
    assert report.hits == 1


@pytest.mark.parametrize(
    "heads,kv,n,reason",
    [
        (8, 4, 2, "kv heads 4 % tp 2 == 0: no need"),
        (6, 2, 4, "heads 6 % tp 4 != 0"),
    ],
)
def test_declines_with_numbers(heads: int, kv: int, n: int, reason: str) -> None:
    report, _ = attention(heads, kv, n)
    assert report.hits == 0
    assert [skip.reason for skip in report.skips] == [reason]
    assert reason in str(report)
