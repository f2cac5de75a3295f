"""What a plan communicates, counted on the graphs of the forward and backward pass and held
against the ledger of the hand-written reference (Megatron-LM's tensor and sequence parallelism).

Every number is in units of a whole activation, N = batch x sequence x hidden x bytes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard.planning.cost import model as cost
from autoshard.program import Program
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.collectives.states import shard_dim
from autoshard.runtime.graph_meta import MODULE
from models_hf import hf
from traced import programs, sharded_share

N_RANKS, TOKENS, HIDDEN = 8, 4096, 4096
ACTIVATION = TOKENS * HIDDEN * 4
SMALL = ACTIVATION / 128  # below: a vector's gradient, a few scalars a token
DEPTHS = (2, 3)
LOGITS = TOKENS * 32000 * 4
TENSOR, SEQUENCE = False, True


class LanguageModel(nn.Module):
    """A Hugging Face model with the loss beside the logits, which nobody reads."""

    def __init__(self, body: nn.Module, loss: bool = True) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, ids: torch.Tensor) -> Any:
        """(loss, logits), or logits."""
        logits = self.body(input_ids=ids).logits
        if not self.loss:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


_LLAMA = hf(
    "LlamaForCausalLM",
    "LlamaConfig",
    hidden_size=HIDDEN,
    num_attention_heads=32,
    intermediate_size=11008,
    vocab_size=32000,
)
MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "llama": _LLAMA,
    "llama_gqa": functools.partial(_LLAMA, num_key_value_heads=4),  # fewer than ranks
    "gpt2": hf(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_embd=HIDDEN,
        n_head=32,
        vocab_size=50304,
        n_positions=TOKENS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "mixtral": hf(
        "MixtralForCausalLM",
        "MixtralConfig",
        hidden_size=HIDDEN,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    ),
}


@functools.cache
def planned(name: str, layers: int, loss: bool = True) -> dict[bool, Program]:
    """The program without and with sequence parallelism."""
    torch.compiler.reset()
    with torch.device("meta"):
        model = LanguageModel(MODELS[name](num_hidden_layers=layers), loss)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    options = [
        {"mesh": {"tp": N_RANKS}, "hardware": "h100", "planner": {"sequence_parallel": sequence}}
        for sequence in (TENSOR, SEQUENCE)
    ]
    made, _ = programs(model, (ids,), options)
    return dict(zip((TENSOR, SEQUENCE), made, strict=True))


def counted(program: Program) -> Counter[tuple[str, str]]:
    """(phase, op) of the collectives that move activations."""
    return Counter((c.phase, c.op) for c in program.collectives() if c.bytes > SMALL)


def ring(program: Program) -> float:
    """What one rank sends in a step, as a multiple of what a gather of N sends."""
    sent = sum(cost.ring_bytes(c.op, c.bytes, N_RANKS) for c in program.collectives())
    return sent / cost.ring_bytes("all_gather", ACTIVATION, N_RANKS)


def per_layer(name: str, sequence: bool) -> tuple[dict[tuple[str, str], int], float]:
    """(collectives of activations, ring bytes) that one more layer adds."""
    shallow, deep = (planned(name, layers)[sequence] for layers in DEPTHS)
    more = counted(deep)
    more.subtract(counted(shallow))
    return {key: n for key, n in more.items() if n}, ring(deep) - ring(shallow)


@pytest.mark.parametrize("sequence", [TENSOR, SEQUENCE])
def test_collectives_are_those_of_the_graphs(sequence: bool) -> None:
    """An independent count: by the operator's name, over every node of both graphs."""
    program = planned("llama", 2)[sequence]
    kinds = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }
    found: Counter[tuple[str, str, int]] = Counter()
    for phase in ("forward", "backward"):
        for node in getattr(program.joint, phase).graph.nodes:
            namespace, _, rest = str(node.target).partition(".")
            name = rest.partition(".")[0]
            if namespace != "_c10d_functional" or name == "wait_tensor":
                continue
            tensor = node if name == "all_gather_into_tensor" else node.args[0]
            val = tensor.meta["val"]
            found[phase, kinds[name], val.numel() * val.element_size()] += 1
    assert found == Counter((c.phase, c.op, c.bytes) for c in program.collectives())
    assert found.total() > 8


def test_tensor_parallel_layer_costs_four_all_reduces() -> None:
    counts, sent = per_layer("llama", TENSOR)
    assert counts == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
    assert sent == pytest.approx(8, abs=0.01)


def test_sequence_parallel_layer_costs_four_gathers_and_four_scatters() -> None:
    counts, sent = per_layer("llama", SEQUENCE)
    assert counts == {
        ("forward", "all_gather"): 2,
        ("forward", "reduce_scatter"): 2,
        ("backward", "all_gather"): 2,
        ("backward", "reduce_scatter"): 2,
    }
    # and the gradients of two norm weights, which the reference sums once a step
    assert sent == pytest.approx(8, abs=0.01)


