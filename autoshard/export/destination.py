"""A directory that appears complete or not at all, written by one process or by many.

Its path is free, or refused before any work; while an export runs, it is reserved.

A safetensors file written piece by piece, in any order, with one piece in memory.

The format is an 8-byte length, a JSON header that gives every tensor's place, and the bytes.
Shapes are known before values, so the header goes first and each piece to its place; what is never
written is zero. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from autoshard.export.errors import ExportError, export_error, on_every_rank
from autoshard.runtime.agreement import from_first, gather
from autoshard.runtime.collectives import Axis

_LONGEST_NAME = 255
_ANOTHER = "Remove it, or give another directory."


def check_target(directory: str | Path) -> Path:
    """The absolute path of a directory that can be written.

    It is absent, or an empty directory that a complete one may replace. ExportError for all else: a
    directory that holds something, a file, a symbolic link (what it leads to would be left, or the
    link replaced), the working directory, a mount point, a place that cannot be written to.
    """
    try:
        if b"\0" in os.fspath(directory).encode():
            raise ValueError("a null byte in its name")
        given = Path(directory)
        target = (
            given.resolve() if given.name in ("", "..") else given.parent.resolve() / given.name
        )
        _refuse_taken(target)
        _refuse_unwritable(target)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ExportError):
            raise
        # no path at all, a loop of links, a name with a null byte or that is not UTF-8
        raise export_error(f"{str(directory)!r} cannot be written to: {error}") from error
    return target


def _refuse_taken(target: Path) -> None:
    if len(os.fsencode(target.name)) > _LONGEST_NAME:
        raise export_error(f"the name {target.name[:40]}... has more than {_LONGEST_NAME} bytes")
    if target.is_symlink():
        raise export_error(
            f"{target} exists: a symbolic link to {os.readlink(target)}",
            remedy="Give the directory itself, or another one.",
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise export_error(f"{target} exists, and is no directory", remedy=_ANOTHER)
    held = sum(1 for _ in target.iterdir())
    if held:
        raise export_error(f"{target} exists, and holds {held} files or folders", remedy=_ANOTHER)
    if target.is_mount() or target.samefile("."):
        what = "a mount point" if target.is_mount() else "the working directory"
        raise export_error(
            f"{target} is {what}, which a finished directory cannot replace",
            remedy="Give a directory inside of it.",
        )


def _refuse_unwritable(target: Path) -> None:
    above = next(parent for parent in target.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise export_error(f"{above} is no directory, so {target} cannot be one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise export_error(f"{above} cannot be written to by this user")


@contextlib.contextmanager
def reserved(target: Path) -> Iterator[Path]:
    """A new, empty directory of the target's name, in a folder beside it whose name nobody knows.

    Until the end of the block no other process gets one for this target: ExportError. At the end
    the folder is removed with what is left in it, and so are parents of the target that the block
    made and left empty. What a process that was killed leaves is a folder `.autoshard-*`.
    """
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(target):
            folder = Path(tempfile.mkdtemp(prefix=".autoshard-", dir=target.parent))
            try:
                # tempfile's folder is its owner's alone; the directory has the usual permissions
                partial = folder / target.name
                partial.mkdir()
                yield partial
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):  # the parent holds something
            for parent in made:
                parent.rmdir()


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """A lock that ends with the process; nothing on a file system without locks, where two exports
    to one path both work, and the second to finish is refused its place."""
    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]
    path = target.parent / f".autoshard-{digest}.lock"
    descriptor = None
    while descriptor is None:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(opened), os.stat(path)):
                descriptor = opened
        except BlockingIOError as error:
            raise export_error(
                f"{target} is being written by another export",
                remedy="Export a whole model from one process of a job only, or give each its own "
                "directory.",
            ) from error
        except OSError:  # no locks here
            break
        finally:
            if descriptor is None:
                os.close(opened)  # removed by its owner since it was opened: another is tried
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        if descriptor is not None:
            os.close(descriptor)


Progress = Callable[[str, int, int], None]
"""Called with the name of what was written, how many are, and how many there will be."""


class Destination:
    """A directory `partial` that takes the place of `directory` when all ranks succeeded.

    A context manager, entered before any work: a place that cannot be had is refused there. At the
    end of the block the directory is moved to its place, or removed where anything failed on any
    rank; beginning and end are collective over the job, whose ranks all see one file system. A
    file is written with `attempt`.
    """

    partial: Path

    def __init__(self, directory: str | Path, job: Axis) -> None:
        self._given = directory
        self._job = job
        self._error: Exception | None = None
        self._held = contextlib.ExitStack()

    def attempt(self, action: Callable[[], object]) -> None:
        """Run `action`, unless an earlier one failed; its error is raised at the end of the block.

        The other ranks go on to the next collective, where this one must be too.
        """
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def __enter__(self) -> Destination:
        try:
            self._target = on_every_rank(lambda: check_target(self._given), "directory", self._job)
            targets = gather(str(self._target), "directories", self._job)
            for rank, target in enumerate(targets):
                if target != targets[0]:
                    raise export_error(
                        f"rank 0 writes {targets[0]}, and rank {rank} {target}",
                        remedy="Give every rank of the job the same directory.",
                    )
            mine = on_every_rank(self._reserve, "beginning of the export", self._job)
            self.partial = Path(from_first(str(mine), "partial directory", self._job))
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._held:
            if kind is None:
                on_every_rank(self._raise, "files", self._job)
                on_every_rank(self._move, "end of the export", self._job)

    def _reserve(self) -> Path | None:
        """On rank 0: the directory that all ranks write."""
        if self._job.rank != 0:
            return None
        try:
            return self._held.enter_context(reserved(self._target))
        except OSError as error:
            raise export_error(f"{self._target} cannot be written to: {error}") from error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _move(self) -> None:
        if self._job.rank != 0:
            return
        try:
            self.partial.rename(self._target)
        except OSError as error:
            raise export_error(
                f"{self._target} was made by somebody else while the export ran, and stays as it "
                f"is: {error}",
                remedy="Give another directory.",
            ) from error


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
    """A file with room for tensors of known shape and dtype: {name: (shape, dtype)}."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        self._places: dict[str, tuple[int, int]] = {}
        # widest elements first, as the reference library: every tensor is then aligned
        order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
        end = 0
        for name in order:
            shape, dtype = tensors[name]
            begin, end = end, end + dtype.itemsize * math.prod(shape)
            self._places[name] = begin, end
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
        begin, end = self._places[name]
        start = begin + offset
        if start + flat.nbytes > end:
            raise ValueError(f"{name}: {flat.nbytes} bytes at {offset} pass its end")
        self._file.seek(self._data + start)
        self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Write what is buffered and close; again does nothing."""
        self._file.close()
