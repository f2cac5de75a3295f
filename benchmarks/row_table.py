"""The table of a file's rows: published, predicted, the error, and medians by kind."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from autoshard.planning.cost import Cluster
from autoshard.verification.comparison import furthest
from published_rows import Question, Said, answer, proposed, samples_of, traced
from published_runs import markdown
from repeated_layers import Pieces
from row_words import CONSTANTS, Row, machine_of, program_of, rows_of

HEADER = (
    *("source", "model", "machine", "mesh", "batch", "how", "tokens/s a GPU", "predicted"),
    *("error", "GiB a GPU", "predicted", "error"),
)


class Outcome(NamedTuple):
    """A row with its published rate and what the estimate says, or the reason why it has none.
    assumed: as of its Cluster."""

    row: Row
    tokens: float
    said: Said | None
    reason: str = ""
    assumed: str = ""

    @property
    def error(self) -> float:
        """How far the prediction is from what was measured, as a part of it."""
        return self.said.tokens / self.tokens - 1 if self.said else 0.0


class Traces:
    """What was traced."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self.models = models
        self.made: dict[tuple[Question, str, str], Pieces] = {}

    def get(self, one: Question, row: Row, machine: Cluster) -> Pieces:
        """The pieces of a question."""
        key = one, repr(machine), row.routing  # seconds are in a piece: another program's are not
        if key not in self.made:
            self.made[key] = apart(traced, one, self.models[row.model], row, machine)
        return self.made[key]


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a process of its own, with which ends what tracing leaves behind.
    LookupError where it raises."""
    there, here = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_send, args=(here, function, *given))
    child.start()
    here.close()
    try:
        found = there.recv()
    except EOFError:
        found = LookupError("tracing ended its process")
    child.join()
    if isinstance(found, LookupError):
        raise found
    return found


def _send(to: Any, function: Callable[..., Any], *given: Any) -> None:
    try:
        to.send(function(*given))
    except Exception as error:  # a row whose model cannot be planned is listed with the reason
        said = " ".join(str(error).split())[:160]
        to.send(LookupError(f"{type(error).__name__}: {said}"))


def outcomes(body: Mapping[str, Any], named: Sequence[str] = ()) -> list[Outcome]:
    """Every row of a file, asked. named: only those with these numbers, or words of their source
    and model."""
    traces, found = Traces(body["models"]), list[Outcome]()
    rows = rows_of(body)
    for number, (row, reason) in enumerate(rows):
        words = f"{row.source} {row.model}"
        if named and not any(one == str(number) or one in words for one in named):
            continue
        try:
            if reason:
                raise LookupError(reason)
            if row.model not in body["models"]:
                raise LookupError(f"the file describes no {row.model}")
            machine = machine_of(row.machine, body["machines"])
            tokens = rate(row, [one for one, _ in rows])
            said = answer(row, body["models"][row.model], machine, traces.get)
            found.append(Outcome(row, tokens, said, assumed=machine.assumed))
        except LookupError as error:
            found.append(Outcome(row, row.tokens or 0.0, None, str(error.args[0])))
    return found


def proposal(row: Row, body: Mapping[str, Any]) -> list[str]:
    """The best layout of a row's model, world and global batch by `autoshard plan`: mesh, batch,
    how, tokens a second and device, its predicted gibibytes, the reason, and the processor seconds
    of tracing and search."""
    try:
        machine = machine_of(row.machine, body["machines"])
        return apart(_proposal, row, body["models"][row.model], machine)
    except LookupError as error:
        return ["", "", "", "", "", str(error.args[0]), ""]


def _proposal(row: Row, body: Mapping[str, Any], machine: Cluster) -> list[str]:
    start = time.process_time()
    found = proposed(row, body, machine)
    best, took = found.best, f"{time.process_time() - start:.0f}"
    if best is None:
        return ["", "", "", "", "", "nothing fits", took]
    how = [f"{best.microbatches} batches"]
    if best.pipeline:
        how.append(" ".join(map(str, best.pipeline.order)))
    if best.recomputation:
        how.append(f"{best.recomputation.spared / 2**30:.1f} GiB computed again")
    how += [f"{name}={value}" for name, value in found.options.get("memory", {}).items()]
    tokens = samples_of(row) * row.length / best.timing.step / row.world
    mesh = ",".join(f"{axis}={size}" for axis, size in best.mesh.items())
    held = f"{best.memory.total / 2**30:.1f}"
    batch = f"{best.batch}x{row.length}"
    return [mesh, batch, ", ".join(how), f"{tokens:,.0f}", held, found.reason(), took]


def proposals(found: Sequence[Outcome], body: Mapping[str, Any]) -> str:
    """The rows as a Markdown table, each beside the layout that is proposed."""
    header = ["source", "model", "machine", "mesh", "batch", "tokens/s a GPU", "predicted"]
    header += ["proposed", "batch", "how", "predicted", "GiB", "why", "seconds"]
    lines = [header, ["---"] * len(header)]
    for one in found:
        own = cells(one)
        lines.append([*own[:5], *own[6:8], *proposal(one.row, body)])
    return markdown(lines)


def rate(row: Row, rows: Sequence[Row]) -> float:
    """Tokens a second of a row. Where only operations are printed, these count as in a row of the
    same model and length that has both."""
    if row.tokens is not None:
        return row.tokens
    for one in rows:
        of, own = ((each.model, each.length, bool(each.lora)) for each in (one, row))
        if of == own and one.tokens and one.tflops and row.tflops:
            return row.tflops * one.tokens / one.tflops
    raise LookupError("neither tokens are published, nor in a row alike what operations count")


def memory_error(one: Outcome) -> float:
    """How far the predicted memory is above the published one, as a share; 0 where none is."""
    if one.said is None or not one.row.gibibytes:
        return 0.0
    return one.said.gibibytes / one.row.gibibytes - 1


def cells(one: Outcome) -> list[str]:
    """An outcome's row of the table."""
    row, said = one.row, one.said
    how = [] if row.checkpointing in (None, "none") else [str(row.checkpointing)]
    how += [row.float8 if isinstance(row.float8, str) else "float8"] * bool(row.float8)
    how += ["async tp"] * row.async_tp + ["LoRA"] * bool(row.lora)
    how += [f"{row.schedule} {row.virtual or ''}".strip()] * (row.mesh.get("pp", 1) > 1)
    how += [f"{row.microbatches} batches"] * ((row.microbatches or 1) > 1)
    rates = [f"{one.tokens:,.0f}" if one.tokens else "", "", ""]
    memory = [f"{row.gibibytes:.1f}" if row.gibibytes else "", "", ""]
    if said is not None:
        rates[1:] = [f"{said.tokens:,.0f}", f"{100 * one.error:+.0f}%"]
        if row.gibibytes:
            memory[1:] = [f"{said.gibibytes:.1f}", f"{100 * memory_error(one):+.0f}%"]
    mesh = ",".join(f"{axis}={size}" for axis, size in row.mesh.items())
    batch = f"{row.batch}x{row.length}"
    return [row.source, row.model, row.machine, mesh, batch, ", ".join(how), *rates, *memory]


