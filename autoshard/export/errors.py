"""The error of the exporters, and where in the user's code a node comes from."""

from __future__ import annotations

from torch import fx

from autoshard.errors import AutoshardError, message, source_line


class ExportError(AutoshardError):
    """A model that the target format cannot hold, or that cannot be written."""


def export_error(what: str, node: fx.Node | None = None, remedy: str | None = None) -> ExportError:
    """An error that names the node and the user's line where a node is to blame."""
    where = None
    if node is not None:
        what = f"{node.name}: {what}"
        where = source_line(node.meta.get("stack_trace"))
    return ExportError(message(what, where=where, remedy=remedy))
