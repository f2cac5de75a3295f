"""autoshard::masked_attention: what torch's attention with the dense mask gives, and its gradients;
by blocks of rows, and by kernels of sequences of many lengths, for which a plain one stands in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from autoshard.runtime.masked_attention import MASKED_ATTENTION, by_blocks, varlen
from autoshard.runtime.masked_attention.operator import document_bounds, first_keys

T = torch.Tensor
KEYS, ROWS, SCALE = 150, 40, 0.3


class Given(NamedTuple):
    """Queries of the last `rows` places, keys, values, and what is let through."""

    qkv: tuple[T, T, T]
    documents: T | None
    visible: T | None
    window: int | None

    def dense(self, q: T, k: T, v: T) -> T:
        """By torch, with the mask written out."""
        at = torch.arange(k.shape[2])
        own = at[k.shape[2] - q.shape[2] :, None]
        mask = (at <= own)[None, None]
        if self.window is not None:
            mask = mask & (own - at < self.window)
        if self.documents is not None:
            mask = mask & (self.documents[..., -q.shape[2] :].mT == self.documents)
        if self.visible is not None:
            mask = mask & self.visible
        y: T = F.scaled_dot_product_attention(q, k, v, mask, scale=SCALE, enable_gqa=True)
        return y


def samples() -> Iterator[Given]:
    generator = torch.Generator().manual_seed(0)
    for rows, window, packed, padded in itertools.product(
        (KEYS, ROWS), (None, 7), (0, 1, 2), (False, True)
    ):
        sizes = [(2, 4, rows, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 10)]
        q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in sizes)
        documents = (torch.rand(max(1, packed), 1, 1, KEYS, generator=generator) < 0.05).cumsum(-1)
        visible = torch.rand(2, 1, 1, KEYS, generator=generator) > 0.3
        visible[0, ..., : KEYS - 20] = False  # many rows see no key
        yield Given((q, k, v), documents if packed else None, visible if padded else None, window)


def with_gradients(made: T, inputs: Any) -> list[T]:
    weight = torch.linspace(-1, 1, made.numel(), dtype=made.dtype).reshape(made.shape)
    return [made, *torch.autograd.grad((made * weight).sum(), inputs)]


def test_the_operator_is_attention_with_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_blocks, "_ROWS", 16)
    for one in samples():
        inputs = [x.requires_grad_() for x in one.qkv]
        known = (one.documents, one.visible, one.window)
        made = MASKED_ATTENTION(*inputs, *known, scale=SCALE, enable_gqa=True)
        wanted = with_gradients(one.dense(*inputs), inputs)
        torch.testing.assert_close(with_gradients(made, inputs), wanted, rtol=0, atol=1e-10)


def test_no_scores_but_those_of_a_block_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window and of documents no more keys are read than rows of a block see."""
    read: list[int] = []
    blocks = by_blocks._blocks

    def watched(*args: Any) -> Any:
        for block in blocks(*args):
            read.append(block.hidden.shape[-1])
            yield block

    monkeypatch.setattr(by_blocks, "_blocks", watched)
    n = 8 * by_blocks._ROWS
    q = torch.zeros(1, 1, n, 4)
    MASKED_ATTENTION(q, q, q, None, None, 100)
    assert max(read) == by_blocks._ROWS + 99
    read.clear()
    documents = (torch.arange(n) // (n // 4))[None, None, None]
    MASKED_ATTENTION(q, q, q, documents)
    assert max(read) == n // 4


def plain_forward(
    q: T, k: T, v: T, ends_q: T, ends_k: T, most_q: int, most_k: int, *rest: Any, **options: Any
) -> tuple[T, T]:
    """What `_flash_attention_forward` says of itself: the last query of a sequence sees its last
    key, and `window_size_left` keys before its own."""
    _, causal, _ = rest
    left = options["window_size_left"]
    assert causal == (left == -1) and options["window_size_right"] == 0
    assert len({x.shape[-1] for x in (q, k, v)}) == 1 and q.shape[-1] % 8 == 0
    out, sums = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    for a, b in zip(ends_q.unfold(0, 2, 1).tolist(), ends_k.unfold(0, 2, 1).tolist()):
        assert a[1] - a[0] <= most_q and b[1] - b[0] <= most_k
        own = torch.arange(a[0] - a[1], 0)[:, None] + b[1] - b[0]
        at = torch.arange(b[1] - b[0])
        hidden = (at > own) | ((own - at > left) if left >= 0 else False)
        groups = q.shape[1] // k.shape[1]
        keys, values = (x[b[0] : b[1]].repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
        scores = q[a[0] : a[1]].transpose(0, 1) @ keys.mT * options["scale"]
        scores = scores.masked_fill(hidden, -torch.inf)
        sums[:, a[0] : a[1]] = scores.logsumexp(-1)
        out[a[0] : a[1]] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out, sums


def plain_backward(
    gradient: T, q: T, k: T, v: T, out: T, sums: T, *rest: Any, **options: Any
) -> Any:
    """By autograd; of what forward kept it wants the same."""
    *spans, dropped, causal, _, _ = rest
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        again = plain_forward(*inputs, *spans, dropped, causal, False, **options)
    torch.testing.assert_close(again[1], sums)
    return torch.autograd.grad(again[0], inputs, gradient)


def test_kernels_of_many_lengths_are_given_what_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_forward", plain_forward)
    monkeypatch.setattr(varlen, "_backward", plain_backward)
    for one in samples():
        inputs = [x.requires_grad_() for x in one.qkv]
        rows = inputs[0].shape[2]
        first = first_keys(one.documents, one.window, rows, KEYS, torch.device("cpu"))
        if one.documents is None:
            spans = varlen.whole_sequences(2, rows, KEYS, torch.device("cpu"))
        else:
            queries, keys, sizes = document_bounds(one.documents, 2, rows)
            count, *most = sizes.tolist()
            assert queries.shape == keys.shape == (2 * KEYS + 1,)
            assert int(keys[count]) == 2 * KEYS and int(keys[count - 1]) < 2 * KEYS
            spans = varlen.Spans(queries[: count + 1], keys[: count + 1], *most)
        known = (first, one.visible, one.window, SCALE, spans)
        with torch.no_grad():
            out, sums = varlen.forward(*inputs, *known)
        wanted, *gradients = with_gradients(one.dense(*inputs), inputs)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        found = varlen.backward(weight, *inputs, out, sums, *known)
        torch.testing.assert_close(list(found), gradients, rtol=0, atol=1e-10)
