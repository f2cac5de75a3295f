"""One training step of every architecture that can be built tiny, on every kind of mesh.

    make model-matrix                               # all of them; goes on where it was interrupted
    make model-matrix ARGS="--share 30 --seed 1"    # one of thirty, drawn
    make model-matrix ARGS="--names llama timm:vit" # these
    make model-matrix ARGS="--share 40 --inner inductor --results FILE --write PAGE"

Architectures are those of transformers, and of timm and diffusers where they are installed, shrunk
by one procedure (tiny_models.py). The oracle is the unsharded model. Ranks are threads of one
process, in lockstep (`verify`); two processes hold a rank each on pp, of a graph that breaks, of a
model that draws random numbers, and of a drawn tenth of the rest. A row is "equal", "refused" (an
error of autoshard's, with its text; that ranks run other graphs is one where their batches decide
it), "not tiny" (no model was made, and why), "torch" (torch's own `--inner` cannot run a step),
"random" (processes drew numbers, which no serial step draws) or "wrong": other gradients, any other
error, a process that ended or was silent. A line of JSON a row goes into `--results`, where those
asked so far lie, and the table of them into `--write`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ranks")]

import tiny_models  # noqa: E402

import autoshard  # noqa: E402
from autoshard.errors import CollectiveError, PlanMismatchError  # noqa: E402
from autoshard.model_source import copied  # noqa: E402
from autoshard.verification.comparison import difference, finite, furthest, norm  # noqa: E402
from autoshard.verification.subject import chunks, in_dtype  # noqa: E402
from gloo_pool import GlooPool, PoolError  # noqa: E402

MESHES = ("tp", "dp_shard", "cp", "pp", "ep")
PROCESSES = 0.1
"""The share of rows that threads could answer and processes are asked."""
PAGE = """# Every architecture

Made by `make model-matrix`; not written by hand. One training step of each architecture of
transformers, timm and diffusers that can be built tiny, beside the serial model's: all gradients
within 1e-4, or in float64. `tests/helpers/architectures/model_matrix.py` says what rows are, and
its file of results has each. Asked so far: {} of {} architectures, in an order that is drawn.
"""
TOLERANCE = 1e-4
"""Of all gradients together, in float32; a row beyond it is judged again in float64."""


def main() -> int:
    """Asks every row that the results lack, then writes the table; 1 where a row is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--meshes", nargs="*", default=list(MESHES), choices=MESHES)
    parser.add_argument("--share", type=int, default=1, help="one of so many architectures, drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inner", default="aot_eager", help="what compiles each rank's graph")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--patience", type=float, default=300.0, help="seconds of a row")
    parser.add_argument("--write", type=Path, default=ROOT / "docs" / "model_matrix.md")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    every = tiny_models.names()
    asked = [
        one for one in every if not args.names or {one.partition(":")[2], one} & set(args.names)
    ]
    random.Random(args.seed).shuffle(asked)
    asked = asked[:: args.share]
    known = {(one["model"], one["mesh"]): one for one in read(args.results)}
    pool, alone = GlooPool(2), GlooPool(1)
    for number, name in enumerate(asked, 1):
        if number % 8 == 0:  # what models leave in their processes is memory, too
            pool.stop()
            alone.stop()
        for mesh in args.meshes:
            if (name, mesh) in known:
                continue
            if known.get((name, args.meshes[0]), {}).get("said") == "not tiny":
                continue  # nor on the others
            drawn = random.Random(f"{args.seed} {name} {mesh}").random() < PROCESSES
            said, why = ask(alone, pool, name, mesh, drawn, args.patience, args.inner)
            why = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", why)  # paths of one machine
            known[name, mesh] = {"model": name, "mesh": mesh, "said": said, "why": why}
            with args.results.open("a") as file:
                file.write(json.dumps(known[name, mesh]) + "\n")
            because = f": {why}" if why else ""
            print(f"{number} of {len(asked)}: {name} on {mesh}=2: {said}{because}", flush=True)
    pool.stop()
    alone.stop()
    found = [one for one in known.values() if one["model"] in asked and one["said"]]
    args.write.write_text(table(found, len(every)))
    print("\n".join(counts(found)))
    return int(any(one["said"] == "wrong" for one in found))


def read(results: Path) -> list[dict[str, Any]]:
    """The rows that are known."""
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def ask(
    alone: GlooPool, pool: GlooPool, name: str, mesh: str, drawn: bool, patience: float, inner: str
) -> tuple[str, str]:
    """What threads of a process say of an architecture, and where they cannot, two processes."""
    try:
        (said, recipe), *_ = alone(
            _with_recipe, name, mesh, drawn, inner, pool_timeout=2 * patience
        )
    except Exception:  # processes say what it is
        said, recipe = None, None
    return said or row(pool, name, mesh, patience, recipe, inner)


