"""One training step of every architecture that can be built tiny, on every kind of mesh.

    python benchmarks/model_matrix.py [--names NAME ...] [--share 30 --seed 1] [--results PATH]
    python benchmarks/model_matrix.py --write docs/model_matrix.md       # the table of the results

Architectures are those of transformers, and of timm and diffusers where they are installed, shrunk
by one procedure (tests/helpers/tiny_models.py). Two processes hold a rank each and train a step of
one model after another; the oracle is the unsharded model. A row is "equal", "refused" (an error of
autoshard's, with its text), "not tiny" (no model was made, and why) or "wrong": other gradients,
any other error, a process that ended or made no progress. Results are a line of JSON a row; a run
that was interrupted goes on from them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

MESHES = ("tp", "dp_shard", "cp", "pp", "ep")
TOLERANCE = 1e-4
"""Of all gradients together, in float32; a row beyond it is judged again in float64."""


def names() -> list[str]:
    """Every architecture, as "library name"."""
    import tiny_models

    return tiny_models.names()


def rows(asked: Sequence[str], share: int, seed: int) -> list[str]:
    """Those asked for, or one of `share` of all, drawn."""
    every = [name for name in names() if not asked or name in asked or name.split()[1] in asked]
    random.Random(seed).shuffle(every)
    return sorted(every[:: max(share, 1)])


def main() -> int:
    """Starts the processes again where they ended, until every row has a line; then counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--meshes", nargs="*", default=list(MESHES), choices=MESHES)
    parser.add_argument("--share", type=int, default=1, help="one of so many architectures, drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "model_matrix.jsonl")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds without progress")
    parser.add_argument("--again", nargs="*", default=[], help="what is said of rows to ask anew")
    parser.add_argument("--write", type=Path, help="write the table of the results there, and end")
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(rows(args.names, args.share, args.seed), args.meshes, args.results)
        return 0
    if args.write is not None:
        args.write.write_text(table(read(args.results)))
        return 0
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.again:
        kept = [one for one in read(args.results) if one["said"] not in args.again]
        args.results.write_text("".join(json.dumps(one) + "\n" for one in kept))
    asked = rows(args.names, args.share, args.seed)
    while not run(args.results, args.patience):
        continue
    found = [one for one in read(args.results) if one["model"] in asked]
    print(summary(found))
    return int(any(one["said"] == "wrong" for one in found))


def read(results: Path) -> list[dict[str, Any]]:
    """The rows that have been said; one that was begun and never ended is not among them."""
    lines = results.read_text().splitlines() if results.exists() else []
    found = {(one["model"], one["mesh"]): one for one in map(json.loads, lines) if one["said"]}
    return list(found.values())