# Outside the layers the reference reduces or scatters the embedding, gathers for the head, and
# reduces the head's gradient: four. What the loss reduces is a scalar a token. A learned position
# costs it a gather more in sequence parallelism. The gathered input is kept, as in its 4+4 row.
LEDGER = {
    ("llama", TENSOR): (8.0, 4.0),
    ("llama", SEQUENCE): (8.0, 4.0),
    # the reference's weight-sharded path gathers q, k and v once more, and scatters: 2 x 1.25
    ("llama_gqa", TENSOR): (10.5, 4.0),
    ("llama_gqa", SEQUENCE): (10.5, 4.0),
    # c_attn is one matrix [q | k | v] in contiguous shards; the reference stores it by heads
    # instead. Rearranging its output takes an all-to-all of 3/8 N each way.
    ("gpt2", TENSOR): (8.75, 4.0),
    ("gpt2", SEQUENCE): (8.75, 5.0),
}


@pytest.mark.parametrize(("name", "sequence"), LEDGER)
def test_a_rank_never_sends_more_than_the_ledger(name: str, sequence: bool) -> None:
    layer, outside = LEDGER[name, sequence]
    _, sent = per_layer(name, sequence)
    assert sent <= layer + 0.01
    for layers in DEPTHS:
        program = planned(name, layers)[sequence]
        vectors = sum(c.bytes for c in program.collectives() if c.bytes <= SMALL)
        slack = 2 * vectors / ACTIVATION
        assert slack < 0.01 * layers
        assert ring(program) <= layer * layers + outside + slack
        assert sharded_share(program) > 0.99


@pytest.mark.parametrize("name", ["gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_other_layers_reduce_as_often_as_a_llama(name: str) -> None:
    counts, _ = per_layer(name, TENSOR)
    assert counts["forward", "all_reduce"] == counts["backward", "all_reduce"] == 2
    assert ("forward", "all_gather") not in counts
    assert ("backward", "reduce_scatter") not in counts


def test_an_expert_is_split_and_not_gathered() -> None:
    for program in planned("mixtral", 2).values():
        experts = {k: s for k, s in program.stored().items() if ".experts." in k}
        assert experts
        assert all(shard_dim(state) is not None for state in experts.values())
        moved = [c for c in program.collectives() if "proj" in c.change]
        assert not moved, "the weights of the experts move"


def test_the_residual_stream_is_split_along_the_sequence() -> None:
    """Sums, and the norms between them, run on a share of the tokens."""
    program = planned("llama", 3)[SEQUENCE]
    states = [
        program.decisions.state(node)
        for node in program.serial.graph.nodes
        if node.target == torch.ops.aten.add.Tensor
        and tuple(node.meta["val"].shape) == (1, TOKENS, HIDDEN)
    ]
    assert states == ["S(1)"] * 6
    memory = {
        mode: planned("llama", 3)[mode].memory(inner="aot_eager") for mode in (TENSOR, SEQUENCE)
    }
    assert memory[SEQUENCE].activations < memory[TENSOR].activations


@pytest.mark.parametrize("sequence", [TENSOR, SEQUENCE])
def test_neighbouring_projections_share_one_copy(sequence: bool) -> None:
    """q, k and v read one gathered tensor, as gate and up do: one summed gradient."""
    program = planned("llama", 2)[sequence]
    read: dict[Any, list[str]] = {}
    for node in program.graph_module.graph.nodes:
        if node.target == torch.ops.aten.linear.default:
            read.setdefault(node.args[0], []).append(node.meta["custom"][MODULE])
    groups = sorted(sorted(m.rpartition(".")[2] for m in users) for users in read.values())
    assert groups.count(["k_proj", "q_proj", "v_proj"]) == 2
    assert groups.count(["gate_proj", "up_proj"]) == 2
    for source, users in read.items():
        if len(users) > 1:
            assert source.target is redistribute and source.args[2] == "R"


def test_logits_beside_a_loss_stay_split_and_cost_nothing() -> None:
    program = planned("llama", 2)[TENSOR]
    assert program.decisions.outputs[1] == "S(2)"
    assert all(c.bytes < LOGITS for c in program.collectives())


def test_logits_without_a_loss_are_gathered_at_most_once() -> None:
    """By the graph, or by their reader where they leave it split."""
    program = planned("llama", 2, loss=False)[TENSOR]
    (state,) = program.decisions.outputs
    gathered = [(c.phase, c.op) for c in program.collectives() if c.bytes >= LOGITS]
    assert gathered == ([("forward", "all_gather")] if state == "I" else [])


def test_replicated_outputs_are_gathered_in_the_graph() -> None:
    with torch.device("meta"):
        model = LanguageModel(_LLAMA(num_hidden_layers=1), loss=False)
    ids = torch.zeros(1, 512, dtype=torch.long, device="meta")
    options = {"mesh": {"tp": N_RANKS}, "hardware": "h100", "outputs": "replicate"}
    (program,), _ = programs(model, (ids,), [options])
    assert program.decisions.outputs == ["I"]
    gathered = [c for c in program.collectives() if c.bytes == 512 * 32000 * 4]
    assert [(c.phase, c.op) for c in gathered] == [("forward", "all_gather")]
