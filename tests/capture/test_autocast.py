"""Captured casts give the dtypes of eager autocast, operator by operator, and its values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.capture.autocast import POLICIES
from autoshard.capture.serial_graph import capture
from capturing import check

T = torch.Tensor
M, V, I4 = (4, 4), (4,), (2, 4, 8, 8)  # a matrix, a vector, an image
LOWER = {"cpu": torch.bfloat16, "cuda": torch.float16}


def labels(x: T) -> T:
    return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)


def ids(x: T) -> T:
    return torch.zeros(4, dtype=torch.long, device=x.device)


# name -> (function, shapes); each is tried with every mixture of float32 and the lower precision
SAMPLES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [M, M, V]),
    "matmul": (torch.matmul, [(2, 4, 4), M]),
    "mm": (torch.mm, [M, M]),
    "mv": (torch.mv, [M, V]),
    "bmm": (torch.bmm, [(2, 4, 4), (2, 4, 4)]),
    "addmm": (torch.addmm, [V, M, M]),
    "baddbmm": (torch.baddbmm, [(2, 4, 4), (2, 4, 4), (2, 4, 4)]),
    "einsum": (lambda x, y: torch.einsum("bk,nk->bn", x, y), [M, M]),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), [M, M]),
    "inner": (torch.inner, [M, M]),
    "conv1d": (F.conv1d, [(2, 4, 8), (4, 4, 3), V]),
    "conv2d": (F.conv2d, [I4, (4, 4, 3, 3)]),
    "conv2d_same": (lambda x, w: F.conv2d(x, w, padding="same"), [I4, (4, 4, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [I4, (4, 4, 3, 3)]),
    "prelu": (F.prelu, [M, V]),
    "sdpa": (F.scaled_dot_product_attention, [(2, 2, 4, 8)] * 3),
    "sdpa_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        [(2, 2, 4, 8)] * 3 + [M],
    ),
    "add": (torch.add, [M, M]),
    "mul": (torch.mul, [M, V]),
    "relu": (F.relu, [M]),
    "gelu": (F.gelu, [M]),
    "silu": (F.silu, [M]),
    "tanh": (torch.tanh, [M]),
    "exp": (torch.exp, [M]),
    "log": (torch.log, [M]),
    "rsqrt": (torch.rsqrt, [M]),
    "pow": (lambda x: x**2, [M]),
    "softplus": (F.softplus, [M]),
    "sum": (lambda x: x.sum(), [M]),
    "sum_dim": (lambda x: x.sum(-1), [M]),
    "sum_dtype": (lambda x: x.sum(-1, dtype=torch.float64), [M]),
    "mean": (lambda x: x.mean(-1), [M]),
    "var": (lambda x: x.var(-1), [M]),
    "prod": (lambda x: x.prod(-1), [M]),
    "cumsum": (lambda x: x.cumsum(-1), [M]),
    "logsumexp": (lambda x: x.logsumexp(-1), [M]),
    "norm": (lambda x: torch.linalg.vector_norm(x), [M]),
    "old_norm": (lambda x: x.norm(), [M]),
    "normalize": (F.normalize, [M]),
    "softmax": (lambda x: F.softmax(x, -1), [M]),
    "softmax_dtype": (lambda x: F.softmax(x, -1, dtype=torch.float64), [M]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [M]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), [M, V]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [M, V]),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), [I4, V]),
    "cross_entropy": (lambda x: F.cross_entropy(x, labels(x)), [M]),
    "nll": (lambda x: F.nll_loss(x, labels(x)), [M]),
    "mse": (F.mse_loss, [M, M]),
    "l1": (F.l1_loss, [M, M]),
    "smooth_l1": (F.smooth_l1_loss, [M, M]),
    "kl_div": (F.kl_div, [M, M]),
    "bce_logits": (F.binary_cross_entropy_with_logits, [M, M]),
    "cosine": (F.cosine_similarity, [M, M]),
    "cdist": (torch.cdist, [M, M]),
    "cat": (lambda x, y: torch.cat([x, y]), [M, M]),
    "stack": (lambda x, y: torch.stack([x, y]), [M, M]),
    "addcmul": (torch.addcmul, [M, M, M]),
    "atan2": (torch.atan2, [M, M]),
    "dot": (torch.dot, [V, V]),
    "index_copy": (lambda x, y: x.index_copy(0, ids(x), y), [M, M]),
    "embedding": (lambda w: F.embedding(ids(w), w), [M]),
    "where": (lambda x, y: torch.where(x > 0, x, y), [M, M]),
    "dropout": (lambda x: F.dropout(x, 0.5), [M]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), [I4]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [I4]),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), [I4, V]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 1.0), [M]),
    "reshape": (lambda x: x.reshape(2, 8), [M]),
    "to": (lambda x: x.float(), [M]),
    "inverse": (torch.linalg.inv, [M]),
}


@contextmanager
def ambient(device: str) -> Iterator[None]:
    """Autocast as `torch.autocast` sets it, also for a device that is not there."""
    saved = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, LOWER[device])
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, saved[0])
        torch.set_autocast_dtype(device, saved[1])
        torch.clear_autocast_cache()


def outcome(run: Callable[[], Any]) -> Any:
    """The dtype a call gives, or that it raises."""
    try:
        return run().dtype
    except (RuntimeError, NotImplementedError):
        return "error"


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SAMPLES)
def test_dtype_is_that_of_eager(name: str, device: str) -> None:
    fn, shapes = SAMPLES[name]
    lower = LOWER[device]
    for dtypes in mixtures(shapes, lower):
        same_dtype(fn, [(s, d) for s, d in zip(shapes, dtypes)], device)


def mixtures(shapes: list[tuple[int, ...]], lower: torch.dtype) -> Iterator[list[torch.dtype]]:
    yield [lower] * len(shapes)
    yield [torch.float32] * len(shapes)
    if len(shapes) > 1:
        yield [lower] + [torch.float32] * (len(shapes) - 1)


def same_dtype(fn: Callable[..., Any], tensors: list[tuple[Any, torch.dtype]], device: str) -> None:
    with FakeTensorMode():
        # A fake of a device that is not there runs through the dispatcher all the same.
        inputs = [torch.empty(s, dtype=d, device=device) for s, d in tensors]
        with ambient(device):
            want = outcome(lambda: fn(*inputs))
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    for placeholder, value in zip(placeholders, inputs):
        placeholder.meta["example_value"] = value
    graph.output((graph.call_function(fn, tuple(placeholders)),))
    gm = fx.GraphModule(nn.Module(), graph)
    with ambient(device):
        have = outcome(lambda: capture(gm, inputs).graph.output_node().args[0][0].meta["val"])
        assert torch.is_autocast_enabled(device)
    assert have == want, f"{tensors} on {device}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_table_names_every_operator_torch_registers(device: str) -> None:
    policy = POLICIES[device]
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    named = set().union(*policy[:5])
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::") or full.endswith("Dimname"):
            continue  # named tensors cannot be captured
        if torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
            name = full.removeprefix("aten::")
            assert name in named or name.split(".")[0] in named, full


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Inside(nn.Module):
    """Autocast in a part of the model, with a part of that taken out again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lin = model(), nn.Linear(8, 8)

    def forward(self, x: T) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = self.body(x)
            with torch.autocast("cpu", enabled=False):
                b = self.lin(a.float())
            c = self.lin(b)
        return a, b, c, self.lin(c.float()), self.body(x)


