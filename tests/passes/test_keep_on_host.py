"""keep_on_host: what leaves the device, when, and that both graphs compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autoshard.planning import Recomputation
from autoshard.runtime.compat import ForwardBackward, memory_of
from autoshard.runtime.graph_meta import VALUE
from autoshard.runtime.host_memory import OFFLOAD, RELOAD, WAIT_TRANSFER
from traced import builder


class Chain(nn.Module):
    """Layers whose activations are wide, and one whose kept value is a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            x = x.t().exp().t() if i == 2 else x
        return x.sum()


def choice(names: frozenset[str]) -> Recomputation:
    sizes: dict[str, Any] = {"kept": 0, "spared": 0, "peak": 0, "seconds": 0.0, "bound": 0.0}
    return Recomputation(again=frozenset(), saved=frozenset(), sent=names, **sizes)


def graphs() -> tuple[ForwardBackward, ForwardBackward]:
    """The graphs of a chain: with nothing on the host, and with all that is named."""
    program = builder(Chain(), (torch.randn(8, 8),))({"tp": 1})
    split = program.choices()
    nodes = program.graph_module.graph.nodes
    names = {n.meta.get("custom", {}).get(VALUE) for n in nodes} - {None}
    return split(choice(frozenset())), split(choice(frozenset(names)))


def run(made: ForwardBackward) -> list[torch.Tensor]:
    assert made.backward is not None
    torch.manual_seed(0)
    inputs = [n.meta["val"] for n in made.forward.graph.find_nodes(op="placeholder")]
    real = [torch.randn(one.shape) for one in inputs]
    outputs = list(made.forward(*real))
    given = made.backward.graph.find_nodes(op="placeholder")
    saved = outputs[len(outputs) - len(given) + 1 :]
    return [outputs[0], *made.backward(*saved, torch.ones(()))]


def places(gm: fx.GraphModule, target: Any) -> list[int]:
    return [i for i, node in enumerate(gm.graph.nodes) if node.target is target]


def test_both_graphs_compute_what_they_did() -> None:
    plain, sent = graphs()
    assert sent.backward is not None
    count = len(places(sent.forward, OFFLOAD))
    assert count >= 4 and not places(plain.forward, OFFLOAD)
    assert count == len(places(sent.backward, RELOAD)) == len(places(sent.backward, WAIT_TRANSFER))
    for node in sent.forward.graph.nodes:
        if node.target is OFFLOAD:
            assert memory_of(node.args[0]).op != "placeholder", "a weight is there anyway"
    for got, want in zip(run(sent), run(plain), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want)


def test_two_values_are_on_their_way_at_once() -> None:
    """A copy to the host is waited for before the next but one begins, and a value is fetched
    before the use of the one before it."""
    _, sent = graphs()
    assert sent.backward is not None
    starts, waits = places(sent.forward, OFFLOAD), places(sent.forward, WAIT_TRANSFER)
    for wait, later in zip(waits, starts[2:]):
        assert wait < later
    assert all(wait > start for start, wait in zip(starts[1:], waits)), "nothing runs beside them"
    fetched, there = places(sent.backward, RELOAD), places(sent.backward, WAIT_TRANSFER)
    for begin, before in zip(fetched[1:], there):
        assert begin < before + 2
    for begin, earlier in zip(fetched[2:], there):
        assert begin > earlier, "more than two are fetched at once"


def test_what_a_result_shares_stays() -> None:
    class Shared(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = (x * 2).exp()
            return y, (y * y).sum()

    program = builder(Shared(), (torch.randn(8, 8, requires_grad=True),))({"tp": 1})
    nodes = program.graph_module.graph.nodes
    names = {n.meta.get("custom", {}).get(VALUE) for n in nodes} - {None}
    made = program.choices()(choice(frozenset(names)))
    results = next(iter(reversed(made.forward.graph.nodes))).args[0]
    assert all(node.target is not WAIT_TRANSFER for node in results[:2])  # type: ignore[index,union-attr]
