"""Where an export may go, what it does beside it, and two exports to one path."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autoshard
from autoshard.cli import main
from autoshard.export import ExportError, check_target
from autoshard.export.destination import Destination
from autoshard.export.errors import ALONE


def write(out: Path) -> None:
    autoshard.export.huggingface(nn.Linear(2, 2), out)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full", "full exists, and holds 1 files or folders"),
        ("file", "file exists, and is no directory"),
        ("file/below", "file is no directory, so"),
        ("link", "link exists: a symbolic link to empty"),
        ("broken", "broken exists: a symbolic link to nowhere"),
        ("loop/out", "cannot be written to|is no directory"),  # Python 3.13 resolves a loop
        (".", "holds 5 files or folders"),
        ("empty/.", "is the working directory, which a finished directory cannot replace"),
        ("..", "exists, and holds"),
        ("x" * 300, "has more than 255 bytes"),
        ("nul\0", "cannot be written to: .*null"),
        ("\udcff", "cannot be written to: 'utf-8' codec"),
    ],
)
def test_a_place_that_cannot_be_had_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    if name == ".":
        (tmp_path / "loop").unlink()
    if name == "empty/.":
        name = "."
        monkeypatch.chdir(tmp_path / "empty")
    else:
        monkeypatch.chdir(tmp_path)
    before = names(tmp_path)

    class Untouched(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the model was read")

    with pytest.raises(ExportError, match=said):
        autoshard.export.huggingface(nn.Linear(2, 2), name)
    with pytest.raises(ExportError, match=said):
        autoshard.export.onnx(Untouched(), name, mesh={"tp": 1})
    with pytest.raises(ExportError, match=said):
        autoshard.export.trtllm(Untouched(), name, mesh={"tp": 1})
    assert names(tmp_path) == before


def test_the_command_line_refuses_before_it_loads_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["export", "huggingface", "no_such_module:factory", str(tmp_path)]) == 1
    assert "exists, and holds 1 files" in capsys.readouterr().err


def test_no_directory_of_the_user_is_touched(tmp_path: Path) -> None:
    for name in (".out.partial", "out.partial", ".out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("kept")
    write(tmp_path / "out")
    assert names(tmp_path) == [".out", ".out.partial", "out", "out.partial"]
    assert all((tmp_path / n / "mine").read_text() == "kept" for n in names(tmp_path) if n != "out")
    # the usual permissions, not those of a temporary directory
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_empty_directory_and_absent_parents(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    write(tmp_path / "a" / "b" / "c")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link" / "out")  # a link above the directory is followed
    assert names(tmp_path / "empty") == names(tmp_path / "a/b/c") == ["model.safetensors"]
    assert names(tmp_path / "real" / "out") == ["model.safetensors"]
    with pytest.raises(RuntimeError, match="stop"), Destination(tmp_path / "d" / "e" / "f", ALONE):
        raise RuntimeError("stop")
    assert names(tmp_path) == ["a", "empty", "link", "real"]


def test_the_name_beside_the_target_is_another_each_time(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt), Destination(tmp_path / "out", ALONE) as destination:
            seen.add(destination.partial.parent.name)
            assert destination.partial.name == "out"
            assert destination.partial.parent.parent == tmp_path
            raise KeyboardInterrupt
    assert len(seen) == 3 and names(tmp_path) == []


def test_two_exports_to_one_path_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Destination(out, ALONE) as first:
        (first.partial / "one").write_text("")
        with pytest.raises(ExportError, match="is being written by another .* one process"):
            write(out)
        write(tmp_path / "other")  # beside it is free
    assert names(out) == ["one"] and names(tmp_path) == ["other", "out"]
    with pytest.raises(ExportError, match="out exists, and holds 1"):
        write(out)


def test_threads_that_race_for_one_path_leave_one_whole_directory(tmp_path: Path) -> None:
    said: list[str] = []
    gate = threading.Barrier(4)

    def race(number: int) -> None:
        gate.wait()
        try:
            with Destination(tmp_path / "out", ALONE) as destination:
                for part in ("a", "b"):
                    (destination.partial / part).write_text(str(number))
            said.append("wrote")
        except ExportError as error:
            said.append(str(error))

    threads = [threading.Thread(target=race, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.count("wrote") == 1, said
    assert len({(tmp_path / "out" / part).read_text() for part in ("a", "b")}) == 1
    assert names(tmp_path) == ["out"]


def test_what_somebody_else_makes_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ExportError, match="was made by somebody else while the export ran"):
        with Destination(out, ALONE) as destination:
            (destination.partial / "ours").write_text("")
            out.mkdir()
            (out / "theirs").write_text("")
    assert names(out) == ["theirs"] and names(tmp_path) == ["out"]


def test_a_lock_that_a_killed_export_left_is_no_hindrance(tmp_path: Path) -> None:
    with Destination(tmp_path / "out", ALONE):
        (lock,) = [path for path in tmp_path.iterdir() if path.suffix == ".lock"]
    lock.write_text("")
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_a_lock_that_is_somebody_elses_link_is_not_followed(tmp_path: Path) -> None:
    with Destination(tmp_path / "out", ALONE):
        (lock,) = [path for path in tmp_path.iterdir() if path.suffix == ".lock"]
    (tmp_path / "out").rmdir()
    lock.symlink_to("precious")
    with pytest.raises(ExportError, match="cannot be written to"):
        write(tmp_path / "out")
    assert names(tmp_path) == [lock.name]


def each_writes_the_whole_model(folder: str) -> str:
    from torch import distributed

    from autoshard.runtime.mesh import start_world

    assert start_world("cpu") == 2
    distributed.barrier()
    try:
        write(Path(folder) / "out")
    except ExportError as error:
        return str(error)
    return "wrote"


def each_names_another_directory(folder: str) -> str:
    from autoshard.runtime.agreement import world_axis

    try:
        with Destination(Path(folder) / os.environ["RANK"], world_axis()):
            return "entered"
    except ExportError as error:
        return str(error)


def test_ranks_that_each_export_a_whole_model(gloo2: Any, tmp_path: Path) -> None:
    said = gloo2(each_writes_the_whole_model, str(tmp_path))
    assert said.count("wrote") == 1
    (refused,) = [text for text in said if text != "wrote"]
    assert "is being written by another export" in refused or "exists, and holds" in refused
    assert names(tmp_path / "out") == ["model.safetensors"]
    said = gloo2(each_names_another_directory, str(tmp_path))
    assert all(f"rank 0 writes {tmp_path}/0, and rank 1 {tmp_path}/1" in text for text in said)
    assert names(tmp_path) == ["out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ExportError, match="cannot be written to by this user"):
        check_target(tmp_path / "out")


def test_a_name_of_no_path(tmp_path: Path) -> None:
    for wrong in (None, 3, b"bytes"):
        with pytest.raises(ExportError, match="cannot be written to"):
            check_target(wrong)  # type: ignore[arg-type]
