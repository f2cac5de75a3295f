"""The probe of torch's version."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError


def test_the_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.probe()
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(AutoshardError, match=r"torch 2\.4\.1\+cpu is too old.*2\.11"):
        compat.probe()
    monkeypatch.undo()
    monkeypatch.delattr(torch._guards, "TracingContext")
    with pytest.raises(AutoshardError, match=r"has no torch\._guards\.TracingContext"):
        compat.probe()
