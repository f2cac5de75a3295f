"""recover_masks: attention with a dense mask becomes the attention that the mask means.

    before                                          after
    %q: f32[2,4,32,8]                               %q: f32[2,4,32,8]
    %k: f32[2,2,32,8]                               %k: f32[2,2,32,8]
    %v: f32[2,2,32,8]                               %v: f32[2,2,32,8]
    %0: i64[32] = arange(32)                        %0: f32[2,4,32,8] =
    %1: i64[32,1] = unsqueeze(%0, 1)                    scaled_dot_product_attention(%q, %k, %v,
    %2: bool[32,32] = le(%0, %1)                        is_causal=True, enable_gqa=True)
    %3: f32[2,2,1,32,8] = unsqueeze(%k, 2)
    %4: f32[2,2,2,32,8] = expand(%3, [2,2,2,32,8])
    %5: f32[2,4,32,8] = reshape(%4, [2,4,32,8])
    ... the same for %v ...
    %9: f32[2,4,32,8] =
        scaled_dot_product_attention(%q, %5, %8, %2)

- A mask that sizes alone decide is followed to the indices that it compares (index_functions.py).
  Where it is proven to let through the keys up to each query's own, it becomes `is_causal`; where
  it lets through all, it goes. So fused kernels that take no mask run, and no S x S tensor exists.
- Then repeated key and value heads become the heads they repeat, as eager models have it: kernels
  that take no mask take grouped heads, except the one of 32-bit floats on a GPU.

The proof is of every entry, for every value of symbolic sizes. A window counts as causal where no
query has more keys before it.

What is known of the values of inputs (`facts`) counts too; `meta[FACTS]` says which of it the
graph then depends on.

Not done: any other mask stays as it is; why is in `meta[ATTENTION_MASKS]`, for `explain`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Report, user_line
from autoshard.passes.index_functions import IndexFunctions, NotIndexed, input_name
from autoshard.passes.index_values import Affine, Condition, Value, affine, flipped
from autoshard.planning import Size, same
from autoshard.runtime.graph_meta import ATTENTION_MASKS, DIFF, FACTS

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

CAUSAL, EVERYTHING = "causal", "none"

ONES, POSITIONS = "ones", "positions"
"""What may be known of an input: each element is 1; along the last dim it is 0, 1, 2, ..."""

_SAID = {ONES: "all ones", POSITIONS: "positions that count up"}


class MaskFound(NamedTuple):
    """What an attention's mask was found to be: CAUSAL, EVERYTHING, or "dense" as it came.

    where: the user's line that made the mask or, of a dense one, what is not proven of it.
    """

    meaning: str
    reason: str
    where: str


@dataclass(frozen=True)
class RecoverMasks:
    """See the module's text.

    facts: (index of a placeholder, ONES or POSITIONS), of the calls that the graph is for.
    """

    facts: tuple[tuple[int, str], ...] = ()

    name: ClassVar[str] = "recover_masks"
    optional: ClassVar[bool] = True

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite `gm.graph` in place."""
        report, masks = Report(self.name), _Masks(gm, dict(self.facts))
        found: Counter[MaskFound] = Counter()
        for node in gm.graph.find_nodes(op="call_function", target=_ATTENTION):
            given = {**dict(zip(_NAMES, node.args)), **node.kwargs}
            mask = given.get("attn_mask")
            if not isinstance(mask, fx.Node):
                continue
            what = masks.meaning(mask)
            found[what] += 1
            if what.meaning not in (CAUSAL, EVERYTHING):
                report.skip(node, what.reason)
                continue
            del given["attn_mask"]
            if what.meaning == CAUSAL:
                given["is_causal"] = True
            _ungroup(given)
            node.args = tuple(given.pop(name) for name in _NAMES[:3])
            node.kwargs = {name: value for name, value in given.items() if value}
            report.hits += 1
        gm.graph.eliminate_dead_code()
        gm.meta[ATTENTION_MASKS], gm.meta[FACTS] = found, masks.used
        return report


class _Masks:
    """The masks of one graph; `used`: the facts without which some would stay dense."""

    def __init__(self, gm: fx.GraphModule, facts: dict[int, str]) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.facts = {placeholders[index]: (index, fact) for index, fact in facts.items()}
        self.used: dict[int, str] = {}
        self.always = IndexFunctions()
        known = {node: _function(node, fact) for node, (_, fact) in self.facts.items()}
        self.now = IndexFunctions(known)

    def meaning(self, mask: fx.Node) -> MaskFound:
        found = self._found(mask, self.always)
        if found.meaning in (CAUSAL, EVERYTHING) or not self.facts:
            return found
        now = self._found(mask, self.now)
        if now.meaning not in (CAUSAL, EVERYTHING):
            return now
        needed = [(node, *self.facts[node]) for node in _inputs(mask) if node in self.facts]
        self.used.update({index: fact for _, index, fact in needed})
        said = " and ".join(f"{input_name(node)} is {_SAID[fact]}" for node, _, fact in needed)
        return now._replace(reason=f"{now.reason}, where {said}: checked at each call")

    def _found(self, mask: fx.Node, functions: IndexFunctions) -> MaskFound:
        line = user_line(mask)
        if mask.meta.get(DIFF):
            return MaskFound("dense", "a gradient flows to it", line)
        try:
            meaning, reason = proven(functions.of(mask), mask.meta["val"])
        except NotIndexed as unknown:
            return MaskFound("dense", str(unknown), user_line(unknown.node) or line)
        return MaskFound(meaning, reason, line)


