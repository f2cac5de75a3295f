"""recover_masks: attention without its mask has the same values and gradients, where that is
proven; where it is not, the reason says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autoshard.passes import recover_masks
from autoshard.passes.base import Context
from autoshard.passes.canonicalize import Canonicalize
from autoshard.passes.recover_masks import RecoverMasks
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.graph_meta import ATTENTION_MASKS
from autoshard.runtime.masked_attention import MASKED_ATTENTION
from capturing import check
from model_case import HEADS, SEQ, ids
from models_hf import DECODER, hf
from traced import builder

T = torch.Tensor
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
INF = float("inf")


def found_of(
    mask: Callable[[int], T | None], *, n: int = 12, dynamic: bool = False, kv: int = 4
) -> tuple[list[tuple[str, str]], fx.Node]:
    """What is found of a mask of n tokens, and attention after the pass; the pass changes no
    value and no gradient of it."""
    graphs: list[fx.GraphModule] = []

    def rewrite(gm: fx.GraphModule) -> None:
        ctx = Context(Axis("tp", 1, 0, ""))
        Canonicalize().run(gm, ctx)
        RecoverMasks().run(gm, ctx)
        graphs.append(gm)

    class Model(nn.Module):
        def forward(self, q: T, k: T, v: T) -> T:
            def repeated(x: T) -> T:
                wide = x[:, :, None].expand(*x.shape[:2], 4 // kv, *x.shape[2:])
                return wide.reshape(x.shape[0], 4, *x.shape[2:])

            y: T = F.scaled_dot_product_attention(
                q, repeated(k), repeated(v), mask(q.shape[2]), scale=0.3
            )
            return y

    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, n, 8, requires_grad=True) for heads in (4, kv, kv)]
    check(Model(), inputs, rewrite=rewrite, dynamic=dynamic)
    (node,) = [n for n in graphs[0].graph.nodes if n.target in (ATTENTION, MASKED_ATTENTION)]
    return [(m.meaning, m.reason) for m in graphs[0].meta[ATTENTION_MASKS]], node


def index(n: int) -> T:
    return torch.arange(n)


CAUSAL: dict[str, Callable[[int], T]] = {
    "compared": lambda n: index(n)[:, None] >= index(n),
    "of four dims": lambda n: index(n)[None, None, None] <= index(n)[None, None, :, None],
    "shifted alike": lambda n: index(n)[:, None] + 7 > index(n) + 6,
    "tril": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "additive": lambda n: torch.full((n, n), -INF).triu(1),
    "filled": lambda n: torch.zeros(n, n).masked_fill(index(n)[:, None] < index(n), -INF),
    "chosen": lambda n: torch.where(
        index(n)[:, None] >= index(n), 0.0, torch.finfo(torch.float32).min
    ),
    "one minus": lambda n: ~(index(n)[:, None] < index(n)),
    "twice": lambda n: (
        (index(n)[:, None] >= index(n)) & (index(n)[:, None] + 3 >= index(n)) & (index(n) >= 0)
    ),
}


@pytest.mark.parametrize(
    "name,dynamic",
    [*((name, False) for name in CAUSAL), ("compared", True), ("additive", True), ("twice", True)],
)
def test_causal_masks(name: str, dynamic: bool) -> None:
    found, node = found_of(CAUSAL[name], dynamic=dynamic)
    assert found == [("causal", "it lets through the keys up to each query's own")]
    assert node.kwargs == {"scale": 0.3, "is_causal": True} and len(node.args) == 3


def window(size: int) -> Callable[[int], T]:
    return lambda n: (index(n)[:, None] >= index(n)) & (index(n)[:, None] - size < index(n))


def test_a_window_is_causal_where_no_sequence_is_longer() -> None:
    assert found_of(window(12))[0][0][0] == "causal"
    shorter = "a window of 11 tokens is shorter than the sequence of 12"
    found, node = found_of(window(11), kv=2)
    assert found == [("window", shorter)] and node.args[3:] == (None, None, 11)
    assert [arg.meta["val"].shape[1] for arg in node.args[:3]] == [4, 2, 2]
    symbolic = "a window of 12 tokens, and the length of the sequence is symbolic"

    def twelve(n: int) -> T:
        return (index(n)[:, None] >= index(n)) & (index(n)[:, None] - 12 < index(n))

    assert found_of(twelve, dynamic=True)[0] == [("window", symbolic)]


def nothing_hidden(n: int) -> T:
    return (index(n)[:, None] + index(n) >= 0) & torch.ones(1, 1, n, n, dtype=torch.bool)


@pytest.mark.parametrize(
    "mask,dynamic",
    [(lambda n: torch.zeros(1, 1, n, n), False), (nothing_hidden, False), (nothing_hidden, True)],
)
def test_a_mask_that_hides_nothing_goes(mask: Callable[[int], T], dynamic: bool) -> None:
    found, node = found_of(mask, dynamic=dynamic)
    assert found == [("none", "it hides nothing")]
    assert node.kwargs == {"scale": 0.3} and len(node.args) == 3


DENSE: dict[str, tuple[Callable[[int], T], str]] = {
    "a diagonal more": (
        lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
        "it hides some of the keys after each query's own",
    ),
    "one or the other": (
        lambda n: torch.ones(n, n, dtype=torch.bool).tril(-1) | (index(n) == index(n)[:, None]),
        "__or__ is no comparison of indices that is known",
    ),
    "the future": (
        lambda n: index(n)[:, None] <= index(n),
        "a window of 1 tokens is shorter than the sequence of 12",
    ),
    "the diagonal": (
        lambda n: index(n)[:, None] == index(n),
        "it hides keys before a query's own",
    ),
    "by head": (
        lambda n: index(4)[:, None, None] + index(n)[:, None] >= index(n),
        "it differs by head or by sequence",
    ),
    "half open": (
        lambda n: torch.where(index(n)[:, None] >= index(n), 0.0, -1.0),
        "its entries are 0.0 and -1.0",
    ),
    "by distance": (
        lambda n: (index(n) - index(n)[:, None]).float(),
        "_to_copy makes torch.float32 of positions",
    ),
    "drawn": (lambda n: torch.rand(n, n) < 2, "rand is no comparison of indices that is known"),
    "one row": (
        lambda n: index(n)[None] < n - 1,
        "its last dims are 1 x 12, not equal",
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_is_not_proven_stays_with_its_reason(name: str) -> None:
    mask, reason = DENSE[name]
    found, node = found_of(mask, kv=2)
    assert found == [("dense", reason)]
    assert len(node.args) == 4 and not node.kwargs.get("enable_gqa")


@pytest.mark.parametrize("dynamic", [False, True])
def test_repeated_heads_are_read_once(dynamic: bool) -> None:
    _, node = found_of(CAUSAL["tril"], dynamic=dynamic, kv=2)
    assert [arg.meta["val"].shape[1] for arg in node.args] == [4, 2, 2]
    assert node.kwargs["enable_gqa"] is True


def test_a_mask_with_a_gradient_stays() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(6, 6))

        def forward(self, q: T) -> T:
            y: T = F.scaled_dot_product_attention(q, q, q, self.bias * 1.0)
            return y

    def rewrite(gm: fx.GraphModule) -> None:
        RecoverMasks().run(gm, Context(Axis("tp", 1, 0, "")))
        assert [m.reason for m in gm.meta[ATTENTION_MASKS]] == ["a gradient flows to it"]

    check(Biased(), [torch.randn(1, 2, 6, 4)], rewrite=rewrite)


SMALL = {**DECODER, "num_hidden_layers": 1, "num_key_value_heads": HEADS // 2}
GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": HEADS, "vocab_size": DECODER["vocab_size"]}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": SEQ // 2}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": hf("LlamaForCausalLM", "LlamaConfig", **SMALL),
    "qwen3": hf("Qwen3ForCausalLM", "Qwen3Config", head_dim=16, **SMALL),
    "gpt2": hf("GPT2LMHeadModel", "GPT2Config", n_positions=4 * SEQ, **GPT2),
    "gemma3": hf(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        head_dim=16,
        **{**SMALL, "num_hidden_layers": 2, **WINDOWS},
    ),
}


class Scores(nn.Module):
    """A model's scores, whose caller asks for no cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: T, **kwargs: Any) -> T:
        return self.model(tokens, **kwargs).logits  # type: ignore[no-any-return]


