"""A safetensors file written piece by piece, in any order, with one piece in memory.

The format is an 8-byte length, a JSON header that gives every tensor's place, and the bytes.
Shapes are known before values, so the header goes first and each piece to its place; what is never
written is zero. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class SafetensorsFile:
    """A file with room for tensors of known shape and dtype: {name: (shape, dtype)}.

    A context manager: closed at the end, whatever happens.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        self._begin: dict[str, int] = {}
        self._end: dict[str, int] = {}
        # widest elements first, as the reference library: every tensor is then aligned
        order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
        end = 0
        for name in order:
            shape, dtype = tensors[name]
            begin, end = end, end + dtype.itemsize * math.prod(shape)
            self._begin[name], self._end[name] = begin, end
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, piece: torch.Tensor, offset: int = 0) -> None:
        """Put the bytes of `piece` at byte `offset` of the tensor `name`."""
        flat = piece.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel() == 0:
            return
        start = self._begin[name] + offset
        if start + flat.nbytes > self._end[name]:
            raise ValueError(f"{name}: {flat.nbytes} bytes at {offset} pass its end")
        self._file.seek(self._data + start)
        self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Write what is buffered and close; again does nothing."""
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
