"""Any model of transformers, timm or diffusers, tiny: its numbers shrunk by what their names say.

One general procedure, not a size by hand for a model: layers become two, widths follow the hidden
size down to 32, vocabularies hold 128 words. Where that gives no model that runs, only what is
counted (layers, words, experts, pictures) shrinks, and widths stay.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tiny_search
import torch
from tiny_batches import WORDS, batch_of, loss_of
from tiny_search import Draft
from torch import nn

HIDDEN = 32
LONGEST = 10.0
"""Seconds of this process that a step of a tiny model takes at most: a model of speech may make
minutes of sound of four words."""
WAYS = ("widths", "heads", "counts")

TASKS = {
    "CAUSAL_LM": "ForCausalLM",
    "SEQ_TO_SEQ_CAUSAL_LM": "ForSeq2SeqLM",
    "MASKED_LM": "ForMaskedLM",
    "IMAGE_TEXT_TO_TEXT": "ForImageTextToText",
    "IMAGE_CLASSIFICATION": "ForImageClassification",
    "AUDIO_CLASSIFICATION": "ForAudioClassification",
    "CTC": "ForCTC",
    "SEQUENCE_CLASSIFICATION": "ForSequenceClassification",
    "SPEECH_SEQ_2_SEQ": "ForSpeechSeq2Seq",
    "SEMANTIC_SEGMENTATION": "ForSemanticSegmentation",
    "DEPTH_ESTIMATION": "ForDepthEstimation",
    "MASKED_IMAGE_MODELING": "ForMaskedImageModeling",
    "PRETRAINING": "ForPreTraining",
}
"""The heads that are looked for, in this order; a model of none of them is run without a head."""

_LAYERS = re.compile(r"(^|_)(n|num)_(\w+_)?(layers?|blocks?)$|(^|_)(layers?|depth|n_layers?)$")
_HEADS = re.compile(r"(^|_)heads?$|^n_head|_heads?_")
_WIDTHS = re.compile(
    r"(hidden|intermediate|embed\w*|ffn|proj\w*|width|channels|state|inner)_?(size|dim)s?$"
    r"|(^|_)(d_model|n_embd|dim|dims|d_ff|d_kv|n_inner|hidden|lora_rank|head_dim|ffn_dim|size)$"
    r"|_dim$|_size$|_rank$|^d_"
)
_KEPT = re.compile(
    r"kernel|stride|patch|window|chunk|merge|group|token|position|scale|factor|expand|label|image_s"
    r"|vocab|batch|conv_dim|pool|tp$|dilation|ratio|beam|version|_id|_ids$"
)


def names() -> list[str]:
    """Every architecture that the installed libraries have, as "library:name"."""
    return [
        f"{library}:{name}"
        for library, found in LIBRARIES.items()
        if importlib.util.find_spec(library)
        for name in found[0]()
    ]


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model in training mode without dropout, and a batch by its forward's names.

    Where no way gives a model that trains a step, one is searched; raises ValueError with the
    reason of each where the search finds none.
    """
    if name not in FOUND:
        FOUND[name] = _recipe(name)
    if isinstance(found := FOUND[name], str):
        raise ValueError(found)
    library, _, kind = name.partition(":")
    model = tiny_search.made(LIBRARIES[library][1](kind, found.how), found.values)
    return model, copy.deepcopy(found.batch)


class Recipe(NamedTuple):
    """How a tiny model is made: the way that it is shrunk, values beside it, and the batch."""

    how: str
    values: dict[str, Any]
    batch: dict[str, Any]


FOUND: dict[str, Recipe | str] = {}
"""By name, the recipe or why there is none: a search takes longer than the steps that it is for, so
that a process tells another."""


def _recipe(name: str) -> Recipe | str:
    library, _, kind = name.partition(":")
    reasons = []
    for how in WAYS:
        try:
            draft = LIBRARIES[library][1](kind, how)
            with torch.device("meta"):
                count = sum(p.numel() for p in draft.make({}).parameters())
            if count > tiny_search.LARGEST:
                raise ValueError(f"{count:,} parameters are left")
            return Recipe(how, {}, _first_that_runs(tiny_search.made(draft, {})))
        except TimeoutError as error:
            return str(error)
        except Exception as error:
            reasons.append(f"{how}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    try:
        draft = LIBRARIES[library][1](kind, WAYS[0])
        values, batch = tiny_search.search(draft)
        _step(tiny_search.made(draft, values), copy.deepcopy(batch))
        return Recipe(WAYS[0], values, batch)
    except Exception as error:
        return "; ".join([f"searched: {' '.join(str(error).split())[:200]}", *reasons])


def has_experts(model: nn.Module) -> bool:
    """Whether a model routes tokens to experts."""
    return any("expert" in name for name, _ in model.named_parameters())


def _first_that_runs(model: nn.Module) -> dict[str, torch.Tensor]:
    """The batch of what the model asks for first, or else of all it knows."""
    try:
        _step(model, batch_of(model))
        whole = False
    except TimeoutError:
        raise
    except Exception:
        _step(model, batch_of(model, whole=True))
        whole = True
    return batch_of(model, whole=whole)


def _step(model: nn.Module, batch: dict[str, Any]) -> None:
    """A step of training; TimeoutError where it is longer than a tiny model's."""
    start = time.process_time()
    loss_of(model(**batch)).backward()
    model.zero_grad()
    if (taken := time.process_time() - start) > LONGEST:
        raise TimeoutError(f"a step takes {taken:.0f} s")


def _transformers_kinds() -> list[str]:
    from transformers.models.auto import modeling_auto

    found = set(modeling_auto.MODEL_MAPPING_NAMES)
    for task in TASKS:
        found |= set(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES"))
    return sorted(found)


def _of_transformers(kind: str, how: str) -> Draft:
    """A model_type's first head of `TASKS`, else the model without one."""
    import transformers
    from transformers.models.auto import modeling_auto

    heads = [
        head for task, head in TASKS.items()
        if kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    ]  # fmt: skip
    auto = getattr(transformers, f"AutoModel{heads[0] if heads else ''}")

    def configuration() -> Any:
        config = transformers.AutoConfig.for_model(kind)
        shrink(config, how)
        config.architectures = config.architectures or []
        return config

    def make(values: dict[str, Any]) -> nn.Module:
        config = configuration()
        for path, value in values.items():
            _assign(config, path, value)
        made: nn.Module = auto.from_config(config, dtype=torch.float32)
        return made

    published = dict(_paths(transformers.AutoConfig.for_model(kind)))
    return Draft(published, dict(_paths(configuration())), make)


def _paths(config: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration and of those inside it, by their paths."""
    for key, value in _numbers(config):
        if hasattr(value, "to_dict"):
            yield from _paths(value, f"{above}{key}.")
        else:
            yield above + key, value


def _assign(config: Any, path: str, value: Any) -> None:
    """Sets a value at a path, or in every configuration of the class that the path begins with."""
    *above, key = path.split(".")
    if above and above[0].endswith("Config"):
        for one in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
            if type(one).__name__ == above[0]:
                setattr(one, key, value)
        return
    setattr(functools.reduce(getattr, above, config), key, value)


def _timm_kinds() -> list[str]:
    import timm

    return [name for name in timm.list_modules() if timm.list_models(module=name)]


def _of_timm(module: str, how: str) -> Draft:
    """The smallest model of a module, by its name."""
    import timm

    sizes = ("atto", "femto", "pico", "nano", "tiny", "mini", "xxs", "xs", "small", "_s", "0")
    every = timm.list_models(module=module)
    name = next((one for size in sizes for one in every if size in one), every[0])
    with torch.device("meta"):
        takes = inspect.signature(type(timm.create_model(name)).__init__).parameters
    sized: dict[str, Any] = {"img_size": 64} if "img_size" in takes and how != "counts" else {}
    if how == "widths":  # of its constructor, what counts layers
        sized |= {
            key: [1] * 4
            if one.default is one.empty
            else _smaller(key, one.default, 1.0, "counts", None)
            for key, one in takes.items()
            if _LAYERS.search(key) or key == "depths"
        }

    def make(values: dict[str, Any]) -> nn.Module:
        kept = {key: value for key, value in {**sized, **values}.items() if value is not None}
        made: nn.Module = timm.create_model(name, num_classes=8, **kept)
        return made

    return Draft({key: None for key in sized or ("img_size",)}, sized, make)


def _diffusers_kinds() -> list[str]:
    from diffusers import models

    return [
        name for name in sorted(dir(models))
        if re.search("(Transformer|UNet|Autoencoder|VQ|Controlnet|ControlNet)", name)
        and "Flax" not in name and isinstance(getattr(models, name), type)
    ]  # fmt: skip


def _of_diffusers(kind: str, how: str) -> Draft:
    """A class, of the defaults of its constructor, shrunk."""
    from diffusers import models

    made: Any = getattr(models, kind)
    takes = inspect.signature(made.__init__).parameters
    published = {key: one.default for key, one in takes.items() if one.default is not one.empty}
    sizes = {
        key: _smaller(key, value, 0.125 if how == "widths" else 1.0, how, None)
        for key, value in published.items()
        if how != "counts"
    }

    def make(values: dict[str, Any]) -> nn.Module:
        model: nn.Module = made(**{**sizes, **values})
        return model

    return Draft(published, sizes or published, make)


def shrink(config: Any, how: str) -> None:
    """Shrinks a configuration and those inside it, in place."""
    inner = {key: value for key, value in vars(config).items() if hasattr(value, "to_dict")}
    for value in inner.values():
        shrink(value, how)
    known = {key: value for key, value in _numbers(config) if key not in inner}
    wide = next(
        (known[key] for key in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
         if isinstance(known.get(key), int)), 0,
    )  # fmt: skip
    small = HIDDEN
    if how == "heads":
        heads = next(
            (known[k] for k in ("num_attention_heads", "n_head", "num_heads") if k in known), 4
        )
        each = known.get("head_dim") or wide // heads if isinstance(heads, int) else HIDDEN
        small = 4 * each if isinstance(each, int) else HIDDEN
    grouped = known.get("num_key_value_heads") != known.get("num_attention_heads")
    share = small / wide if how != "counts" and wide > small else 1.0
    depth = next((v for k, v in known.items() if k == "num_hidden_layers"), None)
    for key, value in known.items():
        new = _smaller(key, value, share, how, depth)
        if value is None and how == "widths":  # some classes say it of their published sizes only
            new = {"head_dim": HIDDEN // 4, "num_key_value_heads": 4}.get(key)
        elif key == "num_key_value_heads" and not grouped and how != "counts":
            new = min(value, 4)
        if key == "head_dim" and "expand" in known and how == "widths":
            new = HIDDEN * known["expand"] // 4  # of state space layers
        if new != value:
            try:
                setattr(config, key, new)
            except (AttributeError, TypeError, ValueError):
                continue  # a property of other numbers
    config.use_cache = False


def _numbers(config: Any) -> Iterator[tuple[str, Any]]:
    aliases = getattr(config, "attribute_map", {})
    for key, value in vars(config).items():
        if not key.startswith("_") and key not in aliases and key not in ("id2label", "label2id"):
            yield key, value


def _smaller(key: str, value: Any, share: float, how: str, depth: int | None) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return 0.0 if "drop" in key else value
    if isinstance(value, list | tuple):
        return _smaller_list(key, value, share, depth)
    if not isinstance(value, int):
        return value
    if key.endswith("vocab_size") or key.endswith("vocab_size_per_layer_input"):
        return min(value, WORDS)
    if re.search(r"token_id$|token_index$|_id$", key):
        return value if value < WORDS else WORDS - 1 - sum(map(ord, key)) % 8
    if "drop" in key:
        return 0
    if _LAYERS.search(key):
        return min(value, 2)
    if re.search(r"(dense_replace|nextn|mtp|share)", key):
        return min(value, 1)
    if re.search(r"experts?_per_tok|top_?k|topk_group|n_groups?$|moe_k$", key):
        return min(value, 2)
    if re.search(r"experts?$|expert_num", key):
        return min(value, 4)
    if re.search(r"max_\w*positions?|positions?$|max_\w*length|seq_length", key):
        return min(value, 512)
    if key in ("image_size", "img_size", "input_size"):
        return min(value, 64)
    if how == "counts":
        return value
    if _HEADS.search(key) and "dim" not in key and "size" not in key:
        return value if value <= 1 else (2 if re.search(r"key_value|kv", key) else 4)
    if re.search(r"head_dim$|head_size$|kv_channels$|d_kv$|rank$", key):
        return value if how == "heads" else min(value, HIDDEN // 4)
    if _WIDTHS.search(key) and not _KEPT.search(key) and value >= 16:
        return max(8, round(value * share / 8) * 8)
    return value


def _smaller_list(key: str, value: Any, share: float, depth: int | None) -> Any:
    kind = type(value)
    if not value:
        return value
    if isinstance(value[0], str) and depth is not None and len(value) == depth:
        other = next((one for one in value if one != value[0]), value[0])
        return kind([value[0], other][: min(depth, 2)])
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        return value
    if depth is not None and depth > 2 and len(value) == depth and "depth" not in key:
        return kind(value[:2])
    if re.search(r"depths?$|layers$|blocks$", key):
        return kind(min(one, 1) for one in value)
    if key in ("image_size", "img_size"):
        return kind(min(one, 64) for one in value)
    if key == "block_out_channels":
        return kind(max(32, round(one * share / 32) * 32) for one in value)
    return value


LIBRARIES: dict[str, tuple[Callable[[], list[str]], Callable[[str, str], Draft]]] = {
    "transformers": (_transformers_kinds, _of_transformers),
    "timm": (_timm_kinds, _of_timm),
    "diffusers": (_diffusers_kinds, _of_diffusers),
}
"""What architectures a library has, and a tiny one of a name."""