def squares(program: Program, n: int) -> int:
    """The attentions of a serial graph that read a mask of n x n."""
    nodes = program.serial.graph.find_nodes(op="call_function", target=ATTENTION)
    return sum(any(_is_square(arg, n) for arg in node.all_input_nodes) for node in nodes)


def _is_square(node: fx.Node, n: int) -> bool:
    val = node.meta.get("val")
    return isinstance(val, T) and val.dim() > 1 and tuple(val.shape[-2:]) == (n, n)


@pytest.mark.parametrize(
    ("what", "found"),
    [("position_ids", "documents"), ("attention_mask", "padding")],
)
def test_a_packed_and_a_left_padded_batch_have_no_square_tensor(
    what: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover_masks, "PADDING_FROM", SEQ - 1)
    n = SEQ - 1
    at = torch.arange(n).expand(2, n)
    given = torch.where(at < 7, at, at - 7) if what == "position_ids" else (at > 4).long()
    model = Scores(MODELS["gemma3"]())
    build = builder(model, (ids(0)[:2, :n],), {what: given})
    program = build({"tp": 2})
    assert not any(_is_square(node, n) for node in program.serial.graph.nodes)
    masks = [one.meaning for one in program.serial.meta[ATTENTION_MASKS]]
    assert masks == [f"window, {found}", found]


def test_padding_alone_stays_a_mask_in_short_sequences() -> None:
    n = SEQ - 1
    build = builder(
        Scores(MODELS["gemma3"]()),
        (ids(0)[:2, :n],),
        {"attention_mask": (torch.arange(n).expand(2, n) > 4).long()},
    )
    program = build({"tp": 2})
    window, full = program.serial.meta[ATTENTION_MASKS]
    assert window.meaning == "window, padding" and full.meaning == "dense"
    assert full.reason.endswith("by the mask for fewer than 16,384 keys")
    assert squares(program, n) == 1


@pytest.mark.parametrize("name", MODELS)
def test_models_of_hugging_face_have_no_square_tensor(name: str) -> None:
    model = Scores(MODELS[name]())
    if name == "llama":
        model.model.activation_checkpointing_enable()
        model.train()
    n = SEQ - 1  # no other dim is as long
    build = builder(model, (ids(0)[:, :n],))
    program = build({"tp": 2})
    assert not any(_is_square(node, n) for node in program.serial.graph.nodes)
    dense = build({"tp": 2}, planner={"recover_masks": False})
    assert squares(dense, n) == len(
        dense.serial.graph.find_nodes(op="call_function", target=ATTENTION)
    )
