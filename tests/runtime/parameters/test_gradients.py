"""How gradients become `.grad`: memory of their own, and nothing that autograd promises is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.runtime import compat
from autoshard.runtime.parameters import gradients, unsharding
from autoshard.runtime.parameters.gradients import unalias
from autoshard.runtime.parameters.unsharding import unshard_parameter, unwrap

VALUES = torch.tensor([1.0, 2.0])


@pytest.fixture
def stored() -> Iterator[list[Any]]:
    """Two parameters of which this rank, the first of two, holds the first half."""
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    yield [nn.Parameter(DTensor.from_local(VALUES.clone(), mesh, [Shard(0)])) for _ in range(2)]
    dist.destroy_process_group()


def loss(parameters: list[Any]) -> torch.Tensor:
    """Its gradient is 3 p**2 for the first, 6 for the second."""
    a, b = unwrap(*parameters)
    return a.pow(3).sum() + 6 * b.sum()


def local(gradient: Any) -> list[float]:
    assert isinstance(gradient, DTensor) and gradient.placements == (Shard(0),)
    return compat.local_of(gradient).tolist()  # type: ignore[no-any-return]


def test_a_gradient_is_stored_without_a_copy(stored: list[Any]) -> None:
    class Watch(TorchDispatchMode):
        seen: list[Any] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(isinstance(a, DTensor) for a in args):
                self.seen.append(func)
            return func(*args, **(kwargs or {}))

    value = loss(stored)
    with Watch() as watch:
        value.backward()
    assert not watch.seen
    assert local(stored[0].grad) == [3.0, 12.0] and local(stored[1].grad) == [6.0, 6.0]
    assert not stored[0].grad.requires_grad and stored[0].grad.grad_fn is None
    loss(stored).backward()
    assert local(stored[0].grad) == [6.0, 24.0] and local(stored[1].grad) == [12.0, 12.0]


@pytest.mark.parametrize("directly", [True, False])
def test_who_stores_a_gradient(
    stored: list[Any], monkeypatch: pytest.MonkeyPatch, directly: bool
) -> None:
    """`STORE_DIRECTLY` decides what autograd is left with, not what `.grad` is."""
    left: list[Any] = []

    def accumulate(*args: Any) -> Any:
        left.extend(found := gradients.accumulate(*args))
        return found

    monkeypatch.setattr(gradients, "STORE_DIRECTLY", directly)
    monkeypatch.setattr(unsharding, "accumulate", accumulate)
    loss(stored).backward()
    assert [grad is None for grad in left] == [directly, directly]
    assert local(stored[0].grad) == [3.0, 12.0] and local(stored[1].grad) == [6.0, 6.0]


def test_a_graph_that_is_kept_gives_its_gradient_again(stored: list[Any]) -> None:
    value = loss(stored)
    value.backward(retain_graph=True)
    value.backward()
    assert local(stored[0].grad) == [6.0, 24.0]


def test_two_graphs_of_one_backward(stored: list[Any]) -> None:
    (loss(stored) + loss(stored)).backward()
    assert local(stored[0].grad) == [6.0, 24.0] and local(stored[1].grad) == [12.0, 12.0]


def test_hooks_see_the_gradient(stored: list[Any]) -> None:
    seen: list[Any] = []
    stored[0].register_hook(lambda grad: seen.append(("tensor", local(grad))) or grad * 2)
    stored[0].register_post_accumulate_grad_hook(
        lambda p: seen.append(("accumulated", local(p.grad)))
    )
    node = stored[1].view_as(stored[1]).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(("node", local(stored[1].grad))))
    loss(stored).backward()
    assert sorted(seen) == [
        ("accumulated", [6.0, 24.0]),
        ("node", [6.0, 6.0]),
        ("tensor", [3.0, 12.0]),
    ]


def test_gradients_that_are_asked_for(stored: list[Any]) -> None:
    found = torch.autograd.grad(loss(stored), stored)
    assert [local(grad) for grad in found] == [[3.0, 12.0], [6.0, 6.0]]
    assert all(p.grad is None for p in stored)
    loss(stored).backward(inputs=[stored[1]])
    assert stored[0].grad is None and local(stored[1].grad) == [6.0, 6.0]


def test_a_frozen_parameter_and_one_that_is_no_leaf(stored: list[Any]) -> None:
    stored[1].requires_grad_(False)
    loss([stored[0] * 2, stored[1]]).backward()
    assert local(stored[0].grad) == [24.0, 96.0] and stored[1].grad is None


def test_parameters_that_are_added_in_eager_code() -> None:
    """Autograd hands both the same gradient."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        a, b = (
            nn.Parameter(DTensor.from_local(VALUES.clone(), mesh, [Replicate()])) for _ in range(2)
        )
        (unshard_parameter(a) + unshard_parameter(b)).square().sum().backward()
        compat.local_of(a.grad).mul_(3.0)  # type: ignore[arg-type]
        assert compat.local_of(a.grad).tolist() == [12.0, 24.0]  # type: ignore[arg-type]
        assert compat.local_of(b.grad).tolist() == [4.0, 8.0]  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_apart() -> None:
    bucket = torch.arange(64.0)
    pieces = [bucket[:32].view(4, 8), bucket[32:]]
    small, turned = torch.ones(100)[:10], torch.ones(4, 2).t()
    one = torch.ones(6)
    given = [*pieces, None, small, turned, one, one, one[2:5], torch.empty(0)]
    found = unalias(given)
    assert found[2] is None
    for got, want in zip(found, given):
        if got is not None:
            assert torch.equal(got, want) and got.is_contiguous()  # type: ignore[arg-type]
    assert found[0] is pieces[0] and found[1] is pieces[1] and found[5] is one
    assert found[3].untyped_storage().nbytes() == 40  # type: ignore[union-attr]
    held = [t for t in found if t is not None and len(t)]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:]))
