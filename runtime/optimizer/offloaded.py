"""`offload_optimizer`: an optimizer whose states lie in the host's memory, and which steps there.

As in ZeRO-Offload (arXiv 2101.06840), forward and backward run on the device, and the host updates
the parameters: it reads gradients and parameters, and sends the parameters back. All of that
happens in `step`, one parameter behind the other (host_memory.py): so the gradient is final,
clipped and unscaled, and what was written to a parameter since the last step is seen. Each steps as
torch has it, on a copy of this rank's part.

An optimizer's state has the parameter's placement wherever it lies, so state dicts are those of an
optimizer on the device.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.host_memory import Staged, Staging
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.optimizer.derived import AnyOptimizer, Derived, become, unhooked_step
from autoshard.runtime.parameters import like, local_part, owned, stored_states

MASTER = "master"
"""The entry of a parameter's state that holds its copy in a wider dtype."""

_FUSED = (Adam, AdamW, SGD, Adagrad)


def part_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a value of the parameter's shape: stored alike, or whole; of a value of
    another shape itself."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        if isinstance(value, DTensor) and not _placed_alike(value, parameter):
            value = value.full_tensor()
        if not isinstance(value, DTensor):
            axes = axes_of(parameter.device_mesh)
            return owned(local_part(value.detach(), stored_states(parameter), axes))
    return compat.local_of(value) if isinstance(value, DTensor) else value


def _placed_alike(a: DTensor, b: DTensor) -> bool:
    one, other = compat.spec_of(a), compat.spec_of(b)
    return one is other or (one.placements == other.placements and one.mesh == other.mesh)


def on_host(
    parameter: torch.Tensor, state: dict[str, Any], dtype: torch.dtype | None
) -> dict[str, Any]:
    """A parameter's state with its tensors on the host, placed like the parameter.

    dtype: what the tensors of the parameter's shape are kept in; None: as they are.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name == "step" or not isinstance(value, torch.Tensor):
            found[name] = value.cpu() if isinstance(value, torch.Tensor) else value
            continue
        part, whole = part_of(parameter, value), value.shape == parameter.shape
        kept = dtype if whole and value.is_floating_point() else None
        part = part.to("cpu", kept or part.dtype)
        found[name] = like(parameter, part) if isinstance(parameter, DTensor) and whole else part
    return found


def step_on_host(
    optimizer: Optimizer,
    cls: type[Optimizer],
    group: dict[str, Any],
    parameter: torch.Tensor,
    host: Staged,
    master: torch.dtype | None,
) -> None:
    """Step one parameter of a group as `cls` does; the new values are in `host` then.

    host: the parameter's part and its gradient's. master: the dtype of the copy that is stepped in
    the parameter's place. Elements of the parameter that are not the rounded copy's were written
    since the last step, and are taken.
    """
    held = optimizer.state[parameter]
    state = {n: compat.local_of(v) if isinstance(v, DTensor) else v for n, v in held.items()}
    kept = state.pop(MASTER, None)
    if master is None:
        stepped, gradient = host.parameter, host.gradient
    else:
        stepped = _merged(kept, host.parameter, master)
        gradient = host.gradient.to(master)
    stepped.grad = gradient
    proxy = cls.__new__(cls)
    proxy.__dict__.update(optimizer.__dict__)
    proxy.param_groups = [{**group, **_settings(cls, group, parameter), "params": [stepped]}]
    proxy.state = defaultdict(dict, {stepped: state})
    unhooked_step(cls)(proxy)
    stepped.grad = None
    if master is not None:
        host.parameter.copy_(stepped)
        state[MASTER] = stepped
    shape = host.parameter.shape
    for name, value in state.items():
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor):
            whole = value.shape == shape and name != "step"
            state[name] = like(parameter, value) if whole else value
    optimizer.state[parameter] = state


def _merged(kept: torch.Tensor | None, written: torch.Tensor, master: torch.dtype) -> torch.Tensor:
    """The copy of a parameter, with the elements of it that were written since it was rounded."""
    if kept is None:
        return written.to(master)
    rounded = kept.to(written.dtype)
    if torch.equal(rounded, written):
        return kept
    return torch.where(rounded == written, kept, written.to(master))


def _settings(
    cls: type[Optimizer], group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What a group's settings are on the host. Beside a GPU the fused step runs, unless another
    was asked for: it passes over memory once."""
    found: dict[str, Any] = {"lr": group["lr"]} if "lr" in group else {}
    if isinstance(found.get("lr"), torch.Tensor):
        found["lr"] = found["lr"].cpu()
    if "capturable" in group:
        found["capturable"] = False
    if cls in _FUSED and not parameter.is_cpu and parameter.is_floating_point():
        found["fused"] = True if group["fused"] is group["foreach"] is None else group["fused"]
    return found


_ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)


