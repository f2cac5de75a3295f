"""The runner of engines, with a stand-in for the engine: no TensorRT and no GPU."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.runtime.engine import Engine, TensorRT, load, read_config
from autoshard.runtime.engine.generation import Sampling
from autoshard.runtime.errors import AutoshardError
from tensorrt_stand_in import StandIn

VOCAB, WIDTH, LENGTH = 16, 4, 12


def config(
    cached: bool = True, fewest: int = 1, ids: str = "int64", last: bool = False
) -> dict[str, Any]:
    """fewest: tokens the engine takes at once at least. last: it has the last logits alone."""
    cache = {"dtype": "float32", "shape": ["batch", 1, LENGTH, 1], "role": "key_cache"}
    tokens = {"name": "ids", "dtype": ids, "shape": ["batch", "sequence"], "role": "input"}
    lengths = {"name": "past", "dtype": "int32", "shape": ["batch"], "role": "lengths"}
    shape = ["batch", 1 if last else "sequence", VOCAB]
    places = {**lengths, "name": "last", "role": "last_tokens"}
    logits = {"name": "logits", "dtype": "float32", "shape": shape, "role": "output"}
    sequence = {"minimum": fewest, "maximum": WIDTH if cached else LENGTH}
    sizes = {"batch": {"minimum": 1, "maximum": 3}, "sequence": sequence}
    return {
        "format": "autoshard-engine",
        "format_version": 1,
        "builder": {"module": "tensorrt", "version": "1", "compute_capabilities": []},
        "inputs": [tokens, lengths, *[places] * last, {"name": "seen", **cache}]
        if cached
        else [tokens],
        "outputs": [logits, {"name": "seen_out", **cache}] if cached else [logits],
        "profiles": [sizes],
        "kv_cache": {"max_length": LENGTH} if cached else None,
        "ranks": [{"file": "rank0.engine", "sha256": hashlib.sha256(b"whole").hexdigest()}],
    }


def following(tokens: list[int]) -> int:
    """What the stand-in says comes next: it depends on every token and on its place."""
    return sum((i + 1) * token for i, token in enumerate(tokens)) % VOCAB


class Standin:
    """Keeps tokens in its cache, and answers by `following` of those up to each."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, ...]] = []

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = inputs["ids"]
        self.dtype = ids.dtype
        self.fed.append(tuple(ids.shape))
        rows, width = ids.shape
        past = inputs.get("past", torch.zeros(rows, dtype=torch.int32)).tolist()
        seen = inputs.get("seen", torch.zeros(rows, 1, LENGTH, 1)).clone()
        logits = torch.zeros(rows, width, VOCAB)
        for row in range(rows):
            for i in range(width):
                assert past[row] + i < LENGTH
                seen[row, 0, past[row] + i, 0] = ids[row, i]
                known = seen[row, 0, : past[row] + i + 1, 0].int().tolist()
                logits[row, i, following(known)] = 5.0
        if "last" in inputs:
            logits = logits[torch.arange(rows), inputs["last"].long(), None]
        return {"logits": logits, "seen_out": seen}


def answer(prompt: list[int], steps: int) -> list[int]:
    row = list(prompt)
    for _ in range(steps):
        row.append(following(row))
    return row[len(prompt) :]


