"""The table of model families and export targets: each cell a checked result, or why not.

    make export-matrix [ARGS="Llama GPT-J --targets engine ONNX --tp 4 --vocabulary 50257"]

A small model of each family, with random weights and a vocabulary that no number of ranks divides,
is exported to each target, and what was exported is run on the CPU beside the unsharded model:

    Hugging Face   read by from_pretrained; names and shapes as save_pretrained writes them
    older          the same directory read by transformers 4.57, which is installed into build/
    ONNX           the ranks run by ONNX's reference evaluator
    engine         the ranks' TensorRT networks interpreted, and rank 0's built
    TensorRT-LLM   the ranks computed as TensorRT-LLM's classes would, in plain PyTorch

"equal" is within 1e-5 of the norm in float32, of TensorRT-LLM 2e-4. With a cache, a prompt and then
token by token are compared with the whole sequence. All else is what the exporter said. Cells are
remembered in build/export_matrix.json, so that some families or targets can be made anew; the table
is written to docs/export_matrix.md.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import older_transformers
import trtllm_reader
from autoshard.errors import AutoshardError
from autoshard.export import EngineSpec, huggingface, trtllm
from autoshard.export.rank_graph import plan_inference, read_weights
from autoshard.export.rank_graph.cache import check_cached
from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.serial_graph import WeightSource
from autoshard.export.to_onnx import onnx_program
from autoshard.export.to_tensorrt.build import build, checked_network
from autoshard.export.to_tensorrt.engine import LoneInterpreter, builder_module
from autoshard.verification.comparison import furthest
from families import FAMILIES, VOCABULARY, Family
from network_runs import interpret
from onnx_evaluator import evaluate
from side_by_side import difference_by_norm

PAGE = Path(__file__).parents[3] / "docs" / "export_matrix.md"
CACHED = " + cache"
MEMORY = PAGE.parents[1] / "build" / "export_matrix.json"
OLDER = f"transformers {older_transformers.VERSION}"
_WITHOUT_AND_WITH = ("ONNX", "ONNX" + CACHED, "engine", "engine" + CACHED)
COLUMNS = ("Hugging Face", OLDER, *_WITHOUT_AND_WITH, "TensorRT-LLM")
LENGTH = 32
DYNAMIC = {"batch": (1, 2, 4), "sequence": (1, 8, 16)}
TOLERANCE = 1e-5
LOGITS = 2e-4  # TensorRT-LLM takes every GELU by tanh
EQUAL = "equal"
TOKENS = ("input_ids", "decoder_input_ids")

Ranks = list[tuple[RankGraph, Mapping[str, torch.Tensor]]]
Feeds = list[dict[str, torch.Tensor]]
Held = Sequence[Mapping[str, torch.Tensor]] | None
Outputs = list[list[dict[str, torch.Tensor]]]
Run = Callable[[Ranks, Feeds, Held], Outputs]


def ranks_of(family: Family, model: nn.Module, tp: int, length: int | None) -> Ranks:
    """Each rank's graph and weights."""
    spec = EngineSpec(
        mesh={"tp": tp},
        example=((), family.call(2, 8)),
        dynamic={name: DYNAMIC[name] for name in family.varying(length is not None)},
        max_length=length,
    )
    plan, source = plan_inference(model, spec), WeightSource(model)
    graphs = [plan.rank_graph(rank) for rank in range(tp)]
    ranks: Ranks = []
    for graph in graphs:
        weights = read_weights(source, graph, graph.rank)
        if graph.encoder is not None:
            weights |= read_weights(source, graph.encoder, graph.rank)
        ranks.append((graph, weights))
    return ranks


def whole_call(family: Family) -> dict[str, torch.Tensor]:
    """Three rows of 12 tokens; of an encoder-decoder, behind a source of the example's sizes."""
    if not family.paired:
        return family.call(3, 12)
    source = family.call(3, 8)
    tokens = torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(3))
    return {**source, "decoder_input_ids": tokens}


def feeds_of(family: Family, cached: bool) -> Feeds:
    """Calls of two sizes; with a cache: a prompt, a part of one, then token by token."""
    if not cached:
        return [family.call(2, 8), family.call(3, 11, seed=2)]
    name = TOKENS[family.paired]
    tokens = whole_call(family)[name]
    parts = [(0, 7), (7, 9), *((i, i + 1) for i in range(9, 12))]
    numbers = [[torch.full((3,), n, dtype=torch.int32) for n in (a, b - a - 1)] for a, b in parts]
    return [
        {
            name: tokens[:, a:b],
            "past_lengths": past,
            "last_tokens": last,
        }
        for (a, b), (past, last) in zip(parts, numbers)
    ]


