"""torch's structured trace, which tlparse reads: the private part of torch that debugging needs."""

from __future__ import annotations

from collections.abc import Callable

import torch._logging


def artifact(name: str, text: Callable[[], str]) -> None:
    """Record a text under `name` with the compilation in progress; `text` is called only where
    TORCH_TRACE asks for a trace.

    tlparse knows no other way in, and torch has no public name for it.
    """
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )
