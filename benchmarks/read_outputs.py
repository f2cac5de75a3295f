"""Outputs on cp read in eager code by ten operators, of many models, beside the serial model.

    torchrun --nproc-per-node 2 benchmarks/read_outputs.py [NAME ...] [--json PATH]

The tests' models, and language models of transformers that no test has, tiny: each is run once a
reading, with a loss on what was read, outside of the model, and that loss's gradients are compared
too. Prints a line a model that differs or is refused, and the counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.verification.comparison import difference, finite, largest

HELPERS = Path(__file__).parent.parent / "tests" / "helpers"
sys.path[:0] = [str(HELPERS), str(HELPERS / "architectures")]

READINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times one": lambda x: x * 1,
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16().float(),
    "clone": torch.clone,
    "first": lambda x: x[0],
    "columns": lambda x: x[..., :3],
    "from behind": lambda x: x[:, :-1] if x.dim() > 1 else x[:-1],
    "argmax": lambda x: x.gather(min(1, x.dim() - 1), x.argmax(min(1, x.dim() - 1), keepdim=True)),
    "cat": lambda x: torch.cat([x, x.clone()]),
    "view": lambda x: x.unsqueeze(0).flatten(0, 1),
}
FAMILIES = (
    "Arcee Bloom Codegen Cohere Cohere2 Ernie4_5 Exaone4 Falcon GPTBigCode GPTJ GPTNeo "
    "GPTNeoXJapanese Glm Glm4 Granite Helium MPT Nemotron Olmo Olmo2 Olmo3 Persimmon Phi Phi3 "
    "Qwen2 Seed_Oss SmolLM3 StableLm Starcoder2 XGLM BioGpt Apertus Jetmoe Granitemoe Phimoe Mamba"
).split()


def families() -> dict[str, Callable[[], nn.Module]]:
    """Causal language models of transformers by the type of their configuration."""
    import tiny_models  # of tests/helpers/architectures
    from transformers.models.auto import modeling_auto

    known = {
        name.replace("_", "").replace("-", ""): name
        for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    kinds = filter(None, (known.get(family.lower().replace("_", "")) for family in FAMILIES))
    return {
        kind: lambda kind=kind: tiny_models.build(f"transformers:{kind}")[0]  # type: ignore[misc]
        for kind in kinds
    }


def models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]]:
    """A factory and a batch by name: of the tests, and of `FAMILIES`."""
    from models import CASES  # of tests/helpers

    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {
        name: (make, lambda: {"input_ids": ids, "labels": ids.clone()})
        for name, make in families().items()
    }
    for name, case in CASES.items():
        found[f"test {name}"] = case.build, lambda case=case: case.make_batch(0)
    return found


def read(model: Any, batch: dict[str, Any], reading: Callable[..., Any]) -> list[torch.Tensor]:
    """What a reading makes of each output that has dims, and the gradients of a loss on it."""
    model.zero_grad()
    made = [
        reading(x)
        for x in pytree.tree_leaves(model(**batch))
        if isinstance(x, torch.Tensor) and x.dim() and x.is_floating_point()
    ]
    losses = [x.double().mul(torch.linspace(0, 1, x.numel()).view(x.shape)).mean() for x in made]
    if any(loss.requires_grad for loss in losses):
        sum(losses).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    wholes = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return [(x + 0).detach().double() for x in made] + [g.detach().double() for g in wholes]


def apart(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float) -> bool:
    """Whether a value or a gradient is not the serial model's."""
    if [x.shape for x in got] != [x.shape for x in want]:
        return True
    scale = max((largest(finite(x)) for x in want), default=1.0)
    return not all(
        bool((difference(a, b) <= tolerance * (b.abs().clamp(max=scale) + scale)).all())
        for a, b in zip(got, want)
    )


def main() -> None:
    """Every model, every reading: a line for each, and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts = {"models": 0, "equal": 0, "different": 0, "refused or not built": 0}
    for name, (make, batch) in models().items():
        if args.names and name not in args.names:
            continue
        try:
            torch._dynamo.reset()
            torch.manual_seed(0)
            serial = make().eval()
            torch.manual_seed(0)
            model = make().eval()
            model.load_state_dict(serial.state_dict())
            options = {"mesh": {"cp": 2}, "inner": "eager", "timeout": 300}
            run = torch.compile(model, backend="autoshard", options=options)
            wrong = []
            for what, reading in READINGS.items():
                want, got = read(serial, batch(), reading), read(run, batch(), reading)
                if apart(got, want, 2e-2 if what == "bfloat16" else 1e-4):
                    wrong.append(what)
        except Exception as error:
            counts["refused or not built"] += 1
            said = f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
        else:
            counts["models"] += 1
            counts["different"] += len(wrong)
            counts["equal"] += len(READINGS) - len(wrong)
            said = f"DIFFERENT: {', '.join(wrong)}" if wrong else "equal"
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{name}: {said}", flush=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(counts)
        if args.json is not None:
            args.json.write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
