"""Collectives of activations as one operator with what is beside them: matrix products, or what
stands between two of those in an inference layer.

    autoshard::all_gather_matmul(shard, weights, dim, whole, measure, ...) -> Tensor[]
        shard [.., s, .., k], weights of [k, m] each -> the products of the gathered value
        [.., n * s, .., k] with each; before them, where `whole`, that value itself
    autoshard::matmul_reduce_scatter(x, weight, dim, measure, ...) -> Tensor
        x [.., n * s, .., k], weight [k, m] -> this rank's part [.., s, .., m] of the ranks' sum

`dim` is the one that ranks split, not the last; results are contiguous. On GPUs that reach each
other's memory a product is computed piece by piece, as the pieces arrive or while those before
leave. Elsewhere the product follows the gather, or the reduce-scatter the product: the same
numbers, and the same bytes between ranks.

measure: at the first call with some shapes each of both ways is timed, on all ranks together, and
the quicker one stays. The operators stand in the graphs that autograd has made, so they have no
derivative of their own: where one is the forward of a layer, the other is part of its backward.

`reduce_add_norm`: partial sums are reduced, added to the residual and normalised, and gathered
where they are split. Megatron-Core has it as the layers of `inference_layers`; vLLM fuses the same
at each all-reduce. The reduction is the backend's; the arithmetic around it is left to Inductor,
which makes one kernel of it.
"""

from collections.abc import Callable
from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import all_reduce, convert
from autoshard.runtime.collectives.states import I, P, S, State
from autoshard.runtime.errors import ConfigError

_Key = tuple[Any, ...]


@compat.once_a_world
def _measured() -> dict[_Key, bool]:
    """Whether the fused way is the quicker one; ranks measure together."""
    return {}


def _gather_matmul(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    dim: int,
    whole: bool,
    measure: bool,
    n: int,
    rank: int,
    group: str,
) -> list[torch.Tensor]:
    axis = Axis("", n, rank, group)

    def fused() -> list[torch.Tensor]:
        return [one.contiguous() for one in compat.gather_matmul(shard, weights, dim, whole, group)]

    def plain() -> list[torch.Tensor]:
        gathered = convert(shard, S(dim), I, axis)
        return [*([gathered] if whole else []), *(gathered @ weight for weight in weights)]

    sizes = (tuple(shard.shape), *(tuple(weight.shape) for weight in weights), shard.dtype, dim)
    key = (group, shard.device, sizes, whole)
    return _chosen(fused, plain, measure, axis, key) if shard.is_cuda else plain()


def _matmul_scatter(
    x: torch.Tensor, weight: torch.Tensor, dim: int, measure: bool, n: int, rank: int, group: str
) -> torch.Tensor:
    axis = Axis("", n, rank, group)

    def fused() -> torch.Tensor:
        return compat.matmul_scatter(x, weight, dim, group).contiguous()

    def plain() -> torch.Tensor:
        return convert(x @ weight, P, S(dim), axis)

    key = (group, x.device, tuple(x.shape), tuple(weight.shape), x.dtype, dim)
    return _chosen(fused, plain, measure, axis, key) if x.is_cuda else plain()


def _chosen(
    fused: Callable[[], Any], plain: Callable[[], Any], measure: bool, axis: Axis, key: _Key
) -> Any:
    """The result of one of two ways on GPUs. key: what a measurement holds for."""
    if not compat.has_symmetric_memory(axis.group):
        if measure:
            return plain()
        raise ConfigError(
            "options['planner']['fuse_collectives'] is True, and the "
            f"{axis.size} GPUs of an axis do not reach each other's memory",
            remedy="Put the axis on GPUs of one machine with NVLink, or leave the option out.",
        )
    return fused() if not measure or _is_quicker(fused, plain, axis, key) else plain()


def _is_quicker(fused: Callable[[], Any], plain: Callable[[], Any], axis: Axis, key: _Key) -> bool:
    """Whether `fused` took less time than `plain`, on the slowest rank of each; measured once for
    a key. Collective at its first call with it."""
    measured = _measured()
    if key not in measured:
        # in a CUDA graph, of a program that has not run before, nothing can be timed
        if torch.cuda.is_current_stream_capturing():
            return False
        took = torch.tensor([compat.gpu_milliseconds(run) for run in (fused, plain)])
        first, second = all_reduce(took.to(key[1]), "max", axis).tolist()
        measured[key] = first < second
    return measured[key]


def _fake_gather_matmul(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    dim: int,
    whole: bool,
    measure: bool,
    n: int,
    rank: int,
    group: str,
) -> list[torch.Tensor]:
    rows = [*shard.shape[:-1]]
    rows[dim] = rows[dim] * n
    columns = [*([shard.shape[-1]] if whole else []), *(weight.shape[1] for weight in weights)]
    return [shard.new_empty((*rows, each)) for each in columns]


def _fake_matmul_scatter(
    x: torch.Tensor, weight: torch.Tensor, dim: int, measure: bool, n: int, rank: int, group: str
) -> torch.Tensor:
    rows = [*x.shape[:-1]]
    rows[dim] = rows[dim] // n
    return x.new_empty((*rows, weight.shape[1]))


GATHER_MATMUL = compat.define_operator(
    "all_gather_matmul(Tensor shard, Tensor[] weights, int dim, bool whole, bool measure, int n, "
    "int rank, str group) -> Tensor[]",
    _gather_matmul,
    _fake_gather_matmul,
)
MATMUL_SCATTER = compat.define_operator(
    "matmul_reduce_scatter(Tensor x, Tensor weight, int dim, bool measure, int n, int rank, "
    "str group) -> Tensor",
    _matmul_scatter,
    _fake_matmul_scatter,
)
FUSED_PRODUCTS = (GATHER_MATMUL, MATMUL_SCATTER)
"""The operators in a graph. The last argument names the process group, as of torch's own."""


aten = torch.ops.aten


def reduce_add_norm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: State,
    axis: Axis,
    *,
    norm: str,
    eps: float | None,
    wide: torch.dtype | None = None,
    weigh_wide: bool = False,
    gather: bool = False,
    extent: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual, in `state`, and its norm over the last dim, whole where `gather`.

    partial: this rank's addend. residual: in `state`, which is I or S(d). norm: "layer", or "rms";
    "written rms" is the one that models spell out, computed in `wide` and weighed before
    (`weigh_wide`) or after it is cast back. extent: of the dim that `state` splits, where the axis
    does not divide it. For graphs without gradients.
    """
    total = residual + convert(partial, P, state, axis)
    if norm == "rms":
        normed = aten.rms_norm(total, total.shape[-1:], weight, eps)
    elif norm == "layer":
        normed = aten.layer_norm(total, total.shape[-1:], weight, bias, eps)
    else:
        assert eps is not None
        normed = _written_rms(total, weight, eps, wide, weigh_wide)
    if gather:
        normed = convert(normed, state, I, axis, extent)
    return total, normed


def _written_rms(
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    wide: torch.dtype | None,
    weigh_wide: bool,
) -> torch.Tensor:
    x = total if wide is None else total.to(wide)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weigh_wide:
        return (weight * x).to(total.dtype)
    return weight * x.to(total.dtype)
