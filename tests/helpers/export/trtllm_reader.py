"""A TensorRT-LLM checkpoint computed in plain PyTorch, as TensorRT-LLM's classes would compute it.

What is known here is what its model classes do with config.json and with the tensors of each rank;
nothing of how a checkpoint is made. Ranks are computed one after the other, their partial results
summed as its all-reduces would.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]

FIXED_EPS = ("OPTForCausalLM", "BloomForCausalLM", "GPTNeoXForCausalLM")


class Reading(Tensors):
    """Tensors whose names begin with `prefix`, without it; `read` has those that were asked for."""

    def __init__(self, tensors: Tensors, read: set[str], prefix: str = "") -> None:
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        super().__init__(own)
        self.read, self.prefix = read, prefix

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(self.prefix + name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default


class UnreadTensors(Exception):
    """The files hold tensors that a model of this configuration does not read."""


def logits(config: dict[str, Any], ranks: list[Tensors], ids: Tensor) -> Tensor:
    """[tokens, vocab] of one sequence of token ids. Each stage reads all that its files hold."""
    model = _Model(config, ranks)
    found = model.run(ids)
    for stage, read in zip(model.stages, model.read, strict=True):
        if any(rank.keys() - read for rank in stage):
            raise UnreadTensors
    return found


class _Model:
    def __init__(self, config: dict[str, Any], ranks: list[Tensors]) -> None:
        self.config, mapping = config, config["mapping"]
        self.tp, self.pp = mapping["tp_size"], mapping["pp_size"]
        assert len(ranks) == self.tp * self.pp == mapping["world_size"]
        self.read: list[set[str]] = [set() for _ in range(self.pp)]
        self.stages = [
            [Reading(rank, read) for rank in ranks[i * self.tp : (i + 1) * self.tp]]
            for i, read in enumerate(self.read)
        ]
        self.arch: str = config["architecture"]
        self.eps = 1e-5 if self.arch in FIXED_EPS else config["norm_epsilon"]
        self.gemma = self.arch.startswith("Gemma")
        self.qwen: str = config.get("qwen_type", "")

    def run(self, ids: Tensor) -> Tensor:
        first, last = self.stages[0], self.stages[-1]
        x = self.embed(first, ids)
        if self.gemma:
            x = x * math.sqrt(self.config["hidden_size"])
        if "transformer.position_embedding.weight" in first[0]:
            x = x + first[0]["transformer.position_embedding.weight"][: len(ids)]
        if self.arch == "BloomForCausalLM":
            x = self.norm(first[0], "transformer.ln_embed", x)
        count = self.config["num_hidden_layers"] // self.pp
        for i in range(self.config["num_hidden_layers"]):
            start = f"transformer.layers.{i % count}."
            ranks = [Reading(rank, rank.read, start) for rank in self.stages[i // count]]
            x = self.layer(i, ranks, x)
        eps = 1e-5 if self.arch == "GPTJForCausalLM" else None
        x = self.norm(last[0], "transformer.ln_f", x, eps)
        shared = self.config["share_embedding_table"]
        head = "transformer.vocab_embedding" if shared else "lm_head"
        result = torch.cat([self.linear(rank, head, x) for rank in last], -1)
        cap = self.config.get("final_logit_softcapping")
        result = result if cap is None else cap * torch.tanh(result / cap)
        return result[:, : self.config["vocab_size"]]

    def embed(self, ranks: list[Tensors], ids: Tensor) -> Tensor:
        tables = [rank["transformer.vocab_embedding.weight"] for rank in ranks]
        if not self.config["use_parallel_embedding"]:
            return tables[0][ids]
        size = -(-self.config["vocab_size"] // self.tp)
        assert all(len(table) == size for table in tables)
        return torch.cat(tables)[ids]

    def layer(self, i: int, ranks: list[Tensors], x: Tensor) -> Tensor:
        h = self.norm(ranks[0], "input_layernorm", x)
        attended = sum(self.attention(i, r, rank, h) for r, rank in enumerate(ranks))
        attended = attended + ranks[0].get("attention.dense.bias", 0.0)
        if self.arch in ("GPTJForCausalLM", "GPTNeoXForCausalLM"):
            name = "post_attention_layernorm"
            both = h if self.arch == "GPTJForCausalLM" else self.norm(ranks[0], name, x)
            # GPT-J sums its ranks after the bias of each, GPT-NeoX before the one of all
            return x + attended + self.mlp(ranks, both, every_bias=self.arch == "GPTJForCausalLM")
        if self.config.get("parallel_attention"):
            two = "mlp_layernorm.weight" in ranks[0]
            both = self.norm(ranks[0], "mlp_layernorm", x) if two else h
            return x + attended + self.mlp(ranks, both)
        if self.config.get("inter_layernorms"):
            x = x + self.norm(ranks[0], "post_layernorm", attended)
            h = self.norm(ranks[0], "pre_feedforward_layernorm", x)
            return x + self.norm(ranks[0], "post_feedforward_layernorm", self.mlp(ranks, h))
        x = x + attended
        return x + self.mlp(ranks, self.norm(ranks[0], "post_layernorm", x))

    def attention(self, i: int, r: int, rank: Tensors, x: Tensor) -> Tensor:
        config = self.config
        dim, heads = config["head_size"], config["num_attention_heads"] // self.tp
        kv = -(-config["num_key_value_heads"] // self.tp)
        qkv = self.linear(rank, "attention.qkv", x).view(len(x), heads + 2 * kv, dim)
        q, k, v = qkv.split([heads, kv, kv], 1)
        if self.qwen in ("qwen3", "qwen3_moe") or self.arch == "Gemma3ForCausalLM":
            # the class gives this norm no eps: its default
            q = self.norm(rank, "attention.q_layernorm", q, 1e-5)
            k = self.norm(rank, "attention.k_layernorm", k, 1e-5)
        local = False
        if self.arch == "Gemma3ForCausalLM":
            local = bool((i + 1) % config["_sliding_window_pattern"])
        kind = config["position_embedding_type"]
        if kind.startswith(("rope", "long_rope")):
            q, k = self.turn(q, local), self.turn(k, local)
        scale = 1 / math.sqrt(dim)
        if "query_pre_attn_scalar" in config:
            scale /= math.sqrt(config["query_pre_attn_scalar"]) / math.sqrt(dim)
        k, v = (one.repeat_interleave(heads // kv, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        cap = config.get("attn_logit_softcapping")
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        back = torch.arange(len(x)).unsqueeze(1) - torch.arange(len(x))
        if kind == "alibi":
            slopes = alibi_slopes(config["num_attention_heads"])[r * heads : (r + 1) * heads]
            scores = scores - slopes.view(-1, 1, 1) * back
        # windows are given to the runtime, a list of one a layer
        windows = config.get("windows", [len(x)] * config["num_hidden_layers"])
        scores = scores.masked_fill((back < 0) | (back >= windows[i]), -torch.inf)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return y @ rank["attention.dense.weight"].t()

    def turn(self, x: Tensor, local: bool) -> Tensor:
        config = self.config
        size = config.get("rotary_dim") or int(config["head_size"] * config.get("rotary_pct", 1.0))
        base = config["rope_local_base_freq"] if local else config["rotary_base"]
        inverse, magnitude = angles(config, base, size)
        turned = torch.arange(len(x), dtype=torch.float64).unsqueeze(1) * inverse
        cos, sin = (part.float().unsqueeze(1) * magnitude for part in (turned.cos(), turned.sin()))
        part, rest = x[..., :size], x[..., size:]
        if config["position_embedding_type"] == "rope_gptj":
            a, b = part[..., ::2], part[..., 1::2]
            part = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = part.chunk(2, -1)
            part = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([part, rest], -1)

    def mlp(self, ranks: list[Tensors], x: Tensor, every_bias: bool = False) -> Tensor:
        act = self.config["hidden_act"]
        if "mlp.router.weight" in ranks[0]:
            result = sum(self.experts(rank, x) for rank in ranks)
            if "mlp.shared_expert.fc.weight" in ranks[0]:
                gate = torch.sigmoid(self.linear(ranks[0], "mlp.shared_expert_gate", x))
                for rank in ranks:
                    up = activate(act, self.linear(rank, "mlp.shared_expert.fc", x))
                    result = result + gate * self.linear(rank, "mlp.shared_expert.proj", up)
            return result
        result = torch.zeros_like(x)
        for rank in ranks:
            up = activate(act, self.linear(rank, "mlp.fc", x))
            if "mlp.gate.weight" in rank:
                up = up * self.linear(rank, "mlp.gate", x)
            result = result + up @ rank["mlp.proj.weight"].t()
            if every_bias:
                result = result + rank["mlp.proj.bias"]
        return result if every_bias else result + ranks[0].get("mlp.proj.bias", 0.0)

    def experts(self, rank: Tensors, x: Tensor) -> Tensor:
        moe = self.config["moe"]
        weights = (x @ rank["mlp.router.weight"].t()).softmax(-1)
        top, chosen = weights.topk(moe["top_k"], -1)
        if moe["normalization_mode"] == 1:
            top = top / top.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for t in range(len(x)):
            for weight, e in zip(top[t], chosen[t].tolist()):
                up = activate(self.config["hidden_act"], rank["mlp.fc.weight"][e] @ x[t])
                result[t] += weight * (rank["mlp.proj.weight"][e] @ up)
        return result

    def norm(self, rank: Tensors, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        weight, eps = rank[f"{name}.weight"], self.eps if eps is None else eps
        if f"{name}.bias" in rank:
            return F.layer_norm(x, (x.shape[-1],), weight, rank[f"{name}.bias"], eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def linear(self, rank: Tensors, name: str, x: Tensor) -> Tensor:
        return F.linear(x, rank[f"{name}.weight"], rank.get(f"{name}.bias"))


def activate(name: str, x: Tensor) -> Tensor:
    """Every gelu is the one by tanh; swiglu gates its first half by its second."""
    if name == "swiglu":
        up, gate = x.chunk(2, -1)
        return F.silu(gate) * up
    if "gelu" in name:
        return F.gelu(x, approximate="tanh")
    return {"silu": F.silu, "relu": F.relu}[name](x)


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8/n), 2^(-16/n), ... for n heads; other numbers take every second of 2n for the rest."""
    n = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-8 * i / (2 * n)) for i in range(1, 2 * (heads - n), 2)]
    return torch.tensor(slopes)


def angles(config: dict[str, Any], base: float, size: int) -> tuple[Tensor, float]:
    """(angle a position of each pair, what cos and sin are multiplied by)."""
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    if config["position_embedding_type"] == "long_rope":
        original = config["original_max_position_embeddings"]
        longer = config["max_position_embeddings"] / original
        factors = torch.tensor(config["longrope_scaling_short_factors"], dtype=torch.float64)
        return plain / factors, math.sqrt(1 + math.log(longer) / math.log(original))
    scaling = config.get("rotary_scaling")
    if scaling is None:
        return plain, 1.0
    kind, factor = scaling.get("type", scaling.get("rope_type")), scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    assert kind == "yarn"
    length = scaling.get("original_max_position_embeddings", 4096)

    def edge(rotations: float) -> float:
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(edge(scaling.get("beta_fast", 32.0))))
    high = min(size - 1, math.ceil(edge(scaling.get("beta_slow", 1.0))))
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)

    def multiplier(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over = multiplier(scaling.get("mscale", 1.0)) / multiplier(scaling.get("mscale_all_dim", 0.0))
    return plain / factor * ramp + plain * (1 - ramp), over
