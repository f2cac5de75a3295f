"""autoshard: one line shards a PyTorch model over the processes torchrun started.

    model = torch.compile(model, backend="autoshard", options={"mesh": {"tp": 2}})

The public names, and where they are defined, stand in `__init__.pyi`. They are loaded at first use:
importing the package costs nothing.
"""

import ast
import importlib
import importlib.metadata
from pathlib import Path
from typing import Any


def _homes() -> dict[str, str]:
    """Public name -> the module it is loaded from, as the stub beside this file says."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    return {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


_HOME = _homes()
__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "__version__":  # of the installed distribution, read when it is asked for
        return importlib.metadata.version("autoshard")
    if name not in _HOME:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    if _HOME[name] == __name__:
        return importlib.import_module(f"autoshard.{name}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
