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
- Where it is proven to let through, of those keys, the ones in a window, in the query's document,
  or that are no padding, attention becomes `autoshard::masked_attention`, which is given the window
  and a number or a boolean of each key.
- Then repeated key and value heads become the heads they repeat, as eager models have it: kernels
  that take no mask take grouped heads, except the one of 32-bit floats on a GPU.

The proof is of every entry, for every value of symbolic sizes (mask_meaning.py). A window counts as
causal where no query has more keys before it.

What is known of the values of inputs (`facts`) counts too; `meta[FACTS]` says which of it the
graph then depends on.

Not done: any other mask stays as it is, and so does one of ranges with dropout, or with what torch
has no kernel of many lengths for on a GPU, or of padding alone in sequences shorter than
`PADDING_FROM`; why is in `meta[ATTENTION_MASKS]`, for `explain`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, user_line
from autoshard.passes.lib.index_functions import IndexFunctions, NotIndexed, input_name
from autoshard.passes.lib.index_values import Affine, Value, affine
from autoshard.passes.lib.mask_meaning import CAUSAL, DENSE, EVERYTHING, Dense, Ranges, proven
from autoshard.planning import Size, inputs_of, same
from autoshard.runtime.graph_meta import ATTENTION_MASKS, DIFF, FACTS
from autoshard.runtime.masked_attention import MASKED_ATTENTION, WIDEST_HEAD

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

PADDING_FROM = 16_384
"""Keys from which attention that hides padding alone is quicker without its mask: nothing is spared
but the mask. A step on an H100 takes 1.42 of the mask's time with 4,096 keys, 0.90 with 16,384
(benchmarks/masked_attention.py --step); attention alone on a CPU 1.26 with 4,096."""

ONES, POSITIONS = "ones", "positions"
"""What may be known of an input: each element is 1; along the last dim it is 0, 1, 2, ..."""

_SAID = {ONES: "all ones", POSITIONS: "positions that count up"}


class MaskFound(NamedTuple):
    """What an attention's mask was found to be: CAUSAL, EVERYTHING, the name of `Ranges`, or DENSE
    as it came.

    where: the user's line that made the mask or, of a dense one, what is not proven of it.
    """

    meaning: str
    reason: str
    where: str


@dataclass(frozen=True)
class RecoverMasks(Pass, optional=True):
    """See the module's text.

    facts: (index of a placeholder, ONES or POSITIONS), of the calls that the graph is for. ranges:
    whether masks may become `MASKED_ATTENTION`, which no engine has.
    """

    facts: tuple[tuple[int, str], ...] = ()
    ranges: bool = True

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        masks = _Masks(gm, dict(self.facts))
        found: Counter[MaskFound] = Counter()
        for node in gm.graph.find_nodes(op="call_function", target=_ATTENTION):
            given = {**dict(zip(_NAMES, node.args)), **node.kwargs}
            mask = given.get("attn_mask")
            if not isinstance(mask, fx.Node):
                continue
            what, ranges = masks.meaning(mask)
            if ranges is not None and (reason := self._no_ranges(given, ranges)):
                what, ranges = what._replace(meaning=DENSE, reason=f"{what.reason}; {reason}"), None
            found[what] += 1
            if what.meaning == DENSE:
                report.skip(node, what.reason)
                continue
            del given["attn_mask"]
            if ranges is not None:
                _to_ranges(node, given, ranges)
            else:
                if what.meaning == CAUSAL:
                    given["is_causal"] = True
                _ungroup(given)
                node.args = tuple(given.pop(name) for name in _NAMES[:3])
                node.kwargs = {name: value for name, value in given.items() if value}
            report.hits += 1
        gm.graph.eliminate_dead_code()
        gm.meta[ATTENTION_MASKS], gm.meta[FACTS] = found, masks.used

    def _no_ranges(self, given: dict[str, Any], ranges: Ranges) -> str:
        """Why the attention keeps a mask of ranges."""
        query = given["query"].meta["val"]
        if not self.ranges:
            return "engines have no kernel of them"
        if given.get("dropout_p"):
            return "no kernel of them has dropout"
        if query.dim() != 4:
            return f"queries have {query.dim()} dims, not 4"
        keys = given["key"].meta["val"].shape[2]
        padding = ranges == Ranges(visible=ranges.visible)
        if padding and isinstance(keys, int) and keys < PADDING_FROM:
            return f"padding alone is quicker by the mask for fewer than {PADDING_FROM:,} keys"
        if query.device.type == "cuda":
            if query.dtype not in (torch.float16, torch.bfloat16):
                return f"no kernel of them takes {query.dtype}"
            widest = WIDEST_HEAD - (ranges.visible is not None)
            widths = [given[name].meta["val"].shape[3] for name in _NAMES[:3]]
            if not all(isinstance(width, int) and width <= widest for width in widths):
                return f"no kernel of them takes heads of {max(widths)}"
        return ""


