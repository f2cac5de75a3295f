"""The page of a pipeline: its stages as a table, its schedule as a picture; without a script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
