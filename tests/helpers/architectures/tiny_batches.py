"""A batch for a tiny model, by the names of what its forward takes, and a loss of its outputs."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

WORDS, TOKENS, BATCH = 128, 16, 4
TEXT, SIDE = 8, 16
"""Words of a text beside the input, and the side of a picture."""


def batch_of(model: nn.Module, whole: bool = False) -> dict[str, torch.Tensor]:
    """A batch by the names of what the model's forward takes."""
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    if not hasattr(model, "main_input_name"):
        return _batch_without_words(model, takes, generator)
    main = model.main_input_name
    words = min(found_in(config, "vocab_size", WORDS), WORDS)
    ids = torch.randint(8, max(words - 16, 9), (BATCH, TOKENS), generator=generator)
    batch: dict[str, torch.Tensor] = {}
    needed = {n for n, one in takes.items() if one.default is one.empty} | {main}
    if whole:
        needed |= {"input_ids", "pixel_values"} & set(takes)
    if "input_ids" in needed:
        batch["input_ids"] = ids
    if "pixel_values" in needed:
        size = found_in(config, "image_size", 64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = found_in(config, "num_channels", 3)
        batch["pixel_values"] = torch.randn(BATCH, channels, height, width, generator=generator)
    if main in ("input_features", "input_values"):
        mel = found_in(config, "num_mel_bins", found_in(config, "input_feat_per_channel", 0))
        length = 2 * found_in(config, "max_source_positions", 64) if mel else 2048
        shape = (BATCH, mel, length) if mel else (BATCH, length)
        batch[main] = torch.randn(shape, generator=generator)
    if "decoder_input_ids" in takes and "labels" not in takes:
        batch["decoder_input_ids"] = ids
    if "bbox" in takes:
        batch["bbox"] = torch.zeros(BATCH, TOKENS, 4, dtype=torch.long)
    if not batch:
        raise ValueError(f"no batch is known for {main}")
    name = type(model).__name__
    if "labels" in takes:
        if "Classification" in name:
            batch["labels"] = torch.randint(0, config.num_labels, (BATCH,), generator=generator)
        elif not re.search("Segmentation|Depth|MaskedImage", name):
            batch["labels"] = ids.clone()
    return batch


def _batch_without_words(
    model: nn.Module, takes: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Any]:
    """Pictures for timm's models; for those of diffusers latents, times, and states of a text."""
    config = getattr(model, "config", None)
    if config is None:
        size = model.default_cfg.get("input_size", (3, 64, 64))
        extent = getattr(getattr(model, "patch_embed", None), "img_size", None) or (64, 64)
        if model.default_cfg.get("fixed_input_size") and not hasattr(model, "patch_embed"):
            extent = size[1:]
        return {"x": torch.randn(BATCH, size[0], *extent, generator=generator)}
    batch: dict[str, Any] = {}
    channels = config.get("in_channels", config.get("latent_channels", 3))
    extent = config.get("sample_size") or 16
    space = tuple(extent) if isinstance(extent, list | tuple) else (extent, extent)
    if space[0] > 4096:  # of a sound
        space = (256,)
    made = {
        "sample": (BATCH, channels, *space),
        "hidden_states": (BATCH, channels, *space),
        "x": (BATCH, channels, *space),
        "encoder_hidden_states": (
            BATCH, 8, config.get("cross_attention_dim") or config.get("joint_attention_dim")
            or config.get("text_embed_dim") or config.get("caption_channels") or 32,
        ),
        "pooled_projections": (BATCH, config.get("pooled_projection_dim") or 32),
    }  # fmt: skip
    for key, one in takes.items():
        if key in made and (one.default is one.empty or "encoder" in key or "pooled" in key):
            batch[key] = torch.randn(made[key], generator=generator)
        elif key in ("timestep", "timesteps"):
            batch[key] = torch.arange(1, BATCH + 1)
        elif key == "class_labels" and (
            config.get("num_embeds_ada_norm") or config.get("num_class_embeds")
        ):
            batch[key] = torch.zeros(BATCH, dtype=torch.long)
    return batch


def found_in(config: Any, key: str, default: Any) -> Any:
    """A number of a configuration or of one inside it."""
    value = getattr(config, key, None)
    if value is not None and not callable(value):
        return value
    for inner in vars(config).values():
        if hasattr(inner, "to_dict"):
            value = found_in(inner, key, None)
            if value is not None:
                return value
    return default


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or one of every output that has a gradient."""
    from torch.utils import _pytree as pytree

    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    parts = [
        # entries weigh apart: rows of one norm would have a loss without a gradient
        (x.float().square() * torch.linspace(0.5, 1.5, x.shape[-1] if x.dim() else 1)).mean()
        for x in pytree.tree_leaves(values)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad
    ]
    if not parts:
        raise ValueError("no output has a gradient")
    return torch.stack(parts).sum()


def argument_of(name: str, model: nn.Module) -> Any:
    """An argument of forward by its name; None where the name tells nothing."""
    normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    if re.search(r"return|labels|output_|use_|cache|past_key|kwargs|session|attention_kw", name):
        return None
    if re.search(r"grid_thw|grid_hws?$", name):
        return torch.tensor([[1, 4, 4]] * BATCH)
    if re.search(r"^(num_|latent_)?frames$|^num_\w+$", name):
        return 5
    if re.fullmatch(r"height|width", name):
        return SIDE
    if re.search(r"img_shapes", name):
        return [[(1, 4, 4)]] * BATCH
    if re.search(r"mask", name):
        return torch.ones(BATCH, TEXT if "encoder" in name else TOKENS, dtype=torch.long)
    if re.search(r"_lens?$|lengths?$", name):
        return torch.full((BATCH,), TEXT)
    if re.search(r"time|sigma|guidance|fps|ratio|r_t|_scale$|snr", name):
        return torch.arange(1, BATCH + 1)
    if re.search(r"_size$|crop|aspect|resolution", name):
        return torch.full((BATCH, 2), SIDE)
    if re.search(r"(img|txt|image|text)_ids|pos$|coords", name):
        return torch.zeros(TEXT if "t" in name[:2] else SIDE, 3)
    if re.search(r"_ids?$|_ids_|indexes|indices|tokens", name):
        return torch.arange(BATCH * TEXT).reshape(BATCH, TEXT) % (WORDS // 2)
    if re.search(r"pooled|image_embeds|proj_emb|class_emb|^state$|projections", name):
        return normal(BATCH, 32)
    if re.search(r"cond$|conditioning", name):
        return normal(BATCH, 3, 8 * SIDE, 8 * SIDE)
    if re.search(r"encoder|text|txt|caption|context|prompt|query|embeds|past_", name):
        return normal(BATCH, TEXT, 32)
    shape = _first_shape(model)
    if "video" in name and "pixel" in name and len(shape) == 4:
        return normal([BATCH, 4, *shape[1:]])
    if re.search(r"hidden|sample|latent|^x$|pixel|image|video|values|features|waveform|inp", name):
        return normal(shape)
    return None


def _first_shape(model: nn.Module) -> list[int]:
    """The shape that the first module with weights takes."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            rank = len(module.kernel_size) + 2
            return [BATCH, module.in_channels, *{3: [1024], 4: [64, 64], 5: [5, 16, 16]}[rank]]
        if isinstance(module, nn.Linear):
            return [BATCH, SIDE, module.in_features]
    return [BATCH, 4, SIDE, SIDE]
