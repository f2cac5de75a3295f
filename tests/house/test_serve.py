"""The server of examples/serve.py: text of requests that share its rows, beside `generate`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
#: Prompts of several lengths, more than there are rows.
REQUESTS: list[dict[str, Any]] = [
    {"id": "long", "prompt": "Once upon a time there was", "max_new_tokens": 9},
    {"id": "short", "prompt": "x", "max_new_tokens": 4},
    {"id": "drawn", "prompt": "third", "max_new_tokens": 8, "temperature": 0.9, "top_k": 9},
    {"id": "later", "prompt": "a prompt of two chunks", "max_new_tokens": 7},
    {"id": "too long", "prompt": "x", "max_new_tokens": 1000},
]


class Letters:
    """A tokenizer of which every token is a letter, so that text tells tokens."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 64 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(64 + i) for i in ids)


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples" / "serve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module  # where its dataclasses look up their types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval()


def serve(
    example: Any, model: Any, requests: list[dict[str, Any]], ends: set[int]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The pieces of each request, and why each ended; two rows, in chunks of 8 tokens."""
    batch = example.Batch(model, Letters(), rows=2, length=48, chunk=8, ends=ends)
    pieces: dict[str, list[str]] = {}
    ended = {one["id"]: "refused" for one in requests if batch.add(dict(one))}
    while batch.busy:
        for line in batch.step():
            assert line["id"] not in ended
            if "end" in line:
                ended[line["id"]] = line["end"]
            else:
                pieces.setdefault(line["id"], []).append(line["text"])
    return pieces, ended


def expected(model: Any, request: dict[str, Any]) -> str:
    ids = torch.tensor([Letters().encode(request["prompt"])])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, max_new_tokens=request["max_new_tokens"], **options)
    return Letters().decode(found[0, ids.shape[1] :].tolist())


def test_requests_that_share_rows_get_their_own_text(example: Any, model: Any) -> None:
    pieces, ended = serve(example, model, REQUESTS, set())
    assert ended == {one["id"]: "length" for one in REQUESTS[:4]} | {"too long": "refused"}
    for one in REQUESTS[:4]:
        assert len(pieces[one["id"]]) == one["max_new_tokens"], "a piece a token"
        if "temperature" not in one:
            assert "".join(pieces[one["id"]]) == expected(model, one)
    alone, _ = serve(example, model, [REQUESTS[2]], set())
    assert alone["drawn"] == pieces["drawn"], "random numbers are a request's own"


def test_a_request_ends_at_a_stop_string_or_at_a_token(example: Any, model: Any) -> None:
    """And nothing of the string is said; what begins like it and is not it comes later."""
    request = REQUESTS[0]
    text = expected(model, request)
    stop = text[3:6]
    before = text[: text.find(stop)]
    given = {**request, "stop": [stop, text[0] + "\0"]}
    pieces, ended = serve(example, model, [given], set())
    assert ("".join(pieces.get("long", [])), ended) == (before, {"long": "stop"})
    last = ord(text[5]) - 64
    pieces, ended = serve(example, model, [request], {last})
    assert ended == {"long": "stop"}
    assert "".join(pieces.get("long", [])) == text[: text.find(text[5])]


@pytest.mark.slow
def test_two_ranks_say_what_one_says() -> None:
    def said(*start: str) -> dict[str, str]:
        command = [sys.executable, *start, "examples/serve.py", "--rows", "2"]
        done = subprocess.run(
            [*command, "--inner", "aot_eager"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            input="".join(json.dumps(one) + "\n" for one in REQUESTS),
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return {
            one["id"]: json.dumps([line for line in lines if line["id"] == one["id"]])
            for one in REQUESTS
        }

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert said(*torchrun) == said()