def run(results: Path, patience: float) -> bool:
    """Runs the two processes to their end; False where they ended too early. The row that they were
    at is "wrong" then."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", *sys.argv]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    seen, since = -1, time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - since < patience:
            time.sleep(0.2)
            size = results.stat().st_size if results.exists() else 0
            if size != seen:
                seen, since = size, time.monotonic()
    finally:
        ended = process.poll()
        if ended is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if ended == 0:
        return True
    begun = json.loads(results.read_text().splitlines()[-1])
    why = f"no progress in {patience:g} s" if ended is None else f"a process ended ({ended})"
    say(results, begun["model"], begun["mesh"], "wrong", why)
    return False


def say(results: Path, model: str, mesh: str, said: str, why: str = "") -> None:
    with results.open("a") as file:
        file.write(json.dumps({"model": model, "mesh": mesh, "said": said, "why": why}) + "\n")
    if said:
        print(f"{model} on {mesh}=2: {said}{': ' if why else ''}{why}", flush=True)


def work(asked: Sequence[str], meshes: Sequence[str], results: Path) -> None:
    """A rank: every row that the results lack."""
    import tiny_models

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    known = {(one["model"], one["mesh"]) for one in read(results)}
    for name in asked:
        left = [mesh for mesh in meshes if not {(name, mesh), (name, "any")} & known]
        if not left:
            continue
        if dist.get_rank() == 0:
            say(results, name, "any", "")
        try:
            made = tiny_models.build(name)
        except Exception as error:
            made, reason = None, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        for mesh in left if made else ["any"]:
            if mesh == "ep" and made and not tiny_models.has_experts(made[0]):
                continue
            if dist.get_rank() == 0:
                say(results, name, mesh, "")
            said, why = step_of(*made, mesh) if made else ("not tiny", reason)
            told: list[Any] = [None, None]
            dist.all_gather_object(told, (said, why))
            order = ("wrong", "refused", "not tiny", "equal")
            worst = min(told, key=lambda one: order.index(one[0]))
            if dist.get_rank() == 0:
                say(results, name, mesh, *worst)
    dist.destroy_process_group()


def step_of(model: nn.Module, batch: dict[str, Any], mesh: str) -> tuple[str, str]:
    """What is said of a row, and why: a step in float32, and in float64 where that is not equal."""
    import autoshard

    why = ""
    for dtype in (torch.float32, torch.float64):
        try:
            off, worst = apart(model, batch, mesh, dtype)
        except autoshard.AutoshardError as error:
            return "refused", " ".join(str(error).split())[:600]
        except Exception as error:
            text = " ".join(str(error).split())
            cause = error.__cause__ or error
            kind = type(cause).__name__
            said = "refused" if "autoshard." in text and "Error:" in text else "wrong"
            return said, f"{kind}: {text[:600]}"
        if off <= TOLERANCE:
            return "equal", why
        why = f"{worst} is {off:.2g} off in {str(dtype)[6:]}"
    return "wrong", why


def apart(
    model: nn.Module, batch: dict[str, Any], mesh: str, dtype: torch.dtype
) -> tuple[float, str]:
    """How far the gradients are from the serial ones, as a share of their norm; which most."""
    import tiny_models
    from autoshard.verification.comparison import difference, finite, furthest, norm
    from autoshard.verification.subject import chunks, in_dtype

    torch._dynamo.reset()
    batch = in_dtype(batch, dtype)
    serial = copy.deepcopy(model).to(dtype)
    split = 2 if mesh in ("dp_shard", "ep") else 1
    parts = [part[1] for part in chunks(((), batch), split)]
    loss = sum(tiny_models.loss_of(serial(**part)) for part in parts) / split
    loss.backward()
    want = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
    ours = copy.deepcopy(model).to(dtype)
    options = {"mesh": {mesh: 2}, "inner": "aot_eager", "timeout": 200}
    run = torch.compile(ours, backend="autoshard", options=options)
    torch.manual_seed(0)
    tiny_models.loss_of(run(**parts[dist.get_rank() % split])).backward()
    got = {}
    for name, p in ours.named_parameters():
        grad = p.grad
        if grad is not None:
            got[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    missing = [name for name in want if name not in got and norm(want[name])]
    if missing:
        return math.inf, f"{missing[0]} has no gradient and"
    whole = math.hypot(*(norm(finite(grad)) for grad in want.values())) or 1.0
    each = {name: norm(difference(got[name], grad)) for name, grad in want.items() if name in got}
    worst = max(each, key=lambda name: furthest([each[name]]))
    return furthest([math.hypot(*each.values()) / whole]), worst


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Counts by library and mesh."""
    lines = []
    for library in sorted({one["model"].split()[0] for one in found}):
        for mesh in (*MESHES, "any"):
            count = Counter(
                one["said"] for one in found
                if one["mesh"] == mesh and one["model"].startswith(f"{library} ")
            )  # fmt: skip
            if count:
                of = sum(count.values())
                lines.append(f"{library} {mesh}: {count['equal']} of {of} equal, {dict(count)}")
    return "\n".join(lines)


def table(found: Sequence[dict[str, Any]]) -> str:
    """The page of the results: counts, then each row that is not equal, by its reason."""
    libraries = sorted({one["model"].split()[0] for one in found})
    lines = [
        "# Model matrix",
        "",
        "One training step beside the unsharded model, two processes, each architecture shrunk by",
        "one procedure. Written by `make model-matrix ARGS='--write docs/model_matrix.md'`.",
        "",
        "| library | mesh | equal | refused | wrong | of |",
        "|---|---|---|---|---|---|",
    ]
    for library in libraries:
        for mesh in MESHES:
            count = Counter(
                one["said"]
                for one in found
                if one["mesh"] == mesh and one["model"].startswith(f"{library} ")
            )
            if count:
                cells = (count["equal"], count["refused"], count["wrong"], sum(count.values()))
                lines.append(f"| {library} | {mesh}=2 | {' | '.join(map(str, cells))} |")
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in found:
        if one["said"] != "equal":
            why = re.sub(r"`[^`]*`|'[^']*'|[\d.,]+|at /\S+", "…", one["why"])[:100]
            where = "" if one["mesh"] == "any" else f" ({one['mesh']})"
            reasons[one["said"], why].append(one["model"].split()[1] + where)
    for said in ("wrong", "refused", "not tiny"):
        rows = sorted((why, models) for (kind, why), models in reasons.items() if kind == said)
        if rows:
            lines += ["", f"## {said.capitalize()}", "", "| why | architectures |", "|---|---|"]
            lines += [f"| {why.replace('|', '/')} | {', '.join(models)} |" for why, models in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
