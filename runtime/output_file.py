"""Files that are written whole, or not at all: a full disk leaves the old one as it was."""

from __future__ import annotations

import os
from pathlib import Path

from autoshard.runtime.errors import OutputError, message


def write_whole(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Write a file beside `path`, and put it in its place. what: of the file, for the error.

    Raises OutputError, which is an OSError too, where the system refuses; what was at `path`
    is there still.
    """
    target = Path(os.path.realpath(path))  # of a link, the file that it stands for
    if target.exists() and not target.is_file():  # a pipe or a device, which nothing can replace
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        if target.exists():
            partial.chmod(target.stat().st_mode)
        os.replace(partial, target)
    except OSError as error:
        kept = "; the file that was there is as it was" if target.exists() else ""
        raise OutputError(
            message(
                f"the {what} {path} of {len(text.encode()):,} bytes cannot be written: "
                f"{error.strerror or error}{kept}",
                remedy="Make room there and allow this user to write, or give another path.",
            )
        ) from error
    finally:
        partial.unlink(missing_ok=True)
