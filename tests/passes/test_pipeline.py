"""What AUTOSHARD_* variables show and leave out; and the golden text of every pass."""

from __future__ import annotations

import gc
import inspect
import io
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_samples import OPTIONS, SAMPLES, Grouped, Two
from torch import fx, nn

import autoshard
from autoshard.compiling import debugging
from autoshard.compiling.debugging import DebugWatch, Settings, refuse_unsharded
from autoshard.compiling.rendering import render
from autoshard.errors import AutoshardError, ConfigError
from autoshard.passes import pipeline
from autoshard.passes.base import Context, Watch
from autoshard.passes.canonicalize import Canonicalize
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from golden_text import golden
from models_plain import MLP


def trace(model: nn.Module, x: torch.Tensor, mesh: dict[str, int], **options: Any) -> Program:
    torch.compiler.reset()
    return autoshard.trace(model, (x,), mesh=mesh, **options)


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], str]:
    """Reads what AUTOSHARD_DUMP wrote: (pass, phase, before or after)."""
    monkeypatch.setenv("AUTOSHARD_DUMP", str(tmp_path / "graphs"))

    def read(name: str, phase: str, side: str) -> str:
        middle = f"{name}.{phase}" if phase else name
        (path,) = (tmp_path / "graphs").glob(f"*-{middle}.rank0.{side}.txt")
        return path.read_text()

    return read


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_text_of_each_pass(
    name: str, dumped: Callable[[str, str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shape, mesh, phase = SAMPLES[name]
    monkeypatch.setenv("AUTOSHARD_STOP_AFTER", name)
    try:
        options = OPTIONS.get(name, {})
        made = trace(model(), torch.ones(shape), mesh, **options)
        assert made.running is not None  # runs the passes after autograd
    except AutoshardError as error:
        assert f"AUTOSHARD_STOP_AFTER={name}" in str(error)
    before, after = (dumped(name, phase, side) for side in ("before", "after"))
    assert before != after, "the sample does not show what the pass does"
    golden(f"passes/{name}", f"{before}\n--- {name}\n\n{after}")


def test_every_pass_has_its_golden_text() -> None:
    assert tuple(SAMPLES) == pipeline.ORDER


@pytest.mark.parametrize("one", [one for stage in pipeline.PIPELINE for one in stage.passes])
def test_every_pass_keeps_the_contract(one: Any) -> None:
    """A frozen dataclass in a file and with a test file of its name; `rewrite` and `emit` only."""
    assert one.__dataclass_params__.frozen and isinstance(one.optional, bool)
    assert one.__module__ == f"autoshard.passes.{one.name}"
    assert list(inspect.signature(one.rewrite).parameters) == ["self", "gm", "ctx", "report"]
    assert list(Path(__file__).parent.rglob(f"test_{one.name}.py"))
    source = inspect.getsource(sys.modules[one.__module__])
    assert source.startswith(f'"""{one.name}: ') and "before" in source and "after" in source
    for call in (".call_function(", ".recompile(", ".lint(", "os.environ", "print("):
        assert call not in source, f"{call} is not a pass's"
    imported = set(re.findall(r"autoshard\.passes\.(\w+) import", source))
    shared = {"base", "bucketing", "index_functions", "index_values", "layouts", "mask_meaning"}
    shared |= {"expert_routes", "expert_rows", "memory_order"}
    assert imported <= shared, "a pass imports no pass"


def test_the_runner_keeps_the_order_and_refuses_passes_of_another_graph() -> None:
    names: list[str] = []

    class Named(Watch):
        def runs(self, name: str) -> bool:
            names.append(name)
            return False

    gm, ctx = fx.symbolic_trace(nn.Identity()), Context(Axis("tp", 1, 0, ""))
    given = (ExpandGroupedHeads(), Canonicalize())
    assert pipeline.run_stage("serial", given, gm, ctx, Named()) == []
    assert names == ["canonicalize", "expand_grouped_heads"]
    with pytest.raises(ValueError, match="canonicalize in the stage 'local', whose passes are loc"):
        pipeline.run_stage("local", given[1:], gm, ctx)


def test_dumps_are_numbered_in_the_order_of_the_passes(
    tmp_path: Path, dumped: Callable[[str, str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    trace(MLP(), torch.ones(8, 64), {"tp": 2})
    names = sorted(path.name.partition("-")[2] for path in (tmp_path / "graphs").iterdir())
    passes = [*(one.name for one in pipeline.PIPELINE[0].passes), "localize", "number_draws"]
    passes.remove("float8_products")  # an option asks for it
    passes = [name for name in passes if not name.startswith(("unflatten_", "shift_"))]  # cp does
    assert names == [
        f"{i:02}-{name}.rank3.{side}.txt"
        for i, name in enumerate(passes)
        for side in ("after", "before")
    ]


def program_text(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """The forward and backward graphs of two linears on dp_shard=2, after all passes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = trace(Two(), torch.ones(4, 8), {"dp_shard": 2})
    assert made.joint.backward is not None
    return render(made.joint.forward) + render(made.joint.backward)


def test_disable_leaves_out_optional_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathers(text: str) -> int:
        return text.count("all_gather(")

    plain = program_text(monkeypatch)
    assert gathers(plain) < gathers(
        program_text(monkeypatch, AUTOSHARD_DISABLE="bucket_parameters,schedule_collectives")
    )
    everything = program_text(monkeypatch, AUTOSHARD_DISABLE="all")
    stopped = program_text(monkeypatch, AUTOSHARD_DISABLE="0", AUTOSHARD_STOP_AFTER="data_parallel")
    assert everything == stopped != plain


@pytest.mark.parametrize(
    "environment,said",
    [
        ({"AUTOSHARD_DISABLE": "localize"}, "without this pass the program is wrong"),
        ({"AUTOSHARD_UNSHARDED": "yes"}, "is neither 0 nor 1"),
        ({"AUTOSHARD_DISABLE": "bucket_parameter"}, "Did you mean 'bucket_parameters'"),
        ({"AUTOSHARD_STOP_AFTER": "zzz"}, "The passes are canonicalize, "),
        ({"AUTOSHARD_DEBUG": "5"}, "0, 1, 2 or 3"),
    ],
)
def test_what_cannot_be_obeyed_is_an_error(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.of(environment)


def test_stopping_before_a_needed_pass_says_where_the_graphs_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUTOSHARD_STOP_AFTER", "invariant_random")
    with pytest.raises(AutoshardError, match="stopped before localize.*Set AUTOSHARD_DUMP"):
        trace(MLP(), torch.ones(8, 64), {"tp": 2})
    monkeypatch.setenv("AUTOSHARD_DUMP", str(tmp_path))
    with pytest.raises(AutoshardError, match=f"The graphs so far are in {tmp_path}"):
        trace(MLP(), torch.ones(8, 64), {"tp": 2})


def test_a_cache_keeps_apart_what_differs_and_what_is_to_be_seen() -> None:
    def key(**environment: str) -> str:
        return DebugWatch(Settings.of(environment)).key()

    assert key() == key() != key(AUTOSHARD_DISABLE="all")
    assert key(AUTOSHARD_DISABLE="all") == key(AUTOSHARD_DISABLE="all")
    assert key(AUTOSHARD_DUMP="graphs") != key(AUTOSHARD_DUMP="graphs")


def test_unsharded_is_refused_where_gradients_would_be_lost() -> None:
    assert Settings.of({"AUTOSHARD_UNSHARDED": "1"}).unsharded
    refuse_unsharded({"tp": 4, "dp_shard": 1})
    with pytest.raises(ConfigError, match="dp_shard=2: gradients would not be reduced"):
        refuse_unsharded({"tp": 4, "dp_shard": 2})


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What `autoshard.*` logs, at the levels the code under test sets."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    top, handler = logging.getLogger("autoshard"), Keep()
    level, graphs = top.level, logging.getLogger("autoshard.graphs").level
    top.addHandler(handler)
    yield found
    top.removeHandler(handler)
    top.setLevel(level)
    logging.getLogger("autoshard.graphs").setLevel(graphs)


def test_levels_of_logging(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for level in ("0", "1", "2", "3"):
        monkeypatch.setenv("AUTOSHARD_DEBUG", level)
        trace(Grouped(), torch.ones(2, 3, 16), {"tp": 2})
        seen.append("\n".join(logged))
        logged.clear()
    assert seen[0] == ""
    assert "expand_grouped_heads: 0 rewritten, 1 declined" in seen[1] and "no need" not in seen[1]
    assert "kv heads 2 % tp 2 == 0: no need" in seen[2] and "return (" not in seen[2]
    assert "localize left\n%q.weight" in seen[3] and "return (" in seen[3]


def test_artifacts_are_in_torchs_structured_trace() -> None:
    found: dict[str, str] = {}

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            metadata: Any = getattr(record, "metadata", {})
            name = metadata.get("artifact", {}).get("name", "")
            if name.startswith("autoshard_"):
                found[name.partition("-")[2]] = str(getattr(record, "payload", ""))

    trace_log, handler = logging.getLogger("torch.__trace"), Keep()
    level = trace_log.level
    trace_log.addHandler(handler)
    trace_log.setLevel(logging.DEBUG)
    try:
        made = trace(MLP(), torch.ones(8, 64), {"tp": 2})
    finally:
        trace_log.removeHandler(handler)
        trace_log.setLevel(level)
    assert found["plan"] == made.plan.text()
    assert found["explain"].startswith("autoshard: tp=2, ") and "because" in found["explain"]
    assert found["06-localize_after"] == render(made.graph_module, axes=made.mesh.axes)


def refused_on_rank_one() -> str:
    """Rank 1 leaves out passes that rank 0 runs."""
    import os

    if os.environ["RANK"] == "1":
        os.environ["AUTOSHARD_DISABLE"] = "all"
    try:
        compiled = torch.compile(MLP(), backend="autoshard", options={"inner": "eager"})
        compiled(torch.ones(8, 64))
    except Exception as error:
        return str(error)
    finally:
        os.environ.pop("AUTOSHARD_DISABLE", None)
    return "ran"


def test_ranks_that_leave_out_different_passes_do_not_run_together(gloo2: Any) -> None:
    for said in gloo2(refused_on_rank_one):
        assert "disagree on the plan" in said
        assert "passes left out []" in said and "'bucket_parameters'" in said


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_compilation_says_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    def said(quiet: str) -> str:
        monkeypatch.setenv("AUTOSHARD_QUIET", quiet)
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        doing = debugging.WorkShown()
        with doing("plan"):  # of nobody who waits for a first step
            assert not stream.getvalue()
        before = gc.get_threshold()
        for _ in range(2):
            assert gc.get_threshold() == before
            with doing("compile forward", begins=True):
                assert gc.get_threshold()[2] in (1 << 30, 0)  # Python 3.14 says 0 of any
                end = time.monotonic() + (0.2 if quiet == "1" else 10)
                while not stream.getvalue() and time.monotonic() < end:
                    time.sleep(0.01)
                with doing("region 2 of 3"):
                    pass
        assert gc.get_threshold() == before
        return stream.getvalue()

    monkeypatch.setattr(debugging, "PATIENCE", 0.0)
    assert said("1") == ""
    text = said("0")
    if terminal:
        assert "autoshard: compile forward, region 2 of 3 (0 s)\r" in text
        assert text.endswith("\r\x1b[K")
    else:
        assert text == "autoshard: still at compile forward (0 s)\n"
