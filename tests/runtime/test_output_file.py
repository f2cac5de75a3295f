"""A file that cannot be written leaves the old one, and the error says which and why."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from autoshard.errors import OutputError
from autoshard.planning.plan import Plan
from autoshard.runtime.output_file import write_whole


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    Plan("tp", 2).save(target)
    old, written = target.read_text(), Path.write_text

    def full(self: Path, data: str, **given: str) -> int:
        written(self, data[: len(data) // 2], **given)  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match=r"the plan .*plan\.json.*No space left.*is as it was"):
        Plan("tp", 4).save(target)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "new.html", "text", "page")
    assert target.read_text() == old and list(tmp_path.iterdir()) == [target]


def test_a_link_stays_one_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    target, link = tmp_path / "real", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(link, "new", "page")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        write_whole(tmp_path / "none" / "page", "text", "page")