def outputs_of(model: nn.Module, call: Mapping[str, torch.Tensor], cached: bool) -> list[Any]:
    """The tensors that the model returns, in order."""
    options = {"use_cache": False} if cached else {}
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(**call, **options))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def run_onnx(ranks: Ranks, feeds: Feeds, held: Held = None) -> Outputs:
    """The ranks as ONNX models."""
    check_cached(*ranks[0])
    return evaluate([onnx_program(*rank).model_proto for rank in ranks], feeds, held)


def run_networks(ranks: Ranks, feeds: Feeds, held: Held = None) -> Outputs:
    """The ranks as TensorRT networks, of which the first is built."""
    made = [checked_network(builder_module(), *rank) for rank in ranks]
    check_cached(*ranks[0], LoneInterpreter(made[0]))
    build(made[0], io.BytesIO())
    return interpret(made, feeds, held)


RUNS: dict[str, Run] = {"ONNX": run_onnx, "engine": run_networks}
TARGETS = ("Hugging Face", "older", *RUNS, "TensorRT-LLM")


def compare(family: Family, model: nn.Module, ranks: Ranks, run: Run) -> str:
    """Every output of every rank beside the model's."""
    cached = ranks[0][0].max_length is not None
    feeds = feeds_of(family, cached)
    held: Held = None
    if cached:
        call = whole_call(family)
        parts = [feed[TOKENS[family.paired]] for feed in feeds]
        whole = outputs_of(model, call, True)[: 1 if family.paired else None]
        if family.paired:
            source = {name: value for name, value in call.items() if name != TOKENS[1]}
            encoders = [(graph.encoder, weights) for graph, weights in ranks if graph.encoder]
            held = [rank[0] for rank in run(encoders, [source], None)]
        split = [value.split([part.shape[1] for part in parts], 1) for value in whole]
        wanted = [[value[:, -1:] for value in one] for one in zip(*split)]
    else:
        wanted = [outputs_of(model, feed, family.cached) for feed in feeds]
    names = [port.tensor for port in ranks[0][0].outputs if port.role == "output"]
    worst = 0.0
    for found in run(ranks, feeds, held):
        for have, want in zip(found, wanted, strict=True):
            outputs = {name: have[name] for name in names}
            for value in want:  # a graph has its outputs in an order of its own
                alike = {n: difference_by_norm(out, value) for n, out in outputs.items()}
                best = min(alike, key=alike.__getitem__)
                worst = furthest([worst, alike[best]])
            if len(names) < len({tuple(value.shape) for value in want}):
                return f"WRONG: {len(names)} outputs, not {len(want)}"
    return EQUAL if worst < TOLERANCE else f"WRONG: differs by {worst:.1g} of the norm"


def directory(family: Family, model: nn.Module) -> str:
    """A Hugging Face directory, read again."""
    from safetensors import safe_open

    def contents(folder: Path) -> dict[str, list[int]]:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= {name: file.get_slice(name).get_shape() for name in file.keys()}
        return found

    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        huggingface(model, ours)
        model.save_pretrained(theirs)  # type: ignore[operator]
        if contents(ours) != contents(theirs):
            differ = sorted(set(contents(ours).items() ^ contents(theirs).items()))
            return f"WRONG: {differ[0]}"
        loaded = type(model).from_pretrained(ours).eval()  # type: ignore[attr-defined]
    call = family.call(2, 9)
    pairs = zip(outputs_of(loaded, call, family.cached), outputs_of(model, call, family.cached))
    return EQUAL if all(torch.equal(a, b) for a, b in pairs) else "WRONG: other outputs"


def windows(config: Any) -> list[int]:
    """The tokens that each layer sees."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None) or LENGTH
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else LENGTH for kind in kinds]


def checkpoint(family: Family, model: nn.Module, tp: int) -> str:
    """A TensorRT-LLM checkpoint, computed as its classes would."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        trtllm(model, out, mesh={"tp": tp}, dtype="float32", max_position_embeddings=LENGTH)
        config = json.loads((out / "config.json").read_text())
        ranks = [load_file(out / f"rank{rank}.safetensors") for rank in range(tp)]
    config["windows"] = windows(model.config)  # given to the runtime, not in the checkpoint
    call = family.call(1, 9)
    (wanted, *_) = outputs_of(model, call, True)
    found = trtllm_reader.logits(config, ranks, call["input_ids"][0])
    worst = difference_by_norm(found[:, : wanted.shape[-1]], wanted[0])
    return EQUAL if worst < LOGITS else f"WRONG: differs by {worst:.1g} of the norm"


