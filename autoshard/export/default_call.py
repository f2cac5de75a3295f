"""The call of a model that the command line traces: its inputs as the configuration says them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.export.errors import export_error
from autoshard.export.serial_graph import unwrapped

_BATCH = 2


def example_call(
    model: nn.Module, sequence: int, cached: bool
) -> tuple[dict[str, torch.Tensor] | None, Sequence[str]]:
    """Keyword arguments of a call, None for token ids alone, and the sizes of it that vary.

    sequence: tokens of each text; of an encoder-decoder also of its source, which with a cache
    (`cached`) has this length only; and samples of a sound. Images and spectra have the
    configuration's own sizes, and a text beside an image no more tokens than it has positions.
    Raises ExportError where the configuration does not say a size.
    """
    inner = unwrapped(model)
    name = getattr(inner, "main_input_name", "input_ids")
    config: Any = getattr(inner, "config", None)
    paired = bool(getattr(config, "is_encoder_decoder", False))
    both = ("batch", "sequence")
    if name == "input_ids" and not paired:
        if not _two_towers(config):
            return None, both
        length = min(sequence, getattr(config.text_config, "max_position_embeddings", sequence))
        text = torch.zeros(_BATCH, length, dtype=torch.int64)
        image = _sensed(inner, "pixel_values", config, sequence)
        return {name: text, "pixel_values": image}, ("batch",)
    tokens = torch.zeros(_BATCH, sequence, dtype=torch.int64)
    call = {name: tokens if name == "input_ids" else _sensed(inner, name, config, sequence)}
    if paired:
        call["decoder_input_ids"] = tokens
    varies = name == "input_ids" or (paired and cached)
    return call, both if varies else ("batch",)


def _two_towers(config: Any) -> bool:
    """Whether a text and an image are read by models of their own, as CLIP's are; one text model
    that has tokens for images is called with token ids alone."""
    towers = all(hasattr(config, f"{name}_config") for name in ("text", "vision"))
    return towers and not any(hasattr(config, f"image_token_{n}") for n in ("id", "index"))


def _sensed(model: nn.Module, name: str, config: Any, samples: int) -> torch.Tensor:
    """An image, or what is heard."""
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None)
    bins, frames = (getattr(config, n, None) for n in ("num_mel_bins", "max_source_positions"))
    if name == "pixel_values" and size is not None:
        sides = [size, size] if isinstance(size, int) else [*size]
        return torch.zeros(_BATCH, getattr(config, "num_channels", 3), *sides)
    if name == "input_features" and bins and frames:
        return torch.zeros(_BATCH, bins, 2 * frames)  # a convolution of Whisper's halves them
    if name == "input_values" and hasattr(config, "conv_stride"):
        return torch.zeros(_BATCH, samples)
    raise export_error(
        f"{type(model).__name__} takes {name}, and its configuration does not say of which size",
        remedy="Export it from Python, with example=((), {name: tensor}).",
    )
