"""Losses by chunks of rows: numbers, what is never whole, what travels, and what stays whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import autoshard
from autoshard import backend
from autoshard.errors import AutoshardError
from autoshard.planning.plan import Plan
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.graph_meta import CHUNKED
from autoshard.runtime.operators import CHUNKED_LOSS, as_text, chunked_cross_entropy, chunked_loss
from autoshard.runtime.operators.chunked_loss import rows_a_chunk
from autoshard.runtime.operators.vocabulary import MEAN, SUM
from autoshard.verification.comparison import furthest
from autoshard.verification.program_check import verify_program
from model_case import HIDDEN
from models_hf import DECODER, hf, llama
from side_by_side import difference
from traced import programs
from world_one import peak_of

T = torch.Tensor
B, S, H, V = 2, 512, 32, 1000


class Head(nn.Module):
    """A loss of the next tokens, as models write it. kind: what is peculiar to its head."""

    def __init__(self, kind: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.options = kind, options
        self.embed, self.mix = nn.Embedding(V, H), nn.Linear(H, H)
        self.head = nn.Linear(H, V, bias=kind == "bias")
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.head.requires_grad_(False)

    def forward(self, ids: T) -> Any:
        hidden = torch.tanh(self.mix(self.embed(ids)))
        if self.kind == "returned rows":
            hidden, ids = hidden[ids > V // 2], ids[ids > V // 2]
        logits = self.head(hidden)
        if self.kind == "softcap":
            logits = 30.0 * torch.tanh(logits / 30.0)
        if self.kind == "padded":
            logits = logits[..., : V - 8]
        labels = F.pad(ids.clamp(max=V - 9), (0, 1), value=-100)[..., 1:]
        if self.kind == "cut":
            logits, labels = logits[:, :-1], labels[:, :-1]
        if self.kind == "ignored":
            labels = torch.where(ids > V // 2, labels, -100)
        classes = logits.shape[-1]
        scores = logits.float().reshape(-1, classes)
        loss = F.cross_entropy(scores, labels.reshape(-1), **self.options)
        if self.kind == "z-loss":
            loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        if self.kind == "returned copy":  # accelerate casts all outputs under bf16
            return loss, logits.double()
        return (loss, logits) if self.kind.startswith("returned") else loss


def made(
    model: nn.Module, *meshes: dict[str, int], **options: Any
) -> list[tuple[Program, Program, list[Any]]]:
    """For each mesh: the program by chunks, the one of whole logits, and the inputs' values."""
    torch.compiler.reset()
    asked = [
        {"mesh": mesh, "memory": {"chunk_loss": how}, **options}
        for mesh in meshes
        for how in (True, False)
    ]
    found, values = programs(model, (torch.randint(0, V, (B, S)),), asked)
    return [(a, b, values) for a, b in zip(found[::2], found[1::2])]


def largest(program: Program) -> int:
    """Elements of the largest value of both graphs of a step."""
    graphs = [gm for gm in (program.joint.forward, program.joint.backward) if gm is not None]
    found = [
        leaf for gm in graphs for n in gm.graph.nodes for leaf in tree_leaves(n.meta.get("val"))
    ]
    return max(leaf.numel() for leaf in found if isinstance(leaf, T))


def moved(program: Program) -> dict[tuple[str, str, str], int]:
    """Bytes of collectives by phase, kind and axis."""
    total: dict[tuple[str, str, str], int] = {}
    for one in program.collectives():
        key = (one.phase, one.op, one.axis)
        total[key] = total.get(key, 0) + one.bytes
    return total


def reasons(program: Program) -> list[str]:
    return [one.reason for one in program.graph_module.meta[CHUNKED]]


MESHES: list[dict[str, int]] = [
    {"tp": 1},
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "tp": 2},
    {"dp_shard": 2},
]
KINDS = ["", "bias", "tied", "frozen", "softcap", "padded", "cut", "ignored"]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_serial_model(kind: str) -> None:
    meshes = {"": MESHES, "tied": MESHES[-2:], "cut": MESHES[2:3]}.get(kind, MESHES[1:2])
    for chunked, whole, values in made(Head(kind), *meshes):
        others = [values] * (chunked.mesh.batches - 1)
        found = verify_program(chunked, values, others=others)
        assert found.worst_by_norm[1] < 1e-5, found
        assert reasons(chunked) == [""]
        rows = B * S // chunked.mesh.axis("cp").size
        assert largest(chunked) < rows * V // 2 / chunked.mesh.axis("tp").size < largest(whole)


