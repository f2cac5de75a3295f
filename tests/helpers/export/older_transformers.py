"""Hugging Face directories read by an older transformers, in a process of its own.

    make export-matrix ARGS="--targets older"

Servers pin versions of transformers from before parameters were stored otherwise in memory than in
published checkpoints (experts in one stack, other names). The older version is installed into
build/, beside the one that is tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export import huggingface

VERSION = "4.57.6"
#: transformers, what it pins below the versions of today, and what those need.
PACKAGES = (
    f"transformers=={VERSION}",
    "huggingface_hub==0.36.2",
    "tokenizers==0.22.2",
    *("requests", "urllib3", "idna", "charset_normalizer", "certifi"),
)
FOLDER = Path(__file__).parents[3] / "build" / f"transformers-{VERSION}"
TOLERANCE = 1e-5

READ = """
import json, sys
import torch, transformers
from safetensors.torch import load_file

folder, name = sys.argv[1:]
assert transformers.__version__ == "%s", transformers.__version__
transformers.logging.set_verbosity_error()
kind = getattr(transformers, name)
model, told = kind.from_pretrained(folder + "/model", output_loading_info=True)
# It has some buffers in its files that are computed again now, by it as well (Swin's).
told["missing_keys"] = set(told["missing_keys"]) - {name for name, _ in model.named_buffers()}
call = load_file(folder + "/call.safetensors")
with torch.no_grad():
    outputs = model.eval()(**call).to_tuple()
first = next(value for value in outputs if isinstance(value, torch.Tensor) and value.ndim)
wanted = load_file(folder + "/wanted.safetensors")["first"]
told = {what: sorted(map(str, names)) for what, names in told.items() if names}
alike = first.shape == wanted.shape
told["error"] = float((first - wanted).norm() / wanted.norm()) if alike else 9.0
print(json.dumps(told))
"""


def install() -> None:
    """Puts the older version into FOLDER, once. Raises CalledProcessError where pip fails."""
    if not (FOLDER / "transformers").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(FOLDER), *PACKAGES], check=True)


def read_by_older(model: nn.Module, call: Mapping[str, torch.Tensor]) -> str:
    """`equal`, or what the older version says of the directory of `model`."""
    from safetensors.torch import save_file

    install()
    with torch.no_grad():
        outputs: tuple[Any, ...] = model(**call).to_tuple()
    first = next(value for value in outputs if isinstance(value, torch.Tensor) and value.ndim)
    with tempfile.TemporaryDirectory() as folder:
        huggingface(model, Path(folder, "model"))
        save_file(dict(call), Path(folder, "call.safetensors"))
        save_file({"first": first.contiguous()}, Path(folder, "wanted.safetensors"))
        process = subprocess.run(
            [sys.executable, "-c", READ % VERSION, folder, type(model).__name__],
            env={**os.environ, "PYTHONPATH": str(FOLDER), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
    if process.returncode:
        return f"transformers {VERSION}: {process.stderr.strip().splitlines()[-1]}"
    told = json.loads(process.stdout.splitlines()[-1])
    worst = told.pop("error")
    if told:
        return f"WRONG: transformers {VERSION} says {told}"
    return "equal" if worst < TOLERANCE else f"WRONG: differs by {worst:.1g} of the norm"
