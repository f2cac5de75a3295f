"""The errors autoshard raises, and the one sentence structure they share.

They live here because `runtime` imports torch only; users import them from `autoshard.errors`.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterable


class AutoshardError(RuntimeError):
    """Base of every error autoshard raises on purpose.

    what: its text; with `where` or `remedy`, what they are put to (`message`).
    """

    def __init__(self, what: str, **form: str | None) -> None:
        super().__init__(message(what, **form) if form else what)


class ConfigError(AutoshardError, ValueError):
    """An option, or a combination of options, that cannot be obeyed."""


class CaptureError(AutoshardError):
    """The model's graph could not be captured as one functional ATen graph."""


class PlanError(AutoshardError, ValueError):
    """A plan that does not fit the graph, or a file that is not a plan."""


class PlanMismatchError(AutoshardError):
    """Ranks made different plans; running them would be silently wrong, so none runs."""


class BatchMismatchError(AutoshardError):
    """Ranks that compute one batch together were given different ones."""


class CollectiveError(AutoshardError):
    """A collective, or a read of a stored parameter, to which a rank did not come."""


class OutputError(AutoshardError, OSError):
    """A file that cannot be written."""


def in_one_batch(what: str) -> AutoshardError:
    """The error of gradients of `what` that autograd was asked for by a batch of gradients."""
    return AutoshardError(
        f"gradients of {what} were asked for in one batch, by is_grads_batched or vectorize",
        remedy="Take them one by one, in a loop over grad_outputs.",
    )


def message(what: str, *, where: str | None = None, remedy: str | None = None) -> str:
    """Return "what (where). remedy": the form of every error text.

    what: the failure with its numbers, without a final full stop.
    where: `file:line` of the user's code, or the module's name; see `source_line`.
    remedy: a full sentence saying what the user can do.
    """
    text = f"{what} ({where})." if where else f"{what}."
    return f"{text} {remedy}" if remedy else text


def shown(value: object) -> str:
    """`repr` of what somebody gave, which may hold an integer of more digits than Python prints."""
    try:
        return repr(value)
    except ValueError:
        return f"a {type(value).__name__} with an integer of more digits than are printed"


def did_you_mean(
    name: str,
    known: Iterable[str],
    otherwise: str,
    *,
    cutoff: float = 0.6,
    spelled: Callable[[str], str] = repr,
) -> str:
    """The remedy for a name that is not among `known`: the closest, as `spelled` writes it, or
    `otherwise`, where none is as alike as `cutoff` (see difflib)."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"Did you mean {spelled(near[0])}?" if near else otherwise


def source_line(stack_trace: str | None) -> str | None:
    """The innermost `file:line` of a node's `stack_trace`, or None where there is none.

    A frame of torch's own (nn.RMSNorm calls torch.nn.functional) is passed over for the frame that
    called it, where there is one: it is the same line for every user of the module.
    """
    lines = [line.strip() for line in (stack_trace or "").splitlines()]
    frames = [line for line in lines if line.startswith('File "')]
    if not frames:
        return None
    outside = [frame for frame in frames if not frame.startswith(f'File "{_torch_folder()}')]
    # Each frame reads: File "model.py", line 41, in forward
    path, _, rest = (outside or frames)[-1].removeprefix('File "').partition('", line ')
    return f"{path}:{rest.partition(',')[0]}"


@functools.cache
def _torch_folder() -> str:
    """The folder torch is installed in, found without importing it."""
    spec = importlib.util.find_spec("torch")
    return os.path.join(os.path.dirname((spec and spec.origin) or "torch"), "")