class NextTokens(nn.Module):
    """A model of transformers with the loss that it computes itself."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make()
        self.model.loss_type = "ForCausalLM"  # else a warning breaks the graph before the loss

    def forward(self, ids: T) -> Any:
        return self.model(input_ids=ids, labels=torch.where(ids < 5, -100, ids), return_dict=False)


WORDS = 2048
MODELS = {
    "llama": llama(vocab_size=WORDS),
    "gpt2": hf(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=WORDS,
        n_embd=HIDDEN,
        n_layer=1,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gemma2": hf(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        **{**DECODER, "vocab_size": WORDS, "head_dim": 16, "num_key_value_heads": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits beside the loss; a tied head; a softcap."""
    monkeypatch.setattr(chunked_loss, "_FEWEST_ROWS", 16)
    torch.compiler.reset()
    ids = torch.randint(0, WORDS, (2, 128))
    asked = [{"mesh": mesh, "memory": {"chunk_loss": True}} for mesh in MESHES]
    found, values = programs(NextTokens(MODELS[name]), (ids,), asked)
    for program in found:
        assert reasons(program) == [""]
        others = [values] * (program.mesh.batches - 1)
        assert verify_program(program, values, others=others).worst_by_norm[1] < 1e-5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2, "tp": 2}])
def test_what_travels_is_what_the_whole_loss_sends(
    mesh: dict[str, int], smoothing: float, tmp_path: Path
) -> None:
    model = Head(label_smoothing=smoothing)
    ids = torch.randint(0, V, (B, S))
    plan = Plan("tp", 2, {"head.weight": "S(0)"}, {}) if len(mesh) == 1 else None
    asked = [{"mesh": mesh, "memory": {"chunk_loss": how}, "plan": plan} for how in (True, False)]
    (chunked, whole), _ = programs(model, (ids,), asked)
    sent, before = moved(chunked), moved(whole)
    if "cp" in mesh:  # the backward does not read the head's weight: it is gathered once
        before["backward", "all_gather", "cp"] -= H * V // 2 * 4
    assert sent == before
    (node,) = chunked.joint.forward.graph.find_nodes(op="call_function", target=CHUNKED_LOSS)
    assert node.args[-2] == 2, "the plan does not split the classes"
    assert len(chunked.collectives()) > len(whole.collectives())
    assert "by 256 rows" in chunked.explain(200)
    chunked.explain_html(tmp_path / "page.html")


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("z-loss", {}, "logsumexp reads its logits too"),
        ("", {"reduction": "none"}, "it is a loss of each token"),
    ],
)
def test_what_stays_whole_says_why(kind: str, options: dict[str, Any], reason: str) -> None:
    ((chunked, whole, _),) = made(Head(kind, **options), {"tp": 2})
    assert reasons(chunked) == [reason] and reason in chunked.explain(200)
    assert largest(chunked) == largest(whole)


@pytest.mark.parametrize("kind", ["returned", "returned copy"])
def test_returned_logits_stay_unless_they_may_be_withheld(kind: str) -> None:
    asked = [{"mesh": {"tp": 1}, "memory": {"chunk_loss": how}} for how in ("auto", True)]
    (auto, withheld), values = programs(Head(kind), (torch.randint(0, V, (B, S)),), asked)
    assert CHUNKED not in auto.graph_module.meta
    assert reasons(withheld) == [""] and largest(withheld) < B * S * V // 2
    assert verify_program(withheld, values).worst_by_norm[1] < 1e-5


def test_without_gradients_returned_logits_are_given() -> None:
    with torch.no_grad():
        ((chunked, _, _),) = made(Head("returned"), {"tp": 1})
        ((alone, _, _),) = made(Head(), {"tp": 1})
    assert reasons(chunked) == ["the model returns its logits, and no gradient is asked for"]
    assert reasons(alone) == [""] and largest(alone) < B * S * V // 2


