"""The command line exports what takes more than token ids: its inputs are the configuration's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.export import ExportError, example_call
from families import FAMILIES

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "cached", "shapes", "varies"),
    [
        ("Llama", True, None, ["batch", "sequence"]),
        ("T5", True, [(2, 16), (2, 16)], ["batch", "sequence"]),
        ("Whisper", True, [(2, 8, 32), (2, 16)], ["batch", "sequence"]),
        ("Whisper", False, [(2, 8, 32), (2, 16)], ["batch"]),
        ("ViT", False, [(2, 3, 16, 16)], ["batch"]),
        ("CLIP", False, [(2, 16), (2, 3, 16, 16)], ["batch"]),
        ("wav2vec2", False, [(2, 400)], ["batch"]),
    ],
)
def test_a_configuration_says_what_a_model_takes(
    name: str, cached: bool, shapes: list[tuple[int, ...]] | None, varies: list[str]
) -> None:
    model = FAMILIES[name].make()
    call, found = example_call(model, 400 if name == "wav2vec2" else 16, cached)
    assert list(found) == varies
    if call is None:
        assert shapes is None
    else:
        assert [tuple(one.shape) for one in call.values()] == shapes
        model(**call)


def test_what_it_does_not_say_is_asked_for() -> None:
    with pytest.raises(ExportError, match="ResNetFor.* takes pixel_values, .*example="):
        example_call(FAMILIES["ResNet"].make(), 16, False)


@pytest.mark.slow
def test_an_encoder_decoder_from_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a cache; in float16 T5 looks for overflow over all tokens, which no cache continues."""
    pytest.importorskip("tensorrt_rtx")
    model, out = tmp_path / "t5", tmp_path / "out"
    FAMILIES["T5"].make(num_layers=1).save_pretrained(model)  # type: ignore[operator]
    sizes = ["--batch", "2", "--sequence", "16", "--max-length", "32"]
    command = ["export", "tensorrt", str(model), str(out), *sizes]
    assert main(command) == 1
    assert "goes over all tokens" in (said := capsys.readouterr().err) and "bfloat16" in said
    assert main([*command, "--dtype", "bfloat16"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["encoder"]["inputs"][0]["shape"] == ["batch", 16]
    assert sorted(p.name for p in out.iterdir()) == [
        *("config.json", "rank0.encoder.engine", "rank0.engine")
    ]
