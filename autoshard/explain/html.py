"""`Program.explain_html`: the plan as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

from autoshard.explain.page_data import page_data
from autoshard.program import Program


def write_page(program: Program, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`."""
    Path(path).write_text(page(program), encoding="utf-8")


def page(program: Program) -> str:
    """The page's text: the template page.html around the data of `program`."""
    template = resources.files("autoshard.explain") / "page.html"
    # "</script>" in a user's line of code would end the element
    data = json.dumps(page_data(program), separators=(",", ":")).replace("<", "\\u003c")
    return template.read_text(encoding="utf-8").replace("__DATA__", data)
