"""Fake tensors on "cuda" in a torch without CUDA, forward and backward, without a GPU.

torch makes them, and fails at the first operator of autograd: there is no stream to ask for. A
small library gives this process what is missing (cuda_stand_in.cpp). It has to be loaded before
torch, and stays, so programs are traced in a process of their own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path


def load() -> None:
    """Compile and load the library, which takes seconds; nothing where torch was built with CUDA.

    Raises RuntimeError where torch is there already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the stand-in for CUDA has to be loaded before torch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    version: dict[str, str | None] = {}
    exec((torch / "version.py").read_text(), version)
    if version["cuda"] is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stand_in.so"
        source = Path(__file__).with_name("cuda_stand_in.cpp")
        flags = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{torch / 'include'}"]
        linked = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library), *linked], check=True)
        # global: torch's own libraries shall find these functions before theirs
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
