"""Inputs that went wrong: strategies that damage a valid value, and the bytes of a valid file."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", "²", "\0", "\ud800", "..", "../outside", "/etc/hostname", "S(99)"),
    *(0, -1, 1, 2, 4097, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, "x" * 5000, "os", "tp", "I"),
)
"""Values of every type, at and beyond every bound."""

values = st.one_of(
    st.sampled_from(HOSTILE).map(copy.deepcopy),  # it may be edited in its place
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    pairs = value.items() if isinstance(value, dict) else []
    for key, inner in enumerate(value) if isinstance(value, list) else pairs:
        found += _places(inner, (*path, key))
    return found


@st.composite
def damaged(draw: st.DrawFn, body: Any) -> Any:
    """`body` with one to three entries replaced, removed, doubled or renamed."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(body)
        if not places:
            return draw(values)
        *path, last = draw(st.sampled_from(places))
        holder = body
        for key in path:
            holder = holder[key]
        match draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename", "wrap"))):
            case "remove":
                del holder[last]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.text(max_size=4))] = holder.pop(last)
            case "wrap":
                holder[last] = [holder[last]]
            case _:
                holder[last] = draw(values)
    return body


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` cut off, with some bytes overwritten, put in or taken out."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        new = draw(st.binary(max_size=8))
        match draw(st.sampled_from(("cut", "overwrite", "insert", "remove"))):
            case "cut":
                data = data[:at]
            case "overwrite":
                data = data[:at] + new + data[at + len(new) :]
            case "insert":
                data = data[:at] + new + data[at:]
            case _:
                data = data[:at] + data[at + len(new) :]
    return data


def json_bytes(body: Any) -> bytes:
    return json.dumps(body).encode()  # NaN, Infinity and lone surrogates included


@st.composite
def damaged_json(draw: st.DrawFn, body: Any) -> bytes:
    """The text of a JSON file whose entries, or whose bytes, are wrong."""
    how = draw(st.sampled_from(("entries", "entries", "entries", "bytes", "other", "deep")))
    match how:
        case "entries":
            return json_bytes(draw(damaged(body)))
        case "bytes":
            return draw(damaged_bytes(json_bytes(body)))
        case "other":
            return draw(st.binary(max_size=64))
        case _:
            return draw(st.sampled_from((b"[", b'{"a":', b'{"a":[]'))) * draw(
                st.sampled_from((1, 900, 10**5))
            )