def test_ambient_autocast() -> None:
    recorder = check(model(), [torch.randn(4, 8)], around=bf16, tolerance=0)
    assert recorder.targets().count("aten._to_copy.default") > 0


def test_autocast_inside_the_model() -> None:
    check(Inside(), [torch.randn(4, 8)], tolerance=0)
    check(Inside(), [torch.randn(4, 8)], around=bf16, tolerance=0)


def test_weight_used_twice_is_cast_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8, bias=False)

        def forward(self, x: T) -> T:
            return self.lin(self.lin(x))

    recorder = check(Twice(), [torch.randn(4, 8)], around=bf16, tolerance=0)
    assert recorder.targets().count("aten._to_copy.default") == 2  # the weight, the input


def test_lstm_under_autocast() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x: T) -> T:
            return self.lstm(x)[0]

    x = torch.randn(3, 2, 8)
    try:
        with bf16():
            Model()(x)
    except RuntimeError as error:  # of processors without kernels for it
        pytest.skip(f"torch itself has no LSTM in bfloat16 here: {error}")
    with torch._dynamo.config.patch(allow_rnn=True):
        check(Model(), [x], around=bf16, tolerance=2e-2)


def test_banned_operator_says_what_to_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["example_value"] = torch.empty(4, device="cuda", dtype=torch.float16)
    graph.output((graph.call_function(F.binary_cross_entropy, (x, x)),))
    with ambient("cuda"), pytest.raises(RuntimeError, match=re.escape("with_logits")):
        capture(fx.GraphModule(nn.Module(), graph), [])
