"""What engines are made for: the options that every exporter of rank graphs takes, and the call of
a model that the command line traces, its inputs as the configuration says them.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.export.errors import export_error
from autoshard.export.serial_graph import unwrapped
from autoshard.planning.cost import cluster
from autoshard.runtime.files import MOST_RANKS

DIMS = ("batch", "sequence")
"""Names of the first dims of the inputs, which may vary."""

MOST_SIZE = 2**31 - 1
"""The largest size that TensorRT counts in."""

_DYNAMIC = f"It takes {{name: (minimum, optimum, maximum)}} of {' and '.join(DIMS)}."

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""A call of the model: (args, kwargs)."""


@dataclass(frozen=True)
class Extent:
    """The sizes a dynamic dim may have."""

    minimum: int
    optimum: int
    maximum: int


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The options of `autoshard.export.tensorrt` that say what a model is planned for.

    mesh: {"tp": n}. example: (args, kwargs) of one call, of which shapes and dtypes count; None:
    token ids [2, 8]. dtype: of the weights, of inputs that are floating-point numbers and so of
    the computation; None: as they are. dynamic: (minimum, optimum, maximum) of "batch", dim 0 of
    every input, and of "sequence", dim 1; a size that is not named is that of the example.
    max_length: tokens of a key-value cache, None for none. all_logits: with a cache, the logits of
    every token and not of each row's last alone. hardware: the cluster to plan for, a
    built-in one or a file. quantize: the layout of the weights of linear layers and
    experts, one of those that `autoshard.export.huggingface` has; None: none is quantized.

    Raises ExportError for values that no engine can have.
    """

    mesh: Mapping[str, int]
    example: Example | None = None
    dtype: str | torch.dtype | None = None
    dynamic: Mapping[str, tuple[int, int, int]] | None = None
    max_length: int | None = None
    all_logits: bool = False
    hardware: str = "h100"
    quantize: str | None = None

    def __post_init__(self) -> None:
        _ = self.tp, self.weight_dtype, self.extents
        if self.max_length is not None and not _is_size(self.max_length):
            raise export_error(
                f"max_length {_short(self.max_length)}: give the tokens of the cache, or None"
            )
        if not isinstance(self.hardware, str):
            raise export_error(f"hardware {_short(self.hardware)} is no name of a machine")
        cluster(self.hardware)  # ConfigError, naming the closest

    @property
    def tp(self) -> int:
        """The number of ranks."""
        why = "an engine communicates in one process group, that of the axis tp"
        remedy = "Give mesh={'tp': n}; replicas of a server each load the same engines."
        return axis_sizes(self.mesh, ("tp",), why, remedy)[0]

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The type of the weights; None: as they are."""
        return None if self.dtype is None else weight_dtype(self.dtype)

    @property
    def extents(self) -> dict[str, Extent]:
        """The sizes of each dynamic dim, by its name."""
        dynamic = {} if self.dynamic is None else self.dynamic
        if not isinstance(dynamic, Mapping):
            raise export_error(f"dynamic {_short(dynamic)}: give sizes by name", remedy=_DYNAMIC)
        return {name: _extent(name, sizes) for name, sizes in dynamic.items()}


def axis_sizes(
    mesh: Mapping[str, int], axes: Sequence[str], why: str, remedy: str
) -> tuple[int, ...]:
    """The size of each of `axes`, 1 where the mesh has none; of others only size 1 is accepted.

    why, remedy: what the error says of another axis.
    """
    if not isinstance(mesh, Mapping):
        raise export_error(f"mesh {_short(mesh)} is no dict of sizes by axis name", remedy=remedy)
    for name, size in mesh.items():
        if not _is_size(size):
            raise export_error(
                f"mesh axis {_short(name)} has size {_short(size)}, not an integer from 1 to "
                f"{MOST_SIZE:,}"
            )
        if name not in axes and size != 1:
            raise export_error(f"mesh axis {name} of size {size}: {why}", remedy=remedy)
    sizes = tuple(mesh.get(name, 1) for name in axes)
    if math.prod(sizes) > MOST_RANKS:
        raise export_error(f"a mesh of {math.prod(sizes):,} ranks is more than {MOST_RANKS:,}")
    return sizes


def weight_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The type that weights are written in, by its name or itself."""
    known = isinstance(dtype, (str, torch.dtype))
    found = DTYPES.get(str(dtype).removeprefix("torch.")) if known else None
    if found is None:
        raise export_error(
            f"dtype {_short(dtype)} cannot be written", remedy=f"Give {', '.join(DTYPES)}."
        )
    return found


def _extent(name: str, sizes: tuple[int, int, int]) -> Extent:
    if name not in DIMS:
        raise export_error(f"dynamic size {_short(name)} is not known", remedy=_DYNAMIC)
    given = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    if len(given) != 3 or not all(map(_is_size, given)) or list(given) != sorted(given):
        raise export_error(
            f"dynamic {name} {_short(sizes)}: give 1 <= minimum <= optimum <= maximum, at most "
            f"{MOST_SIZE:,}",
            remedy=_DYNAMIC,
        )
    return Extent(*given)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SIZE


_short = reprlib.Repr().repr


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