def _function(node: fx.Node, fact: str) -> Value:
    shape = node.meta["val"].shape
    if fact == ONES:
        return Affine(1, (0,) * len(shape))
    return affine(0, [0] * (len(shape) - 1) + [1], shape)


def _inputs(mask: fx.Node) -> list[fx.Node]:
    """The placeholders that a value is made of, in the order of the graph."""
    seen, todo = {mask}, [mask]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in seen]
        seen.update(new)
        todo += new
    return [n for n in mask.graph.find_nodes(op="placeholder") if n in seen]


def proven(value: Value, mask: torch.Tensor) -> tuple[str, str]:
    """(CAUSAL, EVERYTHING or "dense", why) of a mask with these values; of `mask`, the shape and
    the dtype count."""
    shuts = [False] if mask.dtype == torch.bool else [torch.finfo(mask.dtype).min, -torch.inf]
    opens = mask.dtype == torch.bool  # True, or 0.0
    if isinstance(value, Affine):
        if value.constant and value.offset == opens:
            return EVERYTHING, "it hides nothing"
        return "dense", f"every entry is {value.offset}"
    if value.no == opens:
        value = flipped(value)
    if value.yes != opens or value.no not in shuts:
        return "dense", f"its entries are {value.yes} and {value.no}"
    if mask.dim() < 2 or not same(mask.shape[-1], mask.shape[-2]):
        return "dense", f"its last dims are {' x '.join(map(str, mask.shape[-2:]))}, not equal"
    size = mask.shape[-1]
    for condition in value.conditions:
        if any(condition.left.slopes[:-2]):
            return "dense", "it differs by head or by sequence"
        if not _on_past(condition, size):
            return "dense", _limit(condition, size)
    if any(_never_on_future(condition, size) for condition in value.conditions):
        return CAUSAL, "it lets through the keys up to each query's own"
    if all(_everywhere(condition, size) for condition in value.conditions):
        return EVERYTHING, "it hides nothing"
    return "dense", "it hides some of the keys after each query's own"


# A condition is affine in (query, key), so its extremes over a triangle are at the corners.


def _on_past(condition: Condition, size: Size) -> bool:
    """Whether it holds at every 0 <= key <= query < size."""
    at, query, key = _parts(condition)
    if condition.equal:
        return at == query == key == 0
    if isinstance(size, int):
        last = size - 1
        return min(at, at + query * last, at + (query + key) * last) >= 0
    return min(at, query, query + key) >= 0


def _never_on_future(condition: Condition, size: Size) -> bool:
    """Whether it fails at every 0 <= query < key < size."""
    if condition.equal:
        return False
    at, query, key = _parts(condition)
    if isinstance(size, int):
        last = size - 1
        corners = [at + key, at + key * last, at + query * (last - 1) + key * last]
        return last == 0 or max(corners) < 0
    return at + key < 0 and key <= 0 and query + key <= 0


def _everywhere(condition: Condition, size: Size) -> bool:
    at, query, key = _parts(condition)
    if condition.equal or not isinstance(size, int):
        return at == query == key == 0 or (not condition.equal and min(at, query, key) >= 0)
    last = size - 1
    return at + min(0, query * last) + min(0, key * last) >= 0


def _parts(condition: Condition) -> tuple[Any, int, int]:
    return condition.left.offset, *condition.left.slopes[-2:]  # type: ignore[return-value]


def _limit(condition: Condition, size: Size) -> str:
    """Why a condition hides keys before a query's own."""
    at, query, key = _parts(condition)
    if not condition.equal and key > 0 and query == -key:
        window = at // key + 1
        if isinstance(size, int):
            return f"a window of {window} tokens is shorter than the sequence of {size}"
        return f"a window of {window} tokens, and the length of the sequence is symbolic"
    return "it hides keys before a query's own"


def _ungroup(given: dict[str, Any]) -> None:
    """Read the heads that keys and values repeat, where the kernels take grouped heads."""
    query = given["query"].meta["val"]
    if given.get("enable_gqa") or (query.is_cuda and query.dtype.itemsize > 2):
        return
    key, value = (unrepeated(given[name]) for name in ("key", "value"))
    if key is None or value is None or not same(_heads(key), _heads(value)):
        return
    given.update(key=key, value=value, enable_gqa=True)


def _heads(node: fx.Node) -> Size:
    heads: Size = node.meta["val"].shape[1]
    return heads


def unrepeated(node: Any) -> fx.Node | None:
    """The heads that `node`, [batch, heads, tokens, dim], repeats one beside the other; None where
    it is not seen to repeat any."""
    if node.target is not aten.reshape.default:
        return None
    wide = node.args[0]
    if wide.target is not aten.expand.default or wide.args[0].target is not aten.unsqueeze.default:
        return None
    narrow = wide.args[0]
    shape, before = wide.meta["val"].shape, narrow.meta["val"].shape
    if len(shape) != 5 or narrow.args[1] not in (2, -3):
        return None
    kept = all(same(shape[d], before[d]) for d in (0, 1, 3, 4))
    joined = (shape[0], shape[1] * shape[2], shape[3], shape[4])
    result = node.meta["val"].shape
    if not kept or len(result) != 4 or not all(map(same, result, joined)):
        return None
    source: fx.Node = narrow.args[0]
    return source