PROMPTS = [[3, 1], [7], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(("cached", "last"), [(True, False), (True, True), (False, False)])
def test_rows_of_any_length_continue_by_themselves(cached: bool, last: bool) -> None:
    standin = Standin()
    engine = Engine(config(cached, last=last), standin)
    assert engine.generate(PROMPTS, 7) == [answer(prompt, 7) for prompt in PROMPTS]
    prompt = [(3, 4), (3, 2)] if cached else [(3, 6)]
    later = [(3, 1)] * 6 if cached else [(3, 6 + i) for i in range(1, 7)]
    assert standin.fed == prompt + later
    # buffers begin anew
    assert engine.generate(PROMPTS[:1], 3) == [answer(PROMPTS[0], 3)]


@pytest.mark.parametrize("cached", [True, False])
def test_an_engine_is_fed_no_fewer_tokens_than_it_takes(cached: bool) -> None:
    standin = Standin()
    engine = Engine(config(cached, fewest=3, ids="int32"), standin)
    assert engine.generate(PROMPTS, 5) == [answer(prompt, 5) for prompt in PROMPTS]
    assert min(width for _, width in standin.fed) == (3 if cached else 6)
    assert engine.generate([[7]], 2) == [answer([7], 2)]
    assert standin.fed[-1] == (1, 3) and standin.dtype == torch.int32
    if cached:
        with pytest.raises(AutoshardError, match="11 tokens long, and 2 that fill up the 3"):
            engine.generate(PROMPTS, 6)


def test_a_row_ends_at_its_stop_token() -> None:
    whole = answer(PROMPTS[0], 7)
    stop = whole[3]
    engine = Engine(config(), Standin())
    assert engine.generate(PROMPTS[:1], 7, stop=stop) == [whole[: whole.index(stop)]]


def test_rows_end_one_by_one_and_are_told_as_they_come() -> None:
    """By any of the stop tokens, those of the directory where none are given."""
    whole = [answer(prompt, 7) for prompt in PROMPTS]
    stops = {whole[0][4], whole[1][2]}
    ended = [row[: next((i for i, t in enumerate(row) if t in stops), 7)] for row in whole]
    assert len({*map(len, ended)}) > 1, "the rows end together: nothing was tested"
    told: list[tuple[int, int]] = []
    standin = Standin()
    engine = Engine({**config(), "stop": sorted(stops)}, standin)
    assert engine.generate(PROMPTS, 7, stream=lambda *one: told.append(one)) == ended
    for row, tokens in enumerate(ended):
        assert [token for at, token in told if at == row] == tokens
    steps = max(map(len, ended))
    assert told[: len(PROMPTS)] == [(row, made[0]) for row, made in enumerate(ended)]
    assert len(standin.fed) <= 2 + steps
    assert engine.generate(PROMPTS, 7, stop=()) == whole
    assert engine.generate(PROMPTS, 7, stop=[*stops]) == ended


def test_the_nucleus_is_the_fewest_likeliest_tokens() -> None:
    chances = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
    logits = chances.log().expand(4000, 4)

    def share(**options: Any) -> list[float]:
        sampling = Sampling(temperature=1.0, **options)
        drawn = sampling.draw(logits, torch.Generator().manual_seed(0))
        return (drawn.bincount(minlength=4) / len(drawn)).tolist()

    assert share() == pytest.approx(chances[0].tolist(), abs=0.03)
    assert share(top_p=0.79) == pytest.approx([0, 0.625, 0, 0.375], abs=0.03)
    assert share(top_p=0.5) == [0, 1, 0, 0] == share(top_p=1e-9)
    assert share(top_p=0.81) == pytest.approx([0.158, 0.526, 0, 0.316], abs=0.03)
    assert share(top_k=3, top_p=0.8) == pytest.approx([0, 0.625, 0, 0.375], abs=0.03)
    assert share(top_k=2) == pytest.approx([0, 0.625, 0, 0.375], abs=0.03)


def test_drawn_tokens_depend_on_the_seed_only() -> None:
    def draw(seed: int, **options: Any) -> list[list[int]]:
        return Engine(config(), Standin()).generate(PROMPTS, 7, seed=seed, **options)

    assert draw(0, temperature=3.0) == draw(0, temperature=3.0)
    assert draw(0, temperature=3.0) != draw(1, temperature=3.0)
    likeliest = [answer(prompt, 7) for prompt in PROMPTS]
    assert draw(0, temperature=3.0, top_k=1) == likeliest != draw(0, temperature=3.0)
    assert draw(5, temperature=0.1) == likeliest


@pytest.mark.parametrize(
    ("prompts", "steps", "said"),
    [
        ([[1]] * 4, 1, "4 prompts, and the engine takes 1 to 3"),
        ([[1] * 13], 0, "13 tokens long, and the engine holds 12"),
        ([[1] * 6], 8, "13 tokens long, and the engine holds 12"),
        ([[1], []], 1, "no prompt, or an empty one"),
    ],
)
def test_what_the_engine_cannot_hold_is_an_error(
    prompts: list[list[int]], steps: int, said: str
) -> None:
    with pytest.raises(AutoshardError, match=said):
        Engine(config(), Standin()).generate(prompts, steps)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_p": 1.5},
    ],
)
def test_nothing_can_be_drawn_from_such_options(options: dict[str, Any]) -> None:
    with pytest.raises(AutoshardError, match=r"give 0 or more, 1 or more, and more than 0 up to 1"):
        Engine(config(), Standin()).generate(PROMPTS, 1, **options)


def test_an_engine_that_does_not_load_or_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", StandIn)
    builder = {"module": "tensorrt", "version": "0", "compute_capabilities": ["8.9"]}
    described = {**config(), "builder": builder}
    with pytest.raises(AutoshardError, match=r"1 cannot load the engine.*version 0 for .* 8\.9"):
        TensorRT(described, b"old", None)
    with pytest.raises(AutoshardError, match=r"takes no ids of shape \(1, 2\)"):
        TensorRT(described, b"whole", None)({"ids": torch.zeros(1, 2)})


