"""Small decoders whose tokens know their place, or each other, in ways of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, ROWS = 64, 32, 4, 48


class Decoder(nn.Module):
    """Plain attention and an MLP, without positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.make()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def make(self) -> None:
        """Parameters and buffers of its own."""

    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        """What the embedded tokens become."""
        return x

    def turn(self, x: Tensor) -> Tensor:
        """Query or key, [batch, heads, tokens, dim]."""
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.begin(ids, self.embed(ids))
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(self.attend(self.turn(q), self.turn(k), v).transpose(1, 2).flatten(2))
        return self.head(x + self.down(torch.relu(self.up(x))))


class RotaryTable(Decoder):
    def make(self) -> None:
        angles = torch.outer(torch.arange(ROWS), 0.5 ** torch.arange(WIDTH // HEADS // 2))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        a, b = x.chunk(2, -1)
        return x * self.cos[:length] + torch.cat([-b, a], -1) * self.sin[:length]


class LearnedSlice(Decoder):
    def make(self) -> None:
        self.place = nn.Parameter(torch.zeros(1, ROWS, WIDTH))

    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.place[:, : ids.shape[1]]


class WeightSlice(Decoder):
    def make(self) -> None:
        self.place = nn.Embedding(ROWS, WIDTH)

    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.place.weight[: ids.shape[1]]


class NormedSlice(WeightSlice):
    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + torch.tanh(F.layer_norm(self.place.weight[1 : ids.shape[1] + 1], (WIDTH,)))


class IdsBuffer(WeightSlice):
    def make(self) -> None:
        super().make()
        self.register_buffer("ids", torch.arange(ROWS).flip(0).unsqueeze(0))

    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.place(self.ids[:, : ids.shape[1]])


class Vector(WeightSlice):
    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.place(torch.arange(ids.shape[1], device=ids.device))


class Counted(WeightSlice):
    """As OPT counts: a cumulative sum over a mask of ones, and an offset."""

    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.place(torch.ones_like(ids).cumsum(1) * 1 + 1)


class EveryRow(WeightSlice):
    """Positions of [batch, tokens], joined and taken apart again."""

    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        rows, length = ids.shape
        place = torch.arange(length, device=ids.device).expand(rows, length).reshape(-1)
        return (x.reshape(-1, WIDTH) + self.place(place)).view(rows, length, WIDTH)


class TokenShift(Decoder):
    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class Mean(Decoder):
    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class CausalConvolution(Decoder):
    def make(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class PrefixSum(Decoder):
    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + torch.cumsum(x, 1)


class LinearAttention(Decoder):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = super().attend(q, k, v)
        return past + q * torch.cumsum(torch.relu(k) * v, 2)


class Alibi(Decoder):
    def make(self) -> None:
        far = torch.arange(ROWS).view(1, -1) - torch.arange(ROWS).view(-1, 1)
        slopes = 0.5 ** torch.arange(1, HEADS + 1).view(-1, 1, 1)
        bias = (far * slopes).masked_fill(far > 0, float("-inf"))
        self.register_buffer("bias", bias.unsqueeze(0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        return F.scaled_dot_product_attention(q, k, v, self.bias[:, :, :length, :length])


class LearnedDistances(Decoder):
    """A row for each distance up to 9, as T5 has them, below a mask of minus infinity."""

    def make(self) -> None:
        self.far = nn.Embedding(10, HEADS)

    def places(self, length: int) -> Tensor:
        at = torch.arange(length)
        return (at.unsqueeze(1) - at).clamp(0, 9)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        bias = self.far(self.places(length)).permute(2, 0, 1).unsqueeze(0)
        hidden = torch.full((length, length), float("-inf"), device=q.device).triu(1)
        return F.scaled_dot_product_attention(q, k, v, bias + hidden)


class LearnedPairs(LearnedDistances):
    """A row for each pair of places, which is no distance."""

    def places(self, length: int) -> Tensor:
        at = torch.arange(length)
        return (at.unsqueeze(1) * at) % 10


class OwnAttention(Decoder):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~ones.tril(), float("-inf"))
        return super().attend(q, k, v) + scores.softmax(-1) @ v


class ByLength(Decoder):
    def turn(self, x: Tensor) -> Tensor:
        return x * (1 + x.shape[2] / 8)


class FromTheEnd(WeightSlice):
    def begin(self, ids: Tensor, x: Tensor) -> Tensor:
        length = ids.shape[1]
        return x + self.place(length - 1 - torch.arange(length, device=ids.device))


RIGHT = (
    *(RotaryTable, LearnedSlice, WeightSlice, NormedSlice, IdsBuffer, Vector, Counted, EveryRow),
    *(Alibi, LearnedDistances, OwnAttention),
)
REFUSED = {
    TokenShift: "takes a part of the sequence|may look at others|joins tokens",
    Mean: "goes over all tokens",
    CausalConvolution: "may look at others|joins tokens",
    PrefixSum: "goes over all tokens",
    LinearAttention: "goes over all tokens",
    LearnedPairs: "another mask",
    ByLength: "computes with the number of tokens",
    FromTheEnd: "depends on how many tokens there are",
}