@pytest.mark.parametrize(
    "name", ["", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gpt2"))]
)
def test_logits_of_a_compiled_step_are_withheld(name: str) -> None:
    """In one process, at sizes that are symbols from the second on; readers are told the option."""
    model, serial = (NextTokens(MODELS[name]) if name else Head("returned") for _ in range(2))
    classes = WORDS if name else V
    options = {"memory": {"chunk_loss": True}, "inner": "aot_eager", "mesh": {"tp": 1}}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    for rows, length in ((B, S), (3, 300), (4, 257)):
        ids = torch.randint(0, classes, (rows, length))
        loss, logits = compiled(ids)
        want = serial(ids)[0]
        (loss + want).backward()
        torch.testing.assert_close(loss, want)
        for p, q in zip(model.parameters(), serial.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6 if name else 1e-7)
        passed_on = logits.detach().bfloat16().cpu().clone()
        assert (passed_on.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
        for each in (logits, passed_on):
            assert each.shape == (rows, length, classes)
            with pytest.raises(AutoshardError, match="chunk_loss=True never makes whole"):
                each.argmax(-1)
    assert [reasons(program) for program in autoshard.programs(model)] == [[""], [""]]
    with torch.no_grad():
        assert compiled(ids)[1].argmax(-1).shape == (rows, length)


def test_withheld_logits_have_the_sizes_of_the_callers_batch() -> None:
    """Whatever part of it a rank has."""
    ids = torch.randint(0, V, (B, S))
    compat.mark_dynamic(ids, (0, 1))
    asked = [{"mesh": mesh, "memory": {"chunk_loss": True}} for mesh in MESHES[1:]]
    found, values = programs(Head("returned"), (ids,), asked)
    for program in found:
        assert reasons(program) == [""]
        others = [values] * (program.mesh.batches - 1)
        assert verify_program(program, values, others=others).worst_by_norm[1] < 1e-5
        given = [{B: 6, S: 300}[v] if isinstance(v, int) else v for v in values]
        assert backend._withholding(program)((None, None), given)[1].shape == (6, 300, V)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_logits_of_rows_that_values_choose_are_given() -> None:
    asked = [{"mesh": {"tp": 1}, "memory": {"chunk_loss": True}}]
    ((program,), _) = programs(Head("returned rows"), (torch.randint(0, V, (B, S)),), asked)
    assert reasons(program)[0].endswith("depends on values of its inputs")


def test_memory_is_what_a_step_holds() -> None:
    """Of a head that is most of the model; scratch space inside of the operator included."""
    model, ids = Head(), torch.randint(0, V, (B, S))
    chunked = {"chunk_loss": True}
    options: dict[str, Any] = {"memory": chunked, "inner": "aot_eager", "mesh": {"tp": 1}}
    predicted = [
        autoshard.trace(model, (ids,), **{**options, "memory": {"chunk_loss": how}}).memory("sgd")
        for how in (True, False)
    ]
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    for _ in range(2):
        found = peak_of(compiled, model, ids)
    ours, whole = (one.peak - one.parameters for one in predicted)
    assert abs(ours / found - 1) < 0.02
    assert ours < whole / 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_form_of_the_loss(smoothing: float, weighted: bool, reduction: str) -> None:
    rows, classes = 600, 70
    hidden, weight, bias = torch.randn(rows, 8), torch.randn(classes, 8), torch.randn(classes)
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    target = torch.randint(classes, (rows,))
    target[::5] = 3
    share = torch.rand(classes).double() + 0.1 if weighted else None
    want = F.cross_entropy(
        5 * torch.tanh(F.linear(*leaves) / 5),
        target,
        share,
        ignore_index=3,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    got = chunked_cross_entropy(
        *leaves,
        target,
        share,
        MEAN if reduction == "mean" else SUM,
        3,
        smoothing,
        functions=as_text([("div", 5), ("tanh",), ("mul", 5)]),
        dtype=torch.float64,
        classes=classes,
    )
    assert rows_a_chunk(rows, classes, 8) < rows
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves))


def test_a_batch_without_tokens_is_as_in_torch() -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target = torch.full((6,), -100)
    want = F.cross_entropy(hidden @ weight.t(), target)
    got = chunked_cross_entropy(
        hidden, weight, None, target, functions="[]", dtype=torch.float32, classes=5
    )
    assert want.isnan() and got.isnan()
    for loss in (want, got):
        assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_16_bit_gradients_are_summed_in_float32() -> None:
    """No further from float64 than those of whole logits."""
    rows, classes, width = 8192, 64, 4
    hidden, weight = torch.randn(rows, width), torch.randn(classes, width)
    target = torch.randint(classes, (rows,))

    def step(dtype: torch.dtype, chunked: bool) -> tuple[T, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (hidden.bfloat16(), weight.bfloat16())]
        if chunked:
            functions = as_text([("to", "float32")])
            loss = chunked_cross_entropy(
                *leaves, None, target, functions=functions, dtype=torch.float32, classes=classes
            )
        else:
            scores = leaves[0] @ leaves[1].t()
            loss = F.cross_entropy(scores if dtype == torch.float64 else scores.float(), target)
        return tuple(x.double() for x in torch.autograd.grad(loss, leaves))

    exact = step(torch.float64, False)
    for ours, whole, right in zip(step(torch.bfloat16, True), step(torch.bfloat16, False), exact):
        assert (ours - right).norm() <= 1.2 * (whole - right).norm() + 2**-9 * right.norm()


def a_step(inner: str) -> float:
    """The worst difference of a gradient on two ranks that split the classes."""
    torch.manual_seed(0)
    ids = torch.randint(0, V, (B, S))
    model, serial = Head(), Head()
    plan = Plan("tp", 2, {"head.weight": "S(0)"}, {})
    options = {"mesh": {"tp": 2}, "plan": plan, "memory": {"chunk_loss": True}, "inner": inner}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    compiled(ids).backward()
    serial(ids).backward()
    pairs = zip(model.parameters(), serial.parameters())
    return furthest(difference(a.grad, b.grad, 1.0) for a, b in pairs)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_processes_split_the_classes(gloo2: Any, inner: str) -> None:
    assert furthest(gloo2(a_step, inner)) < 1e-7
