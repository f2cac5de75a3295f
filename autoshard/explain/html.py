"""`Program.explain_html`: the plan as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
import os
from importlib import resources

from autoshard.compiling import Built
from autoshard.explain.page_data import page_data
from autoshard.runtime.files import write_whole


def write_page(built: Built, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`."""
    write_whole(path, page(built), "page of the plan")


def page(built: Built) -> str:
    """The page's text: the template page.html around the data of `built`."""
    file = resources.files("autoshard.explain").joinpath("page.html")
    template = file.read_text(encoding="utf-8")
    # "</script>" in a user's line of code would end the element
    data = json.dumps(page_data(built), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", data)
