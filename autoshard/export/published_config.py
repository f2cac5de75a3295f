"""A Hugging Face `config.json` that older transformers and other readers read too.

Transformers 5 writes some entries under new names only (`rope_parameters`, `dtype`); a reader that
does not know them takes its defaults in silence, and the model is another one. The old names are
added beside the new, with the same values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_APART = ("rope_theta", "partial_rotary_factor")
"""Entries of `rope_parameters` that have a name of their own in older configurations."""


def add_older_names(file: Path, aliases: Mapping[str, str]) -> None:
    """Add to a `config.json` what older readers look for. aliases: the configuration's other names
    of its entries (`attribute_map`)."""
    said = json.loads(file.read_text())
    made = {**said, **_older(said, aliases)}
    if made != said:
        file.write_text(json.dumps(made, indent=2, sort_keys=True) + "\n")


def _older(said: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "dtype" in said:
        made["torch_dtype"] = said["dtype"]
    if aliases.get("num_experts") in said:
        made["num_experts"] = said[aliases["num_experts"]]
    rope = said.get("rope_parameters") or {}
    if set(rope) == {"full_attention", "sliding_attention"}:  # Gemma 3
        made["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        neox = said.get("model_type") == "gpt_neox"
        for name in _APART:
            if name in rope:
                made[_NEOX[name] if neox else name] = rope[name]
        if rope.get("rope_type", "default") != "default":
            made["rope_scaling"] = {k: v for k, v in rope.items() if k not in _APART}
    if isinstance(said.get("text_config"), dict):
        text = said["text_config"]
        made["text_config"] = {**_older(text, {}), **text}
    return made