def table(found: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    return markdown([HEADER, ["---"] * len(HEADER), *map(cells, found)])


def named(one: Outcome) -> str:
    """Why a row is further than 35%, by its own words; "" where no reason is known."""
    note = one.row.note.lower()
    for words, why in (
        ("sanity", "the source does not state its mesh"),
        ("wrong cudnn", "the source says that its times are inflated by a library"),
        ("not stated", "the source leaves a part of the run open"),
    ):
        if words in note:
            return why
    if "ep" in program_of(one.row).shared:
        return "its experts are run by transformers' loop, and rows do not travel: not priced"
    if one.row.model.startswith("gpt-oss") and program_of(one.row).thrifty:
        return "Megatron's attention with sinks is priced as causal attention without"
    return ""


def orders(found: Sequence[Outcome]) -> tuple[int, int]:
    """Of pairs of layouts of one model, on one machine and of one length, how many are in the
    published order, and all."""
    right, every = 0, 0
    for a, b in itertools.combinations([one for one in found if one.said], 2):
        same = [(x.row.model, x.row.machine, x.row.length) for x in (a, b)]
        if same[0] == same[1] and a.tokens != b.tokens:
            assert a.said and b.said
            right += (a.said.tokens > b.said.tokens) == (a.tokens > b.tokens)
            every += 1
    return right, every


def summary(found: Sequence[Outcome]) -> str:
    """Medians by kind, the order of layouts, rows without an answer, and those far off."""
    asked = [one for one in found if one.said]
    kinds: dict[str, list[float]] = {}
    for one in asked:
        for kind in (one.row.kind, "all"):
            kinds.setdefault(kind, []).append(abs(one.error))
        if one.row.gibibytes:
            kinds.setdefault("memory", []).append(abs(memory_error(one)))
    lines = [
        f"{kind}: {len(off)} rows, median error {100 * statistics.median(off):.0f}%, "
        f"largest {100 * furthest(off):.0f}%"
        for kind, off in sorted(kinds.items())
    ]
    right, every = orders(found)
    if every:
        tau = 2 * right / every - 1
        lines.append(
            f"order of runs of one model on one machine: {right} of {every} pairs, {tau:+.2f}"
        )
    lines.append(f"constants of programs: {len(CONSTANTS)}, rows: {len(asked)}")
    lines += [f"not asked: {cells(one)[:4]}: {one.reason}" for one in found if not one.said]
    far = [(one, named(one)) for one in asked if not abs(one.error) <= 0.35]
    far += [
        (one, "its memory, not explained") for one in asked if not abs(memory_error(one)) <= 0.35
    ]
    lines += [
        f"beyond 35%: {' '.join(cells(one)[:4])}: {why or 'not explained'}" for one, why in far
    ]
    assumed = {one.row.machine: one.assumed for one in asked if one.assumed}
    lines += [
        f"efficiencies of {name} that its data sheet leaves out: those of {known}"
        for name, known in assumed.items()
    ]
    return "\n".join(lines)
