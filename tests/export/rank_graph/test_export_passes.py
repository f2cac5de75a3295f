"""The golden text of every pass of export, what passes say they declined, and the page of all."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.export import EngineSpec
from autoshard.export.rank_graph.attention_forms import FuseWritten
from autoshard.export.rank_graph.plan import PIPELINE, plan_inference, rewrite
from autoshard.export.rank_graph.traced_model import all_experts
from autoshard.passes import pipeline
from autoshard.runtime.collectives import Axis
from golden_text import golden

EVERY = [one for stage in PIPELINE for one in stage.passes]


class Attention(nn.Module):
    """One head of a rank: causal, or to a window of the last tokens with a cap of its scores."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        back = torch.arange(16)[:, None] - torch.arange(16)
        self.register_buffer("seen", (back >= 0) & (back < (window or 16)))
        self.window = window

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        y = x if y is None else y
        one, three = (self.qkv(each).unflatten(-1, (2, 12)).transpose(1, 2) for each in (x, y))
        q, (k, v) = one[..., :4], (three[..., 4:8], three[..., 8:])
        if y is not x:
            z = F.scaled_dot_product_attention(q, k, v)
        elif self.window is None:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.tanh(q @ k.transpose(-1, -2) / 60) * 30
            seen = self.seen[: x.shape[1], : x.shape[1]]
            z = torch.where(seen, scores, float("-inf")).softmax(-1) @ v
        made: torch.Tensor = self.out(z.transpose(1, 2).flatten(2))
        return made


class Text(nn.Module):
    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.attention, self.head = Attention(window), nn.Linear(8, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.place(positions)
        y: torch.Tensor = self.head(x + self.attention(x))
        return y


class Translator(Text):
    def __init__(self) -> None:
        super().__init__()
        self.cross = Attention()

    def forward(self, x: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        source = self.embed(x).relu()
        y = self.embed(decoder_input_ids)
        y = y + self.attention(y)
        said: torch.Tensor = self.head(y + self.cross(y, source))
        return said


class Experts(nn.Module):
    """A token chooses one of 64 experts by its own number; of large ones few are read then."""

    has_gate = has_bias = has_post_expert_norm = is_transposed = False
    act_fn = staticmethod(torch.relu)

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(64, 4096, 4096, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(64, 4096, 4096, device="meta"))
        self.embed = nn.Embedding(64, 4096, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, chosen = self.embed(ids).flatten(0, 1), ids.flatten().unsqueeze(1)
        weights = torch.ones_like(chosen, dtype=x.dtype)
        return all_experts(self, x, chosen, weights).view(*ids.shape, -1)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(self.embed(ids))
        return y


IDS = torch.zeros(2, 8, dtype=torch.int64)
DYNAMIC = {"batch": (1, 2, 4), "sequence": (1, 4, 8)}

# what shows a pass: model, names of its inputs, options; and of which of its two graphs
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Any]]] = {
    "cached": (Text, ("ids",), {"max_length": 16}),
    "window": (lambda: Text(3), ("ids",), {}),
    "translator": (Translator, ("x", "decoder_input_ids"), {"max_length": 16}),
    "experts": (Experts, ("ids",), {"mesh": {"tp": 1}, "dynamic": {}}),
    "quantized": (Wide, ("ids",), {"quantize": "fp8"}),
}
SAMPLES = {
    "reduce_to_core": "cached",
    "name_placeholders": "window",
    "tidy": "cached",
    "split_encoder": "translator",
    "fuse_written": "window",
    "plain_attention": "cached",
    "write_masks": "window",
    "with_cache": "cached",
    "keep_last_tokens": "cached",
    "run_cheaper_rows": "experts",
    "expand_attention": "window",
    "drop_unread": "window",
    "quantize_weights": "quantized",
}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """Reads what AUTOSHARD_DUMP wrote of a pass's sample: (pass, before or after)."""

    @functools.cache
    def folder(model: str) -> tuple[Path, Mapping[str, str]]:
        make, names, options = MODELS[model]
        spec = EngineSpec(
            example=((), dict.fromkeys(names, IDS)),
            **{"mesh": {"tp": 2}, "dynamic": DYNAMIC, **options},
        )
        path = tmp_path_factory.mktemp(model)
        torch.compiler.reset()
        plan = plan_inference(make(), spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTOSHARD_DUMP", str(path))
            plan.rank_graph(0)
        return path, plan.sizes

    def read(name: str, side: str) -> str:
        path, sizes = folder(SAMPLES[name])
        (file,) = path.glob(f"*-{name}.rank0.{side}.txt")
        text = re.sub(r" +# .*", "", file.read_text())
        for symbol, size in sizes.items():
            text = re.sub(rf"\b{symbol}\b", size[0], text)
        return text

    return read


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_text_of_each_pass(name: str, dumped: Callable[[str, str], str]) -> None:
    before, after = (dumped(name, side) for side in ("before", "after"))
    assert before != after, "the sample does not show what the pass does"
    golden(f"export/{name}", f"{before}\n--- {name}\n\n{after}")


def test_every_pass_has_its_golden_text() -> None:
    assert list(SAMPLES) == [one.name for one in EVERY]


def said(one: Any) -> str:
    """The line of the module's text that says what a pass does."""
    text = sys.modules[one.__module__].__doc__ or ""
    (found,) = re.findall(rf"(?:^|\n){one.name}: (.+?)\.(?:\s|$)", text, re.DOTALL)
    assert "before" in text and ("after" in text or one.name == "split_encoder")
    return " ".join(found.split())


@pytest.mark.parametrize("one", EVERY)
def test_every_pass_keeps_the_contract(one: Any) -> None:
    assert one.__dataclass_params__.frozen and isinstance(one.optional, bool)
    assert list(inspect.signature(one.rewrite).parameters) == ["self", "gm", "ctx", "report"]
    source = inspect.getsource(sys.modules[one.__module__])
    for call in (".recompile(", ".lint(", "os.environ", "print("):
        assert call not in source or one.name == "reduce_to_core", f"{call} is not a pass's"


def test_one_page_shows_every_pass_in_order() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how_it_works.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert rows == [
        (one.name, stage.name, said(one))
        for stages in (pipeline.PIPELINE, PIPELINE)
        for stage in stages
        for one in stage.passes
    ]


def test_a_pass_says_where_it_declined() -> None:
    gm = make_fx(lambda x: x.softmax(0), tracing_mode="fake")(torch.ones(4, 4))
    (report,) = rewrite(gm, [FuseWritten()], Axis("tp", 1, 0, ""))
    assert report.hits == 0 and [skip.node for skip in report.skips] == ["_softmax"]
    assert "dim 0, not the last" in str(report)
