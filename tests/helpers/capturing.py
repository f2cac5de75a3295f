"""Runs captured graphs in place of Dynamo's and compares them with the eager model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.capture.serial_graph import capture
from side_by_side import difference

Rewrite = Callable[[fx.GraphModule], None]


class Checked(fx.Interpreter):
    """Runs a captured graph; every value must be what `meta` promised."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "output", "get_attr"):
            return result
        real = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        fake = [t for t in pytree.tree_leaves(n.meta["val"]) if isinstance(t, torch.Tensor)]
        assert len(real) == len(fake), n.format_node()
        for r, f in zip(real, fake):
            if n.target is torch.ops.aten.mkldnn_rnn_layer.default:
                continue  # torch's own fake of its workspace is empty
            sizes = [(a, b) for a, b in zip(r.shape, f.shape, strict=True) if isinstance(b, int)]
            assert all(a == b for a, b in sizes), f"{n.format_node()}: {r.shape} for {f.shape}"
            assert (r.dtype, r.device) == (f.dtype, f.device), n.format_node()
        if real and torch.is_grad_enabled():
            assert any(r.requires_grad for r in real) == n.meta["diff"], n.format_node()
        return result


class Recorder:
    """A Dynamo backend that captures each graph and runs the captured one.

    rewrite: applied to each captured graph before it runs.
    """

    def __init__(self, rewrite: Rewrite | None = None) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.rewrite = rewrite

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = capture(gm, example_inputs)
        if self.rewrite is not None:
            self.rewrite(captured)
        captured.graph.lint()
        captured.recompile()
        self.graphs.append(captured)
        mutated, n_outputs = captured.meta["mutated"], captured.meta["n_outputs"]

        def run(*args: Any) -> list[Any]:
            # the casts are explicit, and autograd may save an input that is written back below
            given = [a.clone() if i in mutated else a for i, a in enumerate(args)]
            grad = torch.is_grad_enabled() or captured.meta["enable_grad"]
            with torch.autocast("cpu", enabled=False), torch.set_grad_enabled(grad):
                results = Checked(captured).run(*given)
            for index, value in zip(mutated, results[n_outputs:], strict=True):
                target = args[index] if value.requires_grad else args[index].detach()
                target.copy_(value)
            return list(results[:n_outputs])

        return run

    @property
    def graph(self) -> fx.GraphModule:
        """The only graph."""
        assert len(self.graphs) == 1, f"{len(self.graphs)} graphs"
        return self.graphs[0]

    def targets(self) -> list[str]:
        """The operators of all graphs, in order."""
        return [
            str(node.target)
            for graph in self.graphs
            for node in graph.graph.nodes
            if node.op == "call_function"
        ]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradient of each parameter, by name."""
    return {name: p.grad for name, p in model.named_parameters()}


def check(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    steps: int = 1,
    backward: bool = True,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    rewrite: Rewrite | None = None,
    tolerance: float = 1e-6,
    around: Callable[[], Any] | None = None,
) -> Recorder:
    """Train the eager model and its captured copy side by side; all that they make must agree.

    Compared: outputs, gradients of parameters and of float inputs, buffers. The random state is
    the same before each run. around: a context manager to call the models in.
    """
    torch._dynamo.reset()
    kwargs = kwargs or {}
    recorder = Recorder(rewrite)
    eager, captured = copy.deepcopy(model), copy.deepcopy(model)
    compiled = torch.compile(captured, backend=recorder, dynamic=dynamic, fullgraph=fullgraph)
    for step in range(steps):
        results = []
        for run in (eager, compiled):
            given_args, given_kwargs = pytree.tree_map_only(
                torch.Tensor,
                lambda t: t.detach().clone().requires_grad_(t.requires_grad),
                (tuple(args), kwargs),
            )
            torch.manual_seed(step)
            with around() if around is not None else torch.enable_grad():
                result = run(*given_args, **given_kwargs)
            leaves = [t for t in pytree.tree_leaves(_plain(result)) if isinstance(t, torch.Tensor)]
            state = torch.get_rng_state()
            floats = [t for t in leaves if t.requires_grad]
            if backward:
                assert floats, "nothing to differentiate"
                weights = [torch.linspace(0.5, 1, t.numel()).view(t.shape) for t in floats]
                sum((t.float() * w).sum() for t, w in zip(floats, weights)).backward()
            inputs = [
                t.grad
                for t in pytree.tree_leaves((given_args, given_kwargs))
                if isinstance(t, torch.Tensor)
            ]
            results.append((leaves, inputs, state))
        (want, want_inputs, want_state), (have, have_inputs, have_state) = results
        close(want, have, tolerance, "output")
        close(want_inputs, have_inputs, tolerance, "input gradient")
        assert torch.equal(want_state, have_state), "random state"
        close(
            list(gradients(eager).values()), list(gradients(captured).values()), tolerance, "grad"
        )
        close(list(eager.buffers()), list(captured.buffers()), tolerance, "buffer")
    return recorder


def close(
    want: Sequence[torch.Tensor | None],
    have: Sequence[torch.Tensor | None],
    tolerance: float,
    what: str,
) -> None:
    """Both lists hold the same tensors, up to `tolerance` of the largest entry."""
    assert len(want) == len(have), f"{what}: {len(have)} instead of {len(want)}"
    for i, (w, h) in enumerate(zip(want, have)):
        assert (w is None) == (h is None), f"{what} {i}: {h} instead of {w}"
        if w is None or h is None:
            continue
        assert (w.shape, w.dtype) == (h.shape, h.dtype), f"{what} {i}: {h.dtype} {h.shape}"
        assert w.requires_grad == h.requires_grad, f"{what} {i}: requires_grad {h.requires_grad}"
        error = difference(h, w, floor=1.0)
        assert error <= tolerance, f"{what} {i}: differs by {error} of the largest entry"


def _plain(result: Any) -> Any:
    """The tensors of a model output that pytree does not know."""
    if isinstance(result, torch.Tensor) or result is None:
        return result
    if hasattr(result, "items"):
        return [_plain(v) for _, v in result.items()]
    if isinstance(result, (tuple, list)):
        return [_plain(v) for v in result]
    return None


class Fn(nn.Module):
    """A module of a function, with a linear layer and two buffers to use in it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.lin = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def x48() -> torch.Tensor:
    return torch.randn(4, 8)


def region_tags(recorder: Recorder) -> list[tuple[str, Any, Any]]:
    return [
        (str(n.target), n.meta.get("recompute"), n.meta.get("ac_graph_id"))
        for n in recorder.graph.graph.nodes
        if n.op == "call_function"
    ]
