"""`Program.explain_html`: the plan as one HTML page that needs no network and no other file, around
its data as JSON; and the page of a pipeline: its stages as a table, its schedule as a picture,
without a script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from autoshard.compiling import Built
from autoshard.explain.alternatives import Alternative
from autoshard.explain.costs import Cost, named
from autoshard.explain.facts import Facts, ParameterGroup
from autoshard.explain.module_graph import Json, module_graph
from autoshard.runtime.collectives import I, shard_dim
from autoshard.runtime.files import write_whole

# More points than a page has pixels in width say nothing more.
_POINTS = 1200


def page_data(built: Built) -> Json:
    """Everything the page draws; JSON holds it."""
    facts = Facts(built)
    timeline = [(moment.node or moment.phase, moment.bytes) for moment in facts.moments]
    return {
        "mesh": built.mesh.sizes,
        "axis": built.axis.name,
        "hardware": built.machine.name,
        "graph": module_graph(facts),
        "parameters": [_parameter(group) for group in facts.parameters],
        "collectives": [_collective(one) for one in facts.costs],
        "alternatives": [_alternative(one) for one in facts.alternatives],
        "memory": {
            kind: getattr(facts.memory, kind)
            for kind in ("parameters", "gradients", "optimizer", "activations", "buffers")
        },
        "timeline": _thinned(timeline),
        "forward": sum(1 for moment in facts.moments if moment.phase == "forward"),
        "nodes": len(timeline),
    }


def _thinned(timeline: list[tuple[str, int]]) -> list[list[Any]]:
    """At most `_POINTS` points, each the highest of its stretch: [position, name, bytes]."""
    step = max(1, -(-len(timeline) // _POINTS))
    points = []
    for start in range(0, len(timeline), step):
        stretch = timeline[start : start + step]
        at = max(range(len(stretch)), key=lambda i: stretch[i][1])
        points.append([start + at, *stretch[at]])
    return points


def _parameter(group: ParameterGroup) -> Json:
    return {
        "name": named(group.names),
        "count": len(group.names),
        "shape": group.shape,
        "states": dict(group.states),
        "split": [axis for axis, state in group.states.items() if shard_dim(state) is not None],
        "choice": group.choice,
        "whole": all(state == I for state in group.states.values()),
        "because": group.because,
        "line": group.line,
        "bytes": group.bytes,
    }


def _collective(one: Cost) -> Json:
    return {
        "op": one.op,
        "axis": one.axis,
        "phase": one.phase,
        "change": one.change,
        "bytes": one.bytes,
        "count": one.count,
        "seconds": one.seconds,
        "hidden": one.hidden,
        "modules": named(one.modules),
        "line": one.line,
        "code": one.code,
    }


def _alternative(one: Alternative) -> Json:
    return {
        "name": one.name,
        "mesh": " ".join(f"{name}={size}" for name, size in one.mesh.items()),
        "sent": round(one.sent),
        "compute": one.timing.compute,
        "exposed": one.timing.exposed,
        "update": one.timing.optimizer,
        "seconds": one.seconds,
        "stored": one.stored,
        "activations": one.profile.activations.saved,
        "batches": one.batches,
    }


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


Bar = tuple[str, float, float]
"""An action on a rank: its text, and when it starts and ends, in seconds."""

_WIDTH, _ROW = 1200.0, 26
_COLOURS = {"F": "#9ecae9", "B": "#f2b98a", "I": "#f2b98a", "W": "#a8d5a2"}
_STYLE = """
body { font: 14px/1.5 sans-serif; margin: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #ddd; }
svg text { font: 10px sans-serif; } .wide { overflow-x: auto; } li { margin: .3em 0; }
"""


def pipeline_page(
    summary: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str,
    stages: Sequence[str],
    ranks: Sequence[Sequence[Bar]],
) -> str:
    """The page's text. rows: a stage each, under `header`. ranks: what each does, and when."""
    head, *body = [_row("th", header), *(_row("td", row) for row in rows)]
    parts = [
        "<!doctype html><html><head><meta charset='utf-8'><title>Pipeline</title>",
        f"<style>{_STYLE}</style></head><body><h1>Pipeline</h1><p>{escape(summary)}</p>",
        f"<table>{head}{''.join(body)}</table><p>{escape(note)}</p>",
        "<h2>Schedule</h2><p>F: forward, B: backward, I and W: its parts by inputs and by weights, "
        "with the number of the micro-batch; as long as the search prices them.</p>",
        f"<div class='wide'>{_picture(ranks)}</div><h2>Stages</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in stages),
        "</ul></body></html>\n",
    ]
    return "".join(parts)


def _row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _picture(ranks: Sequence[Sequence[Bar]]) -> str:
    end = max((bar[2] for bars in ranks for bar in bars), default=0.0) or 1.0
    shapes = []
    for rank, bars in enumerate(ranks):
        y = rank * _ROW
        shapes.append(f"<text x='0' y='{y + 15}'>rank {rank}</text>")
        for text, start, stop in bars:
            x, width = 50 + _WIDTH * start / end, _WIDTH * (stop - start) / end
            said = escape(f"{text}: {1e3 * start:.3g} to {1e3 * stop:.3g} ms")
            shapes.append(
                f"<g><title>{said}</title><rect x='{x:.2f}' y='{y}' width='{width:.2f}' "
                f"height='{_ROW - 4}' fill='{_COLOURS[text[0]]}' stroke='#fff'/>"
                + (f"<text x='{x + 2:.2f}' y='{y + 15}'>{text}</text>" if width > 18 else "")
                + "</g>"
            )
    height = _ROW * len(ranks)
    return f"<svg width='{_WIDTH + 60:.0f}' height='{height}'>{''.join(shapes)}</svg>"