def _with_recipe(name: str, mesh: str, drawn: bool, inner: str) -> Any:
    return by_threads(name, mesh, drawn, inner), tiny_models.FOUND.get(name)


def row(
    pool: GlooPool,
    name: str,
    mesh: str,
    patience: float = 180.0,
    recipe: Any = None,
    inner: str = "aot_eager",
) -> tuple[str, str]:
    """What is said of an architecture on a mesh, by the rank that says the worst, and why."""
    order = ("wrong", "refused", "torch", "random", "not tiny", "equal", "")
    try:
        told = pool(step_of, name, mesh, recipe, inner, pool_timeout=patience)
    except Exception as error:  # of a rank, too: a row's error is not the end of a night's rows
        pool.stop()
        what = "" if isinstance(error, PoolError) else f"{type(error).__name__}: "
        return "wrong", what + str(error).partition("\n")[0]
    worst = min(told, key=lambda one: order.index(one[0]))
    if worst[0] in order[:3]:
        pool.stop()  # what an error leaves behind is no other model's
    return worst  # type: ignore[no-any-return]


def _subject(name: str, mesh: str) -> Any:
    """A tiny model and its batch; or what is said where there is none: ("", "") where there is
    nothing to ask, ep of a model without experts."""
    warnings.simplefilter("ignore")
    try:
        model, batch = tiny_models.build(name)
    except ValueError as error:
        return "not tiny", str(error)[:600]
    return ("", "") if mesh == "ep" and not tiny_models.has_experts(model) else (model, batch)


def by_threads(
    name: str, mesh: str, drawn: bool = False, inner: str = "aot_eager"
) -> tuple[str, str] | None:
    """What is said of an architecture whose ranks are threads; None where only processes can say
    it, or were `drawn` to."""
    torch._dynamo.reset()
    made = _subject(name, mesh)
    if isinstance(made[0], str):
        return made
    if mesh == "pp" or drawn:
        return None
    model, batch = made
    for dtype in (None, torch.float64):
        try:
            given = {"mesh": {mesh: 2}, "inner": inner, "processes": False, "dtype": dtype}
            proof = autoshard.verify(model, (), batch, **given)
        except Exception:  # processes say what it is
            return None
        if proof.ok:
            return "equal", ""
    return None


def step_of(name: str, mesh: str, recipe: Any = None, inner: str = "aot_eager") -> tuple[str, str]:
    """On a rank: a step in float32, and in float64 where that is not equal."""
    if recipe is not None:
        tiny_models.FOUND[name] = recipe
    made = _subject(name, mesh)
    if isinstance(made[0], str):
        return made
    (model, batch), why = made, ""
    for dtype in (torch.float32, torch.float64):
        try:
            off, worst = apart(model, batch, mesh, dtype, inner)
        except Exception as error:
            if why and not _steps(model, batch, dtype):  # what float32 said is left
                break
            raised = getattr(error, "inner_exception", error)  # of Dynamo's BackendCompilerFailed
            text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:600]}"
            ours = isinstance(raised, autoshard.AutoshardError)
            if ours and not isinstance(raised, PlanMismatchError | CollectiveError):
                return "refused", text
            if plain := _plain(model, batch, mesh, inner):
                return "torch", plain
            return "refused" if ours and _branches(model, batch, mesh) else "wrong", text
        if off <= TOLERANCE:
            return "equal", why
        why = f"{worst} is {off:.2g} off in {str(dtype)[6:]}"
    if _draws(model, batch):
        return "random", why
    plain = _plain(model, batch, mesh, inner)
    return ("torch", plain) if plain else ("wrong", why)


def _plain(model: nn.Module, batch: dict[str, Any], mesh: str, backend: str) -> str:
    """What is wrong with a step of torch's own backend, on the batch of a rank, and on pp on one
    of a sample too; empty where it is as without it."""
    given = [_batches(batch, mesh)[0]]
    if mesh == "pp":
        samples = max(len(x) for x in batch.values() if isinstance(x, torch.Tensor) and x.dim())
        given.append(_batches(batch, mesh, samples)[0])
    for part in given:
        torch._dynamo.reset()
        serial, ours = copied(model), copied(model)
        try:
            for run in (serial, torch.compile(ours, backend=backend)):
                torch.manual_seed(0)
                _loss(run, pytree.tree_map_only(torch.Tensor, torch.clone, part)).backward()
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        off, worst = _furthest(_gradients(serial), _gradients(ours))
        if not off <= TOLERANCE:
            return f"{worst} is {off:.2g} off"
    return ""