def row(
    name: str,
    tp: int = 2,
    vocabulary: int = VOCABULARY,
    targets: Sequence[str] = TARGETS,
    plant: Callable[[Ranks], None] | None = None,
) -> dict[str, str]:
    """The cells of a family, by column. plant: changes the ranks, for tests."""
    family = FAMILIES[name]
    model = family.make(**({} if vocabulary == VOCABULARY else {"vocab_size": vocabulary}))
    cells: dict[str, str] = {}
    if "Hugging Face" in targets:
        cells["Hugging Face"] = said(lambda: directory(family, model))
    if "older" in targets:
        read = partial(older_transformers.read_by_older, model, family.call(2, 9))
        cells[OLDER] = said(read)
    runs = {name: run for name, run in RUNS.items() if name in targets}
    for suffix, length in (("", None), (CACHED, LENGTH)):
        if length is not None and not family.cached:
            cells |= {target + suffix: "–" for target in runs}
            continue
        made: Ranks = []

        def planned(made: Ranks = made, length: int | None = length) -> str:
            made += ranks_of(family, model, tp, length)
            if plant is not None:
                plant(made)
            return EQUAL

        reason = said(planned) if runs else EQUAL
        for target, run in runs.items():
            work = partial(compare, family, model, made, run)
            cells[target + suffix] = said(work) if reason == EQUAL else reason
    if "TensorRT-LLM" in targets:
        cells["TensorRT-LLM"] = said(lambda: checkpoint(family, model, tp))
    return cells


def said(work: Callable[[], str]) -> str:
    """What `work` returns, or in one line why it did not."""
    try:
        return work()
    except AutoshardError as refusal:
        return one_line(str(refusal))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return f"DEFECT: {type(error).__name__} at {place}: {one_line(str(error))}"


def quiet() -> None:
    """Without the progress and the warnings of transformers."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def one_line(text: str) -> str:
    """Without the folders of one machine."""
    text = re.sub(r"/[\w./-]+/(?=[\w-]+\.\w)", "", " ".join(text.split()))
    return text.replace("|", "\\|")[:400]


def page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """The table, reasons below it by number."""
    reasons: dict[str, int] = {}

    def cell(text: str) -> str:
        if text in (EQUAL, "–", "not run"):
            return text
        text = re.sub(r"^[A-Z]\w+(?= (has|takes) )", "The model", text)  # its class: one reason
        return f"[{reasons.setdefault(text, len(reasons) + 1)}](#reasons)"

    lines = [
        "# Families and targets",
        "",
        "Made by `make export-matrix`; not written by hand. A small model of each family, with a",
        f"vocabulary of {VOCABULARY}, is exported for tp=2 in float32, and what was exported is",
        "run on the CPU beside the unsharded model: *equal* is the same outputs within 1e-5 of",
        "their norm. A checkpoint of TensorRT-LLM is computed as its classes would, in plain",
        "PyTorch, within 2e-4. The Hugging Face directory is also read by an older version of",
        "transformers, of those that servers pin. A number is what the exporter said in place of",
        "a result; – is a model that does not decode.",
        "[export.md](export.md) says what each target is.",
        "",
        "| family | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, cells in rows.items():
        told = [cell(cells.get(column, "not run")) for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(told) + " |")
    lines += ["", "## Reasons", ""]
    lines += [f"{number}. {text}" for text, number in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """The number of cells that are wrong or defects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in FAMILIES]
    if unknown:
        parser.error(f"no family is named {', '.join(unknown)}")
    names, start = given.names or list(FAMILIES), time.monotonic()
    published = (given.tp, given.vocabulary) == (2, VOCABULARY)
    rows: dict[str, dict[str, str]] = {}
    if published and MEMORY.exists():
        rows = json.loads(MEMORY.read_text())
    bad = 0
    with ProcessPoolExecutor(given.jobs, initializer=quiet) as pool:
        options = (given.tp, given.vocabulary, given.targets)
        work = {pool.submit(row, name, *options): name for name in names}
        for count, done in enumerate(as_completed(work), 1):
            name, cells = work[done], done.result()
            rows.setdefault(name, {}).update(cells)
            print(f"{count}/{len(names)} {time.monotonic() - start:.0f}s {name}", flush=True)
            for column, cell in cells.items():
                print(f"    {column}: {cell}", flush=True)
                bad += re.match("WRONG|DEFECT", cell) is not None
            if published:
                MEMORY.parent.mkdir(exist_ok=True)
                MEMORY.write_text(json.dumps(rows, indent=1) + "\n")
                PAGE.write_text(page({name: rows.get(name, {}) for name in FAMILIES}))
    print(f"{bad} cells are wrong or defects")
    return min(bad, 99)


if __name__ == "__main__":
    sys.exit(main())
