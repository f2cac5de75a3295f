"""The form of an error text, and the user's line found in a stack trace."""

from __future__ import annotations

from autoshard.errors import message, source_line

TRACE = """
  File "train.py", line 12, in main
    loss = model(x)
  File "model.py", line 41, in forward
    q = q.view(b, n, self.heads, -1)
"""


def test_message() -> None:
    what = "6 heads are not divisible by tp=4"
    assert message(what) == f"{what}."
    assert (
        message(what, where="model.py:41", remedy="Use tp=2.") == f"{what} (model.py:41). Use tp=2."
    )


def test_source_line_is_the_innermost() -> None:
    assert source_line(TRACE) == "model.py:41"
    assert source_line("") is None
    assert source_line(None) is None