def test_an_encoder_runs_once_a_text() -> None:
    """And what it makes is given to every call of the decoder."""
    runs: list[int] = []

    class Decoder(Standin):
        def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            assert inputs["encoded_0"].tolist() == [[2.0], [4.0]]
            return super().__call__(inputs)

    def encode(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        runs.append(len(inputs["sound"]))
        return {"encoded_0": 2 * inputs["sound"]}

    sound = {"name": "sound", "dtype": "float32", "shape": ["batch", 1], "role": "input"}
    engine = Engine(config() | {"encoder": {"inputs": [sound]}}, Decoder(), encode=encode)
    source = {"sound": torch.tensor([[1], [2]])}
    assert engine.generate(PROMPTS[:2], 5, source=source) == [answer(p, 5) for p in PROMPTS[:2]]
    assert runs == [2]
    for wrong in (None, {"sound": torch.zeros(3, 1)}, {"noise": torch.zeros(2, 1)}):
        with pytest.raises(AutoshardError, match=r"the encoder has the inputs \['sound'\]"):
            engine.generate(PROMPTS[:2], 5, source=wrong)
    with pytest.raises(AutoshardError, match=r"the encoder has the inputs \[\], and source is"):
        Engine(config(), Standin()).generate(PROMPTS, 1, source=source)


def test_each_call_runs_with_the_profile_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", StandIn)
    monkeypatch.setattr(StandIn, "profiles", [])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    one = {**config()["profiles"][0], "sequence": {"minimum": 1, "maximum": 1}}
    engine = TensorRT(config() | {"profiles": [*config()["profiles"], one]}, b"whole", None)
    for tokens in (4, 1, 1, 2, WIDTH + 1):
        inputs = {"ids": torch.zeros(2, tokens), "past": torch.zeros(2)}
        with pytest.raises(AutoshardError, match="takes no ids"):
            engine({**inputs, "seen": torch.zeros(2, 1, LENGTH, 1)})
    assert StandIn.profiles == [1, 0]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of one engine."""
    made = tmp_path / "engines"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config()))
    (made / "rank0.engine").write_bytes(b"whole")
    return made


def test_loading_says_what_does_not_fit(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # type: ignore[arg-type]
    with pytest.raises(AutoshardError, match="built by tensorrt 1, which is not installed"):
        load(directory)
    with pytest.raises(AutoshardError, match=r"config.json' is no file of the directory"):
        read_config(tmp_path)
    (directory / "config.json").write_text(json.dumps({**config(), "format_version": 9}))
    with pytest.raises(AutoshardError, match="autoshard-engine' 9, this version reads .* 1"):
        read_config(directory)


def test_no_module_that_a_directory_names_is_imported(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "planted_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(directory))
    builder = {"module": "planted_module", "version": "1", "compute_capabilities": []}
    (directory / "config.json").write_text(json.dumps({**config(), "builder": builder}))
    with pytest.raises(AutoshardError, match="'planted_module' .*not one of tensorrt, tensorrt_rt"):
        load(directory)


@pytest.mark.parametrize("name", ["../outside", "{absolute}", "link", "..", ".", "", "sub/rank"])
def test_no_file_outside_of_the_directory_is_read(directory: Path, name: str) -> None:
    outside = directory.parent / "outside"
    outside.write_bytes(b"whole")  # its SHA-256 would be the right one
    (directory / "sub").mkdir()
    (directory / "sub" / "rank").write_bytes(b"whole")
    (directory / "link").symlink_to(outside)
    body = config()
    body["ranks"][0]["file"] = name.format(absolute=outside)
    (directory / "config.json").write_text(json.dumps(body))
    with pytest.raises(AutoshardError, match="no file of the directory|outside of the directory"):
        load(directory)


def test_a_damaged_engine_is_not_deserialised(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Any, data: bytes) -> Any:
        raise AssertionError("deserialised")

    monkeypatch.setattr(StandIn.Runtime, "deserialize_cuda_engine", never)
    monkeypatch.setitem(sys.modules, "tensorrt", StandIn)
    (directory / "rank0.engine").write_bytes(b"whole!")
    with pytest.raises(AutoshardError, match="is damaged, or another file: its SHA-256 is .* no r"):
        load(directory)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder": {**config(False), "ranks": config()["ranks"]}}, "has the role 'encoded'"),
        ({"ranks": []}, "1 to 1,048,576 ranks"),
        ({"ranks": [{"file": "rank0.engine"}]}, r"no 'sha256' in ranks\[0\]"),
        ({"refittable": True}, r"no 'weights' in ranks\[0\]"),
        ({"outputs": []}, "has no seen_out for the cache seen"),
        ({"profiles": []}, "not one profile or more"),
        ({"profiles": [config()["profiles"][0], {}]}, r"profiles\[1\] is .*not of the sizes"),
        ({"kv_cache": None}, "entry kv_cache is None"),
        ({"profiles": [{"batch": {"minimum": 3, "maximum": 2}}]}, "not from 3 to"),
    ],
)
def test_every_entry_that_a_runner_needs_is_checked(
    directory: Path, change: dict[str, Any], said: str
) -> None:
    (directory / "config.json").write_text(json.dumps({**config(), **change}))
    with pytest.raises(AutoshardError, match=said):
        read_config(directory)
