"""How a quantized weight is written, and what a server computes with.

    fp8           float8 e4m3, a scale for each block of 128 x 128: DeepSeek-V3's own layout
    fp8_channel   float8 e4m3, a scale for each output    compressed-tensors "float-quantized"
    int8          int8, a scale for each output           compressed-tensors "int-quantized"
    int4          int4, a scale for each 128 inputs       compressed-tensors "pack-quantized"

Values are rounded to the nearest; nothing is calibrated, as activations are quantized while the
server runs (not with int4). The layouts of compressed-tensors are written by that library.

An engine holds numbers and a scale for each block of them:

    weight 256 x 512     int8             scales of outputs   values int8 [256, 512], scale [256, 1]
                         fp8              128 x 128           values e4m3 [256, 512], scale [2, 4]
    its rows 64 to 128   fp8              64 x 128            values e4m3 [64, 512],  scale [1, 4]

A part is cut from the quantized whole, so that all ranks together hold what the Hugging Face
directory of that layout does; where a cut goes through blocks they become smaller ones.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.export.errors import export_error

BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Blocks:
    """See the module's text: fp8. inputs: a number that must divide those of a weight, [outputs,
    inputs]. experts: whether readers take experts in it."""

    inputs: int = 1
    experts: bool = True

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to write of a weight, by the last part of their name."""
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        padded = weight.new_zeros((rows * BLOCK, columns * BLOCK), dtype=torch.float32)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        largest = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3))
        scale = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        quotient = weight.float() / self._spread(scale, weight.shape)
        return {
            "weight": quotient.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn),
            "weight_scale_inv": scale,  # what a block is multiplied by; the name is DeepSeek's
        }

    def restored(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The weight that those stand for."""
        weight = tensors["weight"]
        return weight.float() * self._spread(tensors["weight_scale_inv"], weight.shape)

    def numbers(
        self, tensors: dict[str, torch.Tensor], shape: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of such tensors the rounded numbers, one an entry, and the scales, [rows, columns] of
        blocks. shape: of the weight."""
        return tensors["weight"], tensors["weight_scale_inv"]

    def block(self, shape: torch.Size) -> tuple[int, int]:
        """Rows and columns that have one scale."""
        return BLOCK, BLOCK

    @staticmethod
    def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return wide[: shape[0], : shape[1]]

    def configuration(self, kept: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. kept: names of modules that are not quantized."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [*kept],
        }


@dataclass(frozen=True)
class Compressed:
    """A layout of the library compressed-tensors. scheme, format: its names of them; the rest as
    `Blocks` has it."""

    scheme: str
    format: str
    inputs: int = 16
    experts: bool = True

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        quantization, compressor, scheme = self._library()
        group = scheme.weights.group_size or weight.shape[1]
        low, high = weight.reshape(weight.shape[0], -1, group).aminmax(dim=-1)
        helpers = importlib.import_module(f"{quantization.__name__}.utils")
        scale, _ = helpers.calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        made: dict[str, torch.Tensor] = compressor.compress(state, scheme)
        return made

    def restored(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        _, compressor, scheme = self._library()
        weight: torch.Tensor = compressor.decompress(tensors, scheme)["weight"]
        return weight

    def numbers(
        self, tensors: dict[str, torch.Tensor], shape: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if "weight" in tensors:
            return tensors["weight"], tensors["weight_scale"]
        library = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")
        packed = tensors["weight_packed"]
        if packed.is_meta:
            values = torch.empty(shape, dtype=torch.int8, device="meta")
        else:
            values = library.unpack_from_int32(packed, 4, shape)
        return values, tensors["weight_scale"]

    def block(self, shape: torch.Size) -> tuple[int, int]:
        _, _, scheme = self._library()
        return 1, scheme.weights.group_size or shape[1]

    def configuration(self, kept: Sequence[str]) -> dict[str, Any]:
        quantization, _, scheme = self._library()
        made = quantization.QuantizationConfig(
            config_groups={"group_0": scheme},  # a name that older TensorRT-LLM asks for
            format=self.format,
            quantization_status="compressed",
            ignore=[*kept],
        )
        found: dict[str, Any] = made.model_dump(mode="json")
        version = importlib.import_module("compressed_tensors").__version__
        return {**found, "version": version}

    def _library(self) -> tuple[Any, Any, Any]:
        try:
            quantization = importlib.import_module("compressed_tensors.quantization")
            compressors = importlib.import_module("compressed_tensors.compressors")
        except ImportError:
            raise export_error(
                "compressed-tensors is not installed, whose layout this is",
                remedy="pip install 'autoshard[quantize]', or quantize='fp8'.",
            ) from None
        scheme = quantization.preset_name_to_scheme(self.scheme, ["Linear"])
        return quantization, compressors.BaseCompressor.get_value_from_registry(self.format), scheme


WeightLayout = Blocks | Compressed

LAYOUTS: dict[str, WeightLayout] = {
    "fp8": Blocks(),
    "fp8_channel": Compressed("FP8_DYNAMIC", "float-quantized"),
    "int8": Compressed("W8A8", "int-quantized", experts=False),
    "int4": Compressed("W4A16", "pack-quantized", BLOCK),
}


def layout(name: str) -> WeightLayout:
    """The layout of that name, whose library is installed; ExportError else."""
    if name not in LAYOUTS:
        raise export_error(
            f"weights cannot be quantized to {name!r}", remedy=f"Give {', '.join(LAYOUTS)}."
        )
    LAYOUTS[name].configuration(())
    return LAYOUTS[name]


@dataclass(frozen=True)
class BlockScaled:
    """values: as the weight, [..., rows, columns]. scale: [..., rows / r, columns / c] for blocks
    of r x c, the last of which may be smaller.
    """

    values: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def part(self, dim: int, start: int, length: int) -> BlockScaled:
        """`length` entries of one dim."""
        rank = self.values.dim()
        values = self.values.narrow(dim, start, length)
        if dim < rank - 2:
            return BlockScaled(values, self.scale.narrow(dim, start, length), self.block)
        finer = self._finer(dim, length)
        size = finer.block[dim - rank + 2]
        first, count = start // size, -(-length // size)
        return BlockScaled(values, finer.scale.narrow(dim, first, count), finer.block)

    def _finer(self, dim: int, length: int) -> BlockScaled:
        """The same in blocks that parts of `length` do not cut."""
        rank, rows_or_columns = self.values.dim(), dim - self.values.dim() + 2
        old = self.block[rows_or_columns]
        new = math.gcd(old, length)
        whole = -(-self.values.shape[dim] // new)
        scale = self.scale.repeat_interleave(old // new, dim).narrow(dim, 0, whole)
        block = (new, self.block[1]) if dim == rank - 2 else (self.block[0], new)
        return BlockScaled(self.values, scale, block)

    @property
    def matrix(self) -> BlockScaled:
        """In two dims: the rows of all matrices, one behind the other."""
        found = self
        if self.values.dim() > 2 and self.values.shape[-2] % self.block[0]:
            found = self._finer(self.values.dim() - 2, self.values.shape[-2])
        values, scale = (x.flatten(0, -2).contiguous() for x in (found.values, found.scale))
        return BlockScaled(values, scale, found.block)


def block_scaled(kind: str, weight: torch.Tensor, rows: int) -> BlockScaled:
    """A weight [..., columns] in the layout `kind`, each matrix of `rows` rows by itself, as it is
    published. On the meta device too."""
    how = layout(kind)
    matrices = weight.reshape(-1, rows, weight.shape[-1])
    numbers = [how.numbers(how.quantized(one), one.shape) for one in matrices]
    made = [BlockScaled(*one, how.block(matrices.shape[1:])) for one in numbers]
    if len(made) > 1 and rows % made[0].block[0]:
        made = [one._finer(0, rows) for one in made]
    values = torch.cat([one.values for one in made]).reshape(weight.shape)
    scale = torch.cat([one.scale for one in made])
    scale = scale.reshape(*weight.shape[:-2], -1, scale.shape[-1])
    return BlockScaled(values, scale, made[0].block)
