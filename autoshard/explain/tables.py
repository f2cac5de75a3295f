"""Tables and amounts as text that fits a terminal, or a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap

PIPE_WIDTH = 100


def page_width(width: int | None = None) -> int:
    """Columns to fill: `width` where it is given, else the terminal's, else 100; 60 at least."""
    if width is None:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns if terminal else PIPE_WIDTH
    return max(60, width)


def human(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def milliseconds(seconds: float) -> str:
    """0.00123 -> '1.23', three digits, without an exponent: 0.0000012 -> '0.001'."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}" if value < 1 else f"{value:.3g}"


def table(
    header: list[str], rows: list[list[str]], width: int = 10**6, right: tuple[int, ...] = ()
) -> str:
    """Columns padded to their widest cell; the last one wraps where the line would pass `width`.

    right: the columns that are aligned to the right.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    before = sum(widths[:-1]) + 2 * len(widths[:-1])
    last = min(widths[-1], max(width - before, 20))
    widths[-1] = last
    lines = []
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row[:-1], widths))
        ]
        wrapped = textwrap.wrap(
            row[-1], last, break_on_hyphens=False, break_long_words=False
        ) or [""]
        lines.append("  ".join([*cells, wrapped[0]]).rstrip())
        lines += [" " * before + rest for rest in wrapped[1:]]
    return "\n".join(lines)


def clipped(text: str, width: int) -> str:
    """`text`, or its start and an ellipsis, in at most `width` characters."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."
