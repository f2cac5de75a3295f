"""The models of the replay, by name: small ones of its own, which trace in a tenth of the time, and
those of the suite, on the meta device where no value counts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model_case import HIDDEN, LAYERS, SEQ, VOCAB, Batch, Case, floats, ids, returned_loss, tokens
from models import CASES
from models_dropout import dropped
from models_hf import hf, llama
from models_plain import Gated, Mixture

#: Models whose batch has values that a trace reads: padding.
WITH_VALUES = ("bert", "roberta")


@dataclass(frozen=True)
class Replayed:
    """A model and the keywords of one call. served: without gradients."""

    model: nn.Module
    batch: dict[str, Any]
    served: bool = False


def replayed(name: str) -> Replayed:
    """The model of that name and its call, made anew."""
    if name in _SERVED:
        return _SERVED[name]()
    case = _CASES.get(name) or CASES[name]
    batch = case.make_batch(0)
    with torch.device("cpu" if name in WITH_VALUES else "meta"):
        model = case.make_model()
    if name.startswith("gpt2"):
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # a warning breaks the graph
    if name not in WITH_VALUES:
        batch = {key: value.to("meta") for key, value in batch.items()}
    return Replayed(model, batch)


class Layer(nn.Module):
    """Causal attention and a gated MLP, with the norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        parts = (p(normed).unflatten(-1, (self.heads, -1)) for p in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        y: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return y


class Decoder(nn.Module):
    """A language model of few operators. again: layers are computed again in backward."""

    def __init__(
        self, layers: int = 1, width: int = HIDDEN, heads: int = 4, again: bool = False
    ) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Squares(nn.Module):
    """The mean of the squares of what a body makes of rows."""

    def __init__(self, body: nn.Module, flat: bool = False) -> None:
        super().__init__()
        self.body, self.flat = body, flat

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x.flatten(0, 1) if self.flat else x).square().mean()
        return y


def _routed() -> nn.Module:
    return Squares(Mixture(hidden=HIDDEN, inner=HIDDEN), flat=True)


def _rows(step: int) -> Batch:
    return {"x": floats(step, SEQ, HIDDEN)}


def _long(step: int) -> Batch:
    text = torch.zeros(2, 512, dtype=torch.long)
    return {"input_ids": text, "labels": text}


def _short(step: int) -> Batch:
    text = ids(step, length=8)
    return {"input_ids": text, "labels": text.clone()}


def _prompt() -> Replayed:
    with torch.device("meta"):
        model = llama(num_hidden_layers=1)().eval().requires_grad_(False)
    return Replayed(model, {"input_ids": ids(0).to("meta")}, served=True)


def _step_of_decoding() -> Replayed:
    """One more token, after a cache of eight."""
    from transformers import DynamicCache

    torch.manual_seed(0)
    model: Any = llama(num_hidden_layers=1)().eval().requires_grad_(False)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids(0)[:, :8], past_key_values=cache, use_cache=True)
    batch = {"input_ids": ids(0)[:, 8:9], "past_key_values": cache, "use_cache": True}
    return Replayed(model, batch, served=True)


_SERVED: dict[str, Callable[[], Replayed]] = {
    "prompt": _prompt,
    "decoding": _step_of_decoding,
}


def _shallow(case: Case) -> Case:
    """A case of the suite with one layer."""
    names = "num_hidden_layers n_layer num_layers encoder_layers decoder_layers".split()
    known = [name for name in names if name in getattr(case.build, "keywords", {})]
    assert known, case.name
    build = functools.partial(case.build, **dict.fromkeys(known, 1))
    return dataclasses.replace(case, build=build)


def _decoder(name: str, batch: Callable[[int], Batch] = tokens, **options: Any) -> Case:
    return Case(name, functools.partial(Decoder, **options), batch, returned_loss)


_MAMBA = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 8}
_CASES: dict[str, Case] = {
    "decoder": _decoder("decoder"),
    "gated": Case("gated", lambda: Squares(Gated(HIDDEN)), _rows, returned_loss),
    "lowered": _decoder("lowered"),
    "checkpointed": _decoder("checkpointed", again=True),
    "layers": _decoder("layers", layers=2),
    "wide": _decoder("wide", _long, width=256),
    "routed": Case("routed", _routed, _rows, returned_loss),
    "mamba": Case("mamba", hf("MambaForCausalLM", "MambaConfig", **_MAMBA), _short),
    "gpt2_dropout": dropped("gpt2"),
}
_CASES |= {
    f"{name}_1": _shallow(_CASES.get(name) or CASES[name])
    for name in "llama gpt2_dropout bert t5 vit mamba".split()
}
