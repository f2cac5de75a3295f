"""Directories of ONNX models: read back, run by ONNX's evaluator; complete or absent."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
import engine_cases as cases
from autoshard.cli import main
from autoshard.export import ExportError
from families import FAMILIES

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx_evaluator import collectives_of, evaluate  # noqa: E402


def parsed(file: Path) -> None:
    """Let TensorRT's own parser read a file, and what is beside it."""
    import tensorrt_rtx as trt

    from autoshard.export.to_tensorrt.build import log_of

    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = trt.Builder(log_of(trt)).create_network(typed)
    parser = trt.OnnxParser(network, log_of(trt))
    assert parser.parse_from_file(str(file)), parser.get_error(0)
    kinds = [network.get_layer(i).type.name for i in range(network.num_layers)]
    assert kinds.count("DIST_COLLECTIVE") == len(collectives_of(onnx.load(file))) > 2


def export_little(out: Path, **options: Any) -> None:
    given = {"mesh": {"tp": 2}, **options}
    example = ((torch.zeros(2, 8),), {})
    autoshard.export.onnx(torch.nn.Linear(8, 8), out, example=example, **given)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_directory_read_back_says_what_the_model_says(tmp_path: Path) -> None:
    model, out = cases.make("llama", num_hidden_layers=1), tmp_path / "onnx"
    seen: list[tuple[str, int, int]] = []
    given = {"mesh": {"tp": 2}, "dtype": "float32", "dynamic": cases.DYNAMIC}
    autoshard.export.onnx(
        model,
        out,
        max_length=cases.LENGTH,
        external_bytes=2**16,
        progress=lambda *a: seen.append(a),
        **given,
    )
    config = json.loads((out / "config.json").read_text())
    steps = [(0, "planning"), (0, "graph of the first rank")]
    for rank in range(2):
        file = f"rank{rank}.onnx"
        steps += [(rank, f"making rank {rank}"), (rank, f"comparing rank {rank} token by token")]
        steps += [(rank, f"writing {file}"), (rank + 1, file)]
    assert seen == [(what, done, 2) for done, what in steps]
    assert (config["format"], config["format_version"]) == ("autoshard-onnx", 1)
    assert config["exporter"]["opset"] == 23 and config["mesh"] == {"tp": 2}
    assert config["kv_cache"]["max_length"] == cases.LENGTH
    for entry in config["ranks"]:
        assert entry["sha256"] == sha256(out / entry["file"])
        assert entry["data"]["sha256"] == sha256(out / entry["data"]["file"])
        # a rank's matrices are beside the model; vectors are in it
        held = sum(torch.Size(w["shape"]).numel() * 4 for w in entry["weights"].values())
        assert (out / entry["data"]["file"]).stat().st_size > 0.9 * held > 2**16
        bare = onnx.load(out / entry["file"], load_external_data=False)
        assert sum(len(one.raw_data) for one in bare.graph.initializer) < 0.1 * held
    names = ["config.json", "rank0.onnx", "rank0.onnx.data", "rank1.onnx", "rank1.onnx.data"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]

    if importlib.util.find_spec("tensorrt_rtx") is not None:
        parsed(out / "rank0.onnx")
    models = [onnx.load(out / entry["file"]) for entry in config["ranks"]]
    assert [i.name for i in models[0].graph.input] == [port["name"] for port in config["inputs"]]
    feeds = cases.feeds(cases.LENGTH)
    parts = [feed["input_ids"] for feed in feeds]
    with torch.no_grad():
        whole = model(torch.cat(parts, 1)).logits.split([part.shape[1] for part in parts], 1)
    wanted = [part[:, -1:] for part in whole]
    for rank in evaluate(models, feeds):
        assert cases.error([one["logits"] for one in rank], wanted) < 1e-5


def test_an_encoder_is_a_model_of_its_own(tmp_path: Path) -> None:
    """It runs once, and hands its keys and values to a decoder with a cache."""
    family, out = FAMILIES["BART"], tmp_path / "onnx"
    model = family.make(encoder_layers=1, decoder_layers=1)
    autoshard.export.onnx(
        model,
        out,
        mesh={"tp": 1},
        example=((), family.call(2, 8)),
        dtype="float32",
        dynamic=cases.DYNAMIC,
        max_length=cases.LENGTH,
    )
    config = json.loads((out / "config.json").read_text())
    names = ["config.json", "rank0.encoder.onnx", "rank0.onnx"]
    assert sorted(path.name for path in out.iterdir()) == names
    encoder = config["encoder"]
    made = [port["name"] for port in encoder["outputs"]]
    assert made == ["encoded_0", "encoded_1"] and config["kv_cache"]["layers"] == 1
    assert [p["name"] for p in config["inputs"] if p["role"] == "encoded"] == made
    call = {**family.call(3, 8), "decoder_input_ids": torch.arange(36).view(3, 12)}

    def models(part: Any) -> list[Any]:
        return [onnx.load(out / entry["file"]) for entry in part["ranks"]]

    held = [rank[0] for rank in evaluate(models(encoder), [{"input_ids": call["input_ids"]}])]
    parts = [(0, 7), (7, 9), (9, 10), (10, 11), (11, 12)]
    feeds = []
    for start, end in parts:
        numbers = [torch.full((3,), n, dtype=torch.int32) for n in (start, end - start - 1)]
        names = ["decoder_input_ids", "past_lengths", "last_tokens"]
        feeds.append(dict(zip(names, [call["decoder_input_ids"][:, start:end], *numbers])))
    with torch.no_grad():
        whole = model(**call, use_cache=False).logits
    wanted = [whole[:, end - 1 : end] for _, end in parts]
    for rank in evaluate(models(config), feeds, held):
        assert cases.error([one["logits"] for one in rank], wanted) < 1e-5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": {"tp": 2, "dp_shard": 2}}, "axis dp_shard of size 2: an engine communicates"),
        ({"dtype": "int8"}, "dtype 'int8' cannot be written"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=said):
        export_little(tmp_path / "onnx", **options)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoshard.export import to_onnx as onnx_directory

    class Full(onnx_directory.Models):
        def write(self, made: Any, file: Path) -> Any:
            found = super().write(made, file)
            if file.name == "rank1.onnx":
                raise OSError("no space left")
            return found

    monkeypatch.setattr(onnx_directory, "Models", Full)
    with pytest.raises(OSError, match="no space left"):
        export_little(tmp_path / "onnx")
    assert not list(tmp_path.iterdir())


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ExportError, match=r"onnxscript is not installed.*autoshard\[onnx\]"):
        export_little(tmp_path / "onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "an_onnx_decoder.py").write_text(
        "from engine_cases import make\n\n"
        "def tiny():\n    return make('llama', num_hidden_layers=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    wanted = ["--mesh", "tp=2", "--dtype", "bfloat16", "--batch", "2", "--sequence", "16"]
    assert main(["export", "onnx", "an_onnx_decoder:tiny", "out", *wanted]) == 0
    said = capsys.readouterr()
    assert "2 ranks of bfloat16" in said.out and "[2/2] rank1.onnx" in said.err
    names = ["config.json", "rank0.onnx", "rank1.onnx"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    model = onnx.load(tmp_path / "out" / "rank1.onnx")
    onnx.checker.check_model(model)
    assert collectives_of(model)
