"""Tables and amounts as text that fits a terminal, or a pipe."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

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
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int = 10**6,
    right: Collection[int] = (),
    shorten: int | None = None,
) -> str:
    """Columns padded to their widest cell.

    Where lines would pass `width`, the column `shorten` keeps the ends of its cells, which tell
    names of modules apart; without one the last column wraps. Either gets 20 characters at least.
    right: the columns that are aligned to the right.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    flexible = len(widths) - 1 if shorten is None else shorten
    others = sum(widths) - widths[flexible] + 2 * (len(widths) - 1)
    widths[flexible] = min(widths[flexible], max(width - others, 20))
    lines = []
    for row in [header, ["-" * w for w in widths], *rows]:
        first, more = list(row), []
        if shorten is None:
            room = max(widths[-1], 1)
            wrapped = textwrap.wrap(row[-1], room, break_on_hyphens=False, break_long_words=False)
            first[-1], more = (wrapped or [""])[0], wrapped[1:]
        elif len(row[shorten]) > widths[shorten]:
            first[shorten] = "..." + row[shorten][3 - widths[shorten] :]
        cells = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(first, widths))
        ]
        lines.append("  ".join(cells).rstrip())
        lines += [" " * others + rest for rest in more]
    return "\n".join(lines)


def clipped(text: str, width: int) -> str:
    """`text`, or its start and an ellipsis, in at most `width` characters."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."
