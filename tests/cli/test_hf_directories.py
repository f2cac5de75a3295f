"""Hugging Face directories are data: none of their code runs, and no size makes a command hang."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import autoshard
from autoshard import hf_configuration
from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.model_source import load_model, load_tokenizer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
PLANTED = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with code beside its configuration, and a standard input that says yes."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return tmp_path


def describe(folder: Path, **entries: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **entries}))


def explained(folder: Path, *more: str) -> int:
    return main(["explain", str(folder), "--mesh", "tp=2", "--sequence", "8", *more])


MAP = {"AutoConfig": "planted.C", "AutoModelForCausalLM": "planted.M", "AutoTokenizer": "planted.T"}


def test_the_code_of_a_directory_never_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(folder, model_type="its_own", auto_map=MAP)
    for command in (["explain"], ["plan", "--world", "2"], ["verify", "--mesh", "tp=2"]):
        assert main([command[0], str(folder), *command[1:]]) == 2
        said = capsys.readouterr().err
        assert "'its_own', which transformers" in said and "its code is its own" in said
        assert "never runs code that a directory brings (trust_remote_code is False)" in said
    assert main(["export", "huggingface", str(folder), str(folder / "out")]) == 2
    capsys.readouterr()
    describe(folder)
    for option in ("trust_remote_code=True", "code_revision=x", "_attn_implementation=x/y"):
        assert explained(folder, "--option", option) == 2
    assert "_attn_implementation is 'x/y' (str), the code of a repo" in capsys.readouterr().err
    # where transformers has the model itself, that is what is used
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(folder)
    describe(folder, auto_map=MAP)
    assert type(load_model(str(folder))).__module__.startswith("transformers.")
    assert not (folder / "ran").exists()


def test_the_code_of_a_tokenizer_never_runs(folder: Path) -> None:
    describe(folder, model_type="its_own")
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["planted.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="the tokenizer of .* cannot be read"):
        load_tokenizer(str(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000 (int), not from 0 to 4,096",
        ),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1 (int), not from 0 to 4,096"),
        ({"text_config": {"n_layer": 5000}}, "text_config.n_layer is 5000 (int), not from 0"),
        ({"vision": [{"depths": [4000, 4000]}]}, "more than 4,096 in all"),
        ({"num_local_experts": 10**6}, "num_local_experts is 1000000 (int), not from 0"),
        ({"num_labels": 10**9}, "num_labels is 1000000000 (int), not from 0 to 1,048,576"),
        ({"vocab_size": 10**18}, "not a size up to 2,147,483,647"),
        ({"vocab_size": 0}, "vocab_size is 0 (int), not a size from 1"),
        ({"attn_implementation": {"": "a/b"}}, "the code of a repository: autoshard runs none"),
        ({"model_type": "lama"}, "Did you mean 'llama'?"),
        ({"model_type": 3}, "entry model_type is 3 (int), not a text"),
        ({"num_attention_heads": 3}, "transformers takes no such LlamaConfig: "),
        ({"hidden_act": "os.system"}, "transformers cannot make a model of this LlamaConfig: "),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str], entries: dict[str, Any], said: str
) -> None:
    describe(folder, **entries)
    assert explained(folder) == 2
    assert said in capsys.readouterr().err


def test_bounds_are_checked_before_transformers_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """(Some configurations make a list of as many entries as there are layers.)"""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("built")

    monkeypatch.setattr(transformers.Qwen3Config, "__init__", never)
    with pytest.raises(ConfigError, match="not from 0 to 4,096. A module:factory"):
        load_model("Qwen3Config", {"num_hidden_layers": 10**9})


def test_a_model_of_endless_modules_or_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {key: value for key, value in LLAMA.items() if key != "model_type"}
    wide = {**small, "hidden_size": 2**24, "intermediate_size": 2**24}
    with pytest.raises(ConfigError, match=r"LlamaConfig are [\d,]+ GB, and this machine has \d+"):
        load_model("LlamaConfig", wide)
    monkeypatch.setattr(hf_configuration, "MOST_MODULES", 9)
    with pytest.raises(ConfigError, match="LlamaConfig has more than 9 modules"):
        load_model("LlamaConfig", small)


def test_damaged_weights_name_the_directory(folder: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    autoshard.export.huggingface(model, folder / "hf")
    file = folder / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="hf cannot be loaded: SafetensorError: .*not fully cov"):
        load_model(str(folder / "hf"))


def test_sizes_that_do_not_fit_are_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(folder, num_attention_heads=4, num_key_value_heads=3)
    assert explained(folder) == 1
    assert "autoshard: error: the model cannot be called: " in capsys.readouterr().err
