"""`autoshard export FORMAT MODEL DIRECTORY --mesh tp=2`: what an inference server loads."""

import argparse
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.cli.arguments import ProgressLine, positive, shared_arguments


def add_command(commands: Any) -> None:
    """Add `export` and its formats to the subparsers of the command line."""
    export = commands.add_parser("export", help="write what an inference server loads")
    formats = export.add_subparsers(required=True, metavar="FORMAT")

    def add_format(
        name: str, run: Callable[[argparse.Namespace], None], about: str, **shared: Any
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = formats.add_parser(
            name, parents=[shared_arguments(**shared)], help=about
        )
        parser.add_argument("directory", type=Path, help="where to write; must not exist")
        parser.set_defaults(run=lambda given: _unless_taken(run, given))
        return parser

    trtllm = add_format(
        "trtllm",
        write_trtllm,
        "checkpoint of TensorRT-LLM 1.2 and earlier; the axes of its mesh are tp and pp",
        mesh="tp=1",
        dtype="float16",
    )
    trtllm.add_argument("--vocab-parallel-embedding", action="store_true")
    trtllm.add_argument("--max-position-embeddings", type=positive)
    trtllm.add_argument("--engines", type=Path, help="then run trtllm-build into this directory")

    huggingface = add_format(
        "huggingface", write_huggingface, "safetensors with index and configuration", dtype=None
    )
    huggingface.add_argument("--max-shard-bytes", type=positive, default=5 * 2**30)

    engine_flags = {"mesh": "tp=1", "dtype": "float16", "batch": 8, "sequence": 1024}
    tensorrt = add_format(
        "tensorrt", write_tensorrt, "TensorRT engines, one a rank", **engine_flags
    )
    tensorrt.add_argument(
        "--compute-capability", nargs="+", metavar="X.Y", help="of the GPUs to build for"
    )
    for parser in (huggingface, tensorrt):
        parser.add_argument(
            "--quantize", choices=("fp8", "fp8_channel", "int8", "int4"), help="the weights' layout"
        )
    tensorrt.add_argument("--builder", choices=("tensorrt", "tensorrt_rtx"))
    onnx = add_format(
        "onnx", write_onnx, "ONNX models with collectives, one a rank", **engine_flags
    )
    for parser in (tensorrt, onnx):
        parser.description = "--batch and --sequence are the largest that the engine takes at once."
        parser.add_argument(
            "--max-length", type=positive, help="tokens of the key-value cache (default: no cache)"
        )
        parser.add_argument(
            "--all-logits", action="store_true", help="with a cache, not of the last tokens alone"
        )


def _unless_taken(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    """Write, where the directory can be had; before the model is loaded."""
    from autoshard.export import check_target

    check_target(arguments.directory)
    run(arguments)


def write_trtllm(arguments: argparse.Namespace) -> None:
    """A checkpoint, and engines of it where they are asked for."""
    from autoshard.export import trtllm, trtllm_build
    from autoshard.model_source import load_model

    trtllm(
        load_model(arguments.model),
        arguments.directory,
        mesh=arguments.mesh,
        dtype=arguments.dtype,
        vocab_parallel_embedding=arguments.vocab_parallel_embedding,
        max_position_embeddings=arguments.max_position_embeddings,
        progress=ProgressLine(),
    )
    print(_written(arguments))
    if arguments.engines is not None:
        trtllm_build(arguments.directory, arguments.engines)
    elif shutil.which("trtllm-build") is None:
        print("no engine was built: trtllm-build (tensorrt-llm 1.2 or earlier) is not installed")
    else:
        print(f"next: trtllm-build --checkpoint_dir {arguments.directory} --output_dir ENGINES")


def write_huggingface(arguments: argparse.Namespace) -> None:
    """A directory that `from_pretrained` opens."""
    from autoshard.export import huggingface
    from autoshard.model_source import load_model, load_tokenizer

    huggingface(
        load_model(arguments.model),
        arguments.directory,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_bytes,
        tokenizer=load_tokenizer(arguments.model),
        quantize=arguments.quantize,
        progress=ProgressLine(),
    )
    print(f"wrote {arguments.directory}")
    _print_accuracy(arguments)


def write_tensorrt(arguments: argparse.Namespace) -> None:
    from autoshard.export import tensorrt

    capability = arguments.compute_capability
    more = {"builder": arguments.builder, "quantize": arguments.quantize}
    _write_ranks(tensorrt, arguments, compute_capability=capability, **more)
    _print_accuracy(arguments)


def _print_accuracy(arguments: argparse.Namespace) -> None:
    if arguments.quantize is not None:
        print((arguments.directory / "quantization_accuracy.json").read_text(), end="")


def write_onnx(arguments: argparse.Namespace) -> None:
    from autoshard.export import onnx

    _write_ranks(onnx, arguments)


def _write_ranks(write: Callable[..., Path], arguments: argparse.Namespace, **more: Any) -> None:
    from autoshard.export import example_call
    from autoshard.model_source import load_model

    sizes = {"batch": arguments.batch, "sequence": arguments.sequence}
    model = load_model(arguments.model)
    call, varies = example_call(model, arguments.sequence, arguments.max_length is not None)
    write(
        model,
        arguments.directory,
        mesh=arguments.mesh,
        example=None if call is None else ((), call),
        dtype=arguments.dtype,
        dynamic={name: (1, sizes[name], sizes[name]) for name in varies},
        max_length=arguments.max_length,
        all_logits=arguments.all_logits,
        progress=ProgressLine(),
        **more,
    )
    print(f"{_written(arguments)}; peak memory {_peak_gigabytes():.1f} GB")


def _peak_gigabytes() -> float:
    """Of this process, the model and the plan included."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def _written(arguments: argparse.Namespace) -> str:
    ranks = math.prod(arguments.mesh.values())
    return f"wrote {arguments.directory}: {ranks} ranks of {arguments.dtype}"