def offload_optimizer(
    optimizer: AnyOptimizer,
    *,
    master_dtype: torch.dtype | None = None,
    elementwise: bool = False,
) -> AnyOptimizer:
    """Keep the states of an optimizer in the host's memory, and step there; the same object.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        optimizer = autoshard.offload_optimizer(optimizer)

    optimizer: one of torch.optim that treats each element by itself, before or after the model's
        first call, and before its learning-rate schedulers. Everything else of it stays as it was.
        Of `optimizer` the host takes the step over: it steps this rank's parts too.
    master_dtype: parameters of a narrower floating dtype are stepped in this one, of copies on the
        host; the device gets them rounded. None: in their own dtype.
    elementwise: the caller says that an optimizer of another class treats each element by itself.

    Raises AutoshardError for an optimizer that cannot be stepped so, and in `step` for a sparse
    gradient.
    """
    cls: Any = optimizer.base if isinstance(optimizer, Derived) else type(optimizer)
    if isinstance(optimizer, _OnHost):
        raise AutoshardError(
            f"the states of this {cls.__name__} are on the host already", remedy=""
        )
    if cls not in _ELEMENTWISE and not elementwise:
        names = ", ".join(sorted(one.__name__ for one in _ELEMENTWISE))
        raise AutoshardError(
            f"offload_optimizer: {cls.__name__} is not known to treat each element of a "
            "parameter by itself, and a rank's host steps its own part",
            remedy=f"Use one of {names}; or say elementwise=True, if it does.",
        )
    if optimizer.defaults.get("differentiable"):
        raise AutoshardError(
            f"offload_optimizer: {cls.__name__}(differentiable=True) is to be differentiated, "
            "and the host's step is not",
            remedy="Leave out differentiable.",
        )
    become(optimizer, _OnHost, "offload_optimizer")
    given: Any = optimizer
    given.__dict__.pop("_autoshard_parts", None)
    given.master_dtype = master_dtype
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = on_host(parameter, state, given._dtype_of(parameter))
    return optimizer


class _OnHost(Derived):
    """What replaces methods of an optimizer whose states are on the host."""

    master_dtype: torch.dtype | None

    def _master_of(self, parameter: torch.Tensor) -> torch.dtype | None:
        wide, own = self.master_dtype, parameter.dtype
        narrower = wide is not None and own.is_floating_point and own.itemsize < wide.itemsize
        return wide if narrower else None

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype | None:
        """The dtype of a parameter's state; None: whatever it is."""
        own = parameter.dtype if parameter.is_floating_point() else None
        return self._master_of(parameter) or own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would bring the states to the device on their way."""
        loaded: dict[str, Any] = {}

        def leave_out(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(given)
            return {**given, "state": {}}

        def fill_in(_: Optimizer) -> None:
            saved = [key for group in loaded["param_groups"] for key in group["params"]]
            own = dict(zip(saved, (p for group in self.param_groups for p in group["params"])))
            for key, state in loaded["state"].items():
                if (parameter := own.get(key)) is None:
                    self.state[key] = state
                else:
                    dtype = self._dtype_of(parameter)
                    self.state[parameter] = on_host(parameter, state, dtype)

        handles = [
            self.register_load_state_dict_pre_hook(leave_out),
            self.register_load_state_dict_post_hook(fill_in, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master_dtype": self.master_dtype}

    def take_step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient on the host; what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            _step_all(self)
        return loss


def _step_all(optimizer: Any) -> None:
    for name in ("grad_scale", "found_inf"):  # a GradScaler's, for a fused step
        if isinstance(value := getattr(optimizer, name, None), torch.Tensor):
            setattr(optimizer, name, value.cpu())
    devices: dict[torch.device, list[tuple[dict[str, Any], torch.Tensor]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _check_dense(optimizer, parameter)
                devices.setdefault(parameter.device, []).append((group, parameter))
    for device, work in devices.items():
        staging = optimizer.__dict__.setdefault("_staging", {})
        if device not in staging:
            staging[device] = Staging(device)

        def step(number: int, host: Staged, work: list[Any] = work) -> None:
            group, parameter = work[number]
            dtype = optimizer._dtype_of(parameter)
            held = optimizer.state[parameter]
            if any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in held.values()):
                optimizer.state[parameter] = on_host(parameter, held, dtype)
            master = optimizer._master_of(parameter)
            step_on_host(optimizer, optimizer.base, group, parameter, host, master)

        staging[device].run([_staged(parameter) for _, parameter in work], step)
        for _, parameter in work:
            increment_version(parameter)


def _staged(parameter: torch.Tensor) -> Staged:
    assert parameter.grad is not None
    local = compat.local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
    return Staged(local, part_of(parameter, parameter.grad))


def _check_dense(optimizer: Any, parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise AutoshardError(
            f"{optimizer.base.__name__}.step() on the host: the gradient of a parameter of "
            f"shape {tuple(parameter.shape)} is {parameter.grad.layout}",
            remedy="Make it dense: nn.Embedding(sparse=False).",
        )