def _branches(model: nn.Module, batch: dict[str, Any], mesh: str) -> bool:
    """Whether ranks run other graphs because of what is in their batches."""
    ran: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            ran[-1].append(gm.code)
            return gm(*args)

        return run

    for part in _batches(batch, mesh):
        torch._dynamo.reset()
        ran.append([])
        _loss(torch.compile(copied(model), backend=backend), part)
    return any(one != ran[0] for one in ran)


def _batches(batch: dict[str, Any], mesh: str, count: int = 0) -> list[dict[str, Any]]:
    """The batch of each data-parallel rank, or of each of `count` parts."""
    ranks = 2 if mesh in ("dp_shard", "ep") else 1
    parts = [part[1] for part in chunks(((), batch), count or ranks)]
    # views of one batch would have one version counter: what writes to one would spoil the other
    return pytree.tree_map_only(torch.Tensor, torch.clone, parts)  # type: ignore[no-any-return]


def _loss(model: Any, part: dict[str, Any]) -> torch.Tensor:
    """The loss of a call that draws the same numbers of numpy's and Python's as any other (masks of
    speech models), whose generators nobody shards."""
    np.random.seed(0)
    random.seed(0)
    return tiny_models.loss_of(model(**part))


def _steps(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the serial model has a kernel for each of its operators in a dtype."""
    try:
        tiny_models.loss_of(copied(model).to(dtype)(**in_dtype(batch, dtype))).backward()
    except RuntimeError:
        return False
    return True


def _draws(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Whether a step of the serial model moves torch's generator."""
    before = torch.get_rng_state()
    tiny_models.loss_of(copied(model)(**batch)).backward()
    return not torch.equal(before, torch.get_rng_state())


def apart(
    model: nn.Module, batch: dict[str, Any], mesh: str, dtype: torch.dtype, inner: str
) -> tuple[float, str]:
    """How far the gradients are from the serial ones, as a share of their norm; which most."""
    torch._dynamo.reset()
    serial, ours = (copied(model).to(dtype) for _ in range(2))
    parts = _batches(in_dtype(batch, dtype), mesh)
    torch.manual_seed(0)
    sum(_loss(serial, part) / len(parts) for part in parts).backward()
    options = {"mesh": {mesh: 2}, "inner": inner, "timeout": 200}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    run = torch.compile(ours, backend="autoshard", options=options)
    torch.manual_seed(0)
    _loss(run, parts[dist.get_rank() % len(parts)]).backward()
    return _furthest(_gradients(serial), _gradients(ours))


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients of the parameters that have one."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def _furthest(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> tuple[float, str]:
    """How far all gradients together are off, as a share of their norm, and which most."""
    missing = [name for name in want if name not in got and norm(want[name])]
    if missing:
        return math.inf, f"{missing[0]} has no gradient and"
    whole = math.hypot(*(norm(finite(grad)) for grad in want.values())) or 1.0
    each = {name: norm(difference(got[name], grad)) for name, grad in want.items() if name in got}
    worst = max(each, key=lambda name: furthest([each[name]]))
    return furthest([math.hypot(*each.values()) / whole]), worst


def counts(found: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of a table: what is said how often, by library and mesh."""
    said: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in found:
        said[one["model"].partition(":")[0], one["mesh"]][one["said"]] += 1
    kinds = ("equal", "refused", "wrong", "torch", "random", "not tiny")
    lines = [f"| library | mesh | {' | '.join(kinds)} |", "|---" * 8 + "|"]
    for (library, mesh), count in sorted(said.items()):
        cells = " | ".join(str(count[kind]) for kind in kinds)
        lines.append(f"| {library} | {mesh}=2 | {cells} |")
    return lines


def table(found: Sequence[dict[str, Any]], all_known: int) -> str:
    """The page: counts, then the rows that are neither equal nor "not tiny", by their reason."""
    lines = [PAGE.format(len({one["model"] for one in found}), all_known), *counts(found)]
    reasons: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        why = re.sub(r"'[^']*'|[\d.,]+|\(?/\S+", "…", one["why"])[:60].replace("|", "/")
        reasons[one["said"], why][one["model"]].append(one["mesh"])
    rows = []
    for (said, why), models in sorted(reasons.items()):
        if said not in ("equal", "not tiny"):
            each = [f"{model} ({'/'.join(meshes)})" for model, meshes in models.items()]
            rows.append(f"| {said} | {why} | {', '.join(each)} |")
    if rows:
        lines += ["", "| said | why | architectures |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
