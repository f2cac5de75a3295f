"""The command line: `autoshard plan`, `explain`, `verify` and `export`, each with `--help`."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoshard.cli import explain, plan, verify
from autoshard.errors import AutoshardError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 after an error, 2 for wrong usage (argparse)."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
    except (AutoshardError, OSError) as error:
        print(f"autoshard: error: {error}", file=sys.stderr)
        return 1
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autoshard", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add(commands)
    explain.add_command(commands)
    export = commands.add_parser("export", help="write what an inference server loads")
    formats = export.add_subparsers(required=True, metavar="FORMAT")

    trtllm = formats.add_parser("trtllm", help="checkpoint of TensorRT-LLM 1.2 and earlier")
    _common(trtllm)
    trtllm.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    trtllm.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    dtypes = ("float16", "bfloat16", "float32")
    trtllm.add_argument("--dtype", choices=dtypes, default="float16")
    trtllm.add_argument("--vocab-parallel-embedding", action="store_true")
    trtllm.add_argument("--max-position-embeddings", type=int)
    trtllm.add_argument("--engines", type=Path, help="then run trtllm-build into this directory")
    trtllm.set_defaults(run=_trtllm)

    hf = formats.add_parser("huggingface", help="safetensors with index and configuration")
    _common(hf)
    hf.add_argument("--dtype", choices=dtypes, help="default: as the parameters are")
    hf.add_argument("--max-shard-bytes", type=int, default=5 * 2**30)
    hf.set_defaults(run=_huggingface)
    engines = formats.add_parser("tensorrt", help="TensorRT engines, one a rank")
    _ranks(engines, dtypes)
    engines.add_argument(
        "--compute-capability", nargs="+", metavar="X.Y", help="of the GPUs to build for"
    )
    engines.add_argument("--builder", choices=("tensorrt", "tensorrt_rtx"))
    engines.set_defaults(run=_tensorrt)
    onnx = formats.add_parser("onnx", help="ONNX models with collectives, one a rank")
    _ranks(onnx, dtypes)
    onnx.set_defaults(run=_onnx)
    verify.add(commands)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face directory, or module:factory")
    parser.add_argument("directory", type=Path, help="where to write; must not exist")


def _ranks(parser: argparse.ArgumentParser, dtypes: Sequence[str]) -> None:
    _common(parser)
    parser.add_argument("--tp", type=int, default=1, help="ranks (default 1)")
    parser.add_argument("--dtype", choices=dtypes, default="float16")
    parser.add_argument("--max-batch", type=int, default=8, help="rows at once (default 8)")
    parser.add_argument(
        "--max-sequence", type=int, default=1024, help="tokens of a row at once (default 1024)"
    )
    parser.add_argument(
        "--max-length", type=int, help="tokens of the key-value cache (default: no cache)"
    )


def _trtllm(options: argparse.Namespace) -> None:
    from autoshard.export import load_model, trtllm, trtllm_build

    trtllm(
        load_model(options.model),
        options.directory,
        mesh={"tp": options.tp, "pp": options.pp},
        dtype=options.dtype,
        vocab_parallel_embedding=options.vocab_parallel_embedding,
        max_position_embeddings=options.max_position_embeddings,
        progress=_Progress(),
    )
    print(f"wrote {options.directory}: {options.tp * options.pp} ranks of {options.dtype}")
    if options.engines is not None:
        trtllm_build(options.directory, options.engines)
    elif shutil.which("trtllm-build") is None:
        print("no engine was built: trtllm-build (tensorrt-llm 1.2 or earlier) is not installed")
    else:
        print(f"next: trtllm-build --checkpoint_dir {options.directory} --output_dir ENGINES")


def _huggingface(options: argparse.Namespace) -> None:
    from autoshard.export import huggingface, load_model, load_tokenizer

    huggingface(
        load_model(options.model),
        options.directory,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        tokenizer=load_tokenizer(options.model),
        progress=_Progress(),
    )
    print(f"wrote {options.directory}")


def _tensorrt(options: argparse.Namespace) -> None:
    from autoshard.export import tensorrt

    capability = options.compute_capability
    _write_ranks(tensorrt, options, builder=options.builder, compute_capability=capability)


def _onnx(options: argparse.Namespace) -> None:
    from autoshard.export import onnx

    _write_ranks(onnx, options)


def _write_ranks(write: Callable[..., Path], options: argparse.Namespace, **more: Any) -> None:
    from autoshard.export import load_model

    sizes = {"batch": options.max_batch, "sequence": options.max_sequence}
    write(
        load_model(options.model),
        options.directory,
        mesh={"tp": options.tp},
        dtype=options.dtype,
        dynamic={name: (1, largest, largest) for name, largest in sizes.items()},
        max_length=options.max_length,
        progress=_Progress(),
        **more,
    )
    print(f"wrote {options.directory}: {options.tp} ranks of {options.dtype}")


class _Progress:
    """A line on stderr: rewritten on a terminal, a few of them elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._last < (0.1 if self._terminal else 5.0):
            return
        self._last = now
        end = "\n" if done == total or not self._terminal else ""
        start = "\r\x1b[K" if self._terminal else ""
        print(f"{start}[{done}/{total}] {name}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
