"""Bytes of tensors that are alive, as they are made and freed: what `Program.memory()` predicts.

A dispatch mode sees the result of every operator and a weak reference to its storage tells when it
is freed. It sees eager operators, AOTAutograd's graphs and, as Inductor's code allocates past every
mode, the function by which that does. Not seen: scratch space inside an operator.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import backend
from autoshard.runtime import compat
from autoshard.runtime.host_memory import OFFLOAD

_c10d = torch.ops._c10d_functional
_LET_GO = 0.01  # seconds


class LiveStorages(TorchDispatchMode):
    """While it is entered, the bytes alive and the most there were: `live` and `peak`.

    Make one before the model is first called. The compiled graphs count by themselves where
    `counting` is True: Dynamo does not run them under a mode. Backward and optimizer run under
    `with`.
    """

    # attention that is computed again saves the state of random numbers by one of these
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.on_host = 0
        """Bytes of storages that were sent to the host; they are none of the device's."""
        self.live = self.peak = 0
        self.counting = False
        self._pending: dict[int, Any] = {}
        self._away: set[int] = set()
        allocators = torch._C._dynamo.guards  # where Inductor's code allocates, past every mode
        allocate, compile_local = allocators._empty_strided_cpu, backend.compile_local

        def counted(*args: Any) -> torch.Tensor:
            made: torch.Tensor = allocate(*args)
            if self.counting:
                self.add(made)
            return made

        def compiled(*args: Any, **kwargs: Any) -> Any:
            graph = compile_local(*args, **kwargs)

            def run(*values: Any) -> Any:
                if not self.counting:
                    return graph(*values)
                with self:
                    return graph(*values)

            return run

        allocators._empty_strided_cpu = counted
        backend.compile_local = compiled

        def restore() -> None:
            allocators._empty_strided_cpu, backend.compile_local = allocate, compile_local

        self.restore = restore

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        local = compat.local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            return
        storage = local.untyped_storage()
        key = id(storage)
        if key not in self.sizes and key not in self._away:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key)

    def since(self) -> int:
        """The most bytes alive since the last call."""
        peak, self.peak = self.peak, self.live
        return peak

    def _freed(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is OFFLOAD:
            storage = result.untyped_storage()
            self._away.add(id(storage))
            self.on_host += storage.nbytes()
            weakref.finalize(storage, self._away.discard, id(storage))
            return result
        for tensor in pytree.tree_leaves(result):
            if type(tensor) in (torch.Tensor, DTensor):  # not fakes, by which DTensor plans
                self.add(tensor)
        if func is _c10d.reduce_scatter_tensor.default:
            # gloo reduces a copy of the input that no mode sees, until the wait
            self._pending[id(result.untyped_storage())] = args[0]
        elif func is _c10d.wait_tensor.default:
            self._pending.pop(id(args[0].untyped_storage()), None)
            # gloo's thread lets go of its tensors a moment later, and then needs the interpreter's
            # lock, as they are watched here
            time.sleep(_LET_GO)
        return result


def measure_step(
    live: LiveStorages,
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> dict[str, int]:
    """Bytes in the second step of a compiled model: what is stored by kind, the most alive in
    each phase, and the peak. Call it with `live` made before the model was compiled."""
    loss().backward()
    found = {"gradients": _bytes(p.grad for p in model.parameters())}
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    state = [value for one in optimizer.state.values() for value in one.values()]
    found["parameters"] = _bytes(model.parameters())
    found["optimizer"] = _bytes(state)
    before = live.live
    stored = [*model.parameters(), *model.buffers(), *state]
    for tensor in stored:
        if isinstance(tensor, torch.Tensor):
            live.add(tensor)
    live.since()
    live.counting = True
    value = loss()
    found["forward"] = live.since() - before
    with live:
        value.backward()
        found["backward"] = live.since() - before
        optimizer.step()
        found["update"] = live.since() - before
    live.counting = False
    optimizer.zero_grad()
    found["peak"] = max(found[phase] for phase in ("forward", "backward", "update"))
    return found


def _bytes(tensors: Iterable[Any]) -> int:
    held = [t for t in tensors if isinstance(t, torch.Tensor)]
    return sum((compat.local_of(t) if isinstance(t, DTensor) else t).nbytes for t in held)