def _to_ranges(node: fx.Node, given: dict[str, Any], ranges: Ranges) -> None:
    """Rewrite attention in place; `given`: its arguments but the mask."""
    _ungroup(given)
    make = maker(node, RecoverMasks.name)
    of_keys: list[fx.Node | None] = []
    with node.graph.inserting_before(node):
        for one in (ranges.documents, ranges.visible):
            while one is not None and (dims := one.meta["val"].dim()) < 4:
                # [keys] or [batch, keys] as [batch, 1, 1, keys]
                one = make(aten.unsqueeze.default, one, 0 if dims == 1 else 1)
            of_keys.append(one)
    node.target = MASKED_ATTENTION
    node.args = (*(given[name] for name in _NAMES[:3]), *of_keys, ranges.window)
    node.kwargs = {name: given[name] for name in ("scale", "enable_gqa") if given.get(name)}


class _Masks:
    """The masks of one graph; `used`: the facts without which some would stay dense."""

    def __init__(self, gm: fx.GraphModule, facts: dict[int, str]) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.facts = {placeholders[index]: (index, fact) for index, fact in facts.items()}
        self.used: dict[int, str] = {}
        self.always = IndexFunctions()
        known = {node: _function(node, fact) for node, (_, fact) in self.facts.items()}
        self.now = IndexFunctions(known)

    def meaning(self, mask: fx.Node) -> tuple[MaskFound, Ranges | None]:
        always = self._found(mask, self.always)
        if always[0].meaning in (CAUSAL, EVERYTHING) or not self.facts:
            return always
        now, ranges = self._found(mask, self.now)
        if now.meaning in (DENSE, always[0].meaning):
            return always
        needed = [(node, *self.facts[node]) for node in inputs_of(mask) if node in self.facts]
        self.used.update({index: fact for _, index, fact in needed})
        said = " and ".join(f"{input_name(node)} is {_SAID[fact]}" for node, _, fact in needed)
        return now._replace(reason=f"{now.reason}, where {said}: checked at each call"), ranges

    def _found(self, mask: fx.Node, functions: IndexFunctions) -> tuple[MaskFound, Ranges | None]:
        line = user_line(mask)
        if mask.meta.get(DIFF):
            return MaskFound(DENSE, "a gradient flows to it", line), None
        try:
            found = proven(functions.of(mask), mask.meta["val"], functions)
        except NotIndexed as unknown:
            return MaskFound(DENSE, str(unknown), user_line(unknown.node) or line), None
        except Dense as reason:
            return MaskFound(DENSE, str(reason), line), None
        return MaskFound(found.meaning, found.reason, line), found.ranges


def _function(node: fx.Node, fact: str) -> Value:
    shape = node.meta["val"].shape
    if fact == ONES:
        return Affine(1, (0,) * len(shape))
    return affine(0, [0] * (len(shape) - 1) + [1], shape)


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
