"""A server of one model on several ranks: continuous batching over a static cache.

    torchrun --nproc-per-node 2 examples/serve.py --model PATH < requests.jsonl

Rank 0 reads requests, a line of JSON each, and writes pieces of text as they are made:

    {"id": 1, "prompt": "Once", "max_new_tokens": 32, "stop": ["."], "temperature": 0.7}
    {"id": 1, "text": " upon a"}
    {"id": 1, "end": "stop"}

A request takes a row of the cache, a row that has ended is given to the next one, and prompts are
read in chunks beside the tokens that others generate: two shapes, so two programs. Keys and values
are shards between steps, and of the logits the likeliest token of each row is exchanged, not the
logits. Every rank does the same with the requests that rank 0 hands on.

transformers' own `generate_batch` keeps its paged cache whole outside of what is compiled; rows of
a static cache of transformers are what a compiled model shards.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache, StaticLayer


class Bytes:
    """The tokenizer of the model that is made where none is given: a byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


@dataclass
class Request:
    """A request and what has been made of it.

    waiting: tokens that the model has not read yet, first the prompt's. length: those it has.
    said: characters that the caller has been told.
    """

    id: Any
    waiting: list[int]
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    length: int = 0
    said: int = 0
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.shape = LogitsProcessorList()
        if self.temperature:
            self.shape.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                self.shape.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                self.shape.append(TopPLogitsWarper(self.top_p))

    def draw(self, logits: torch.Tensor) -> int:
        """A token by this request's own random numbers, the same on every rank."""
        read = torch.tensor([self.made], dtype=torch.int64)
        chances = self.shape(read, logits[None].float().cpu()).softmax(-1)
        return int(torch.multinomial(chances, 1, generator=self.generator))


class SlotLayer(StaticLayer):
    """A layer of a static cache whose rows are requests of different lengths.

    where: [rows, tokens], the place at which each token of a step is written.
    """

    where: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = torch.arange(len(self.where), device=self.where.device)[:, None]
        self.keys[rows, :, self.where] = key_states.transpose(1, 2)
        self.values[rows, :, self.where] = value_states.transpose(1, 2)
        return self.keys, self.values


class Batch:
    """The rows of a cache, the requests that have one, and those that wait for one."""

    def __init__(
        self, model: Any, tokenizer: Any, rows: int, length: int, chunk: int, ends: set[int]
    ) -> None:
        self.model, self.tokenizer, self.ends = model, tokenizer, ends
        self.rows: list[Request | None] = [None] * rows
        self.queue: deque[Request] = deque()
        self.length, self.chunk = length, chunk
        # what fills a short row up lies behind its end, and later tokens overwrite it
        layers = model.config.get_text_config().num_hidden_layers
        self.columns = length + chunk
        self.cache = Cache(layers=[SlotLayer(self.columns) for _ in range(layers)])

    def add(self, request: dict[str, Any]) -> str | None:
        """Queue a request; why not, where it cannot be served."""
        request = {**request, "stop": tuple(request.get("stop", ()))}
        made = Request(waiting=self.tokenizer.encode(request.pop("prompt")), **request)
        longest = len(made.waiting) + made.max_new_tokens
        if not made.waiting or longest > self.length:
            return f"{longest} tokens, and a row holds {self.length}"
        self.queue.append(made)
        return None

    @property
    def busy(self) -> bool:
        return bool(self.queue) or any(self.rows)

    @torch.inference_mode()
    def step(self) -> list[dict[str, Any]]:
        """Read a chunk or a token a row; what is said to whom."""
        for i, row in enumerate(self.rows):
            if row is None and self.queue:
                self.rows[i] = self.queue.popleft()
        active = [(i, row) for i, row in enumerate(self.rows) if row is not None]
        width = 1 if all(len(row.waiting) == 1 for _, row in active) else self.chunk
        ids = torch.zeros(len(self.rows), width, dtype=torch.int64)
        where = torch.arange(width).repeat(len(self.rows), 1)
        last = {}
        for i, row in active:
            read, row.waiting = row.waiting[:width], row.waiting[width:]
            ids[i, : len(read)] = torch.tensor(read)
            where[i] += row.length
            row.length += len(read)
            last[i] = len(read) - 1
        logits = self._logits(ids, where)
        likeliest = logits.argmax(-1).tolist()
        said = []
        for i, row in active:
            if row.waiting:
                continue  # more of its prompt
            token = likeliest[i][last[i]]
            if row.temperature:
                token = row.draw(logits[i, last[i]])
            said += self._told(row, token)
            if said[-1:] and "end" in said[-1] and said[-1]["id"] == row.id:
                self.rows[i] = None
        return said

    def _logits(self, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        device = self.model.device
        ids, where = ids.to(device), where.to(device)
        for layer in self.cache.layers:
            layer.where = where
        seen = torch.arange(self.columns, device=device) <= where[:, None, :, None]
        out = self.model(
            input_ids=ids, position_ids=where, attention_mask=seen, past_key_values=self.cache
        )
        found: torch.Tensor = out.logits
        return found

    def _told(self, row: Request, token: int) -> list[dict[str, Any]]:
        """Take a token; the text that no later token can change, and the end."""
        row.waiting = [token]
        if token not in self.ends:
            row.made.append(token)
        text = self.tokenizer.decode(row.made, skip_special_tokens=True)
        cuts = [at for stop in row.stop if (at := text.find(stop)) >= 0]
        end = "stop" if cuts or token in self.ends else ""
        if cuts:
            text = text[: min(cuts)]
        elif not end and len(row.made) == row.max_new_tokens:
            end = "length"
        sure = len(text)
        if not end:  # the beginning of a stop string, or of a character
            while sure > row.said and (
                text[sure - 1] == "\ufffd"
                or any(
                    stop.startswith(text[at:sure])
                    for stop in row.stop
                    for at in range(row.said, sure)
                )
            ):
                sure -= 1
        said: list[dict[str, Any]] = []
        if sure > row.said:
            said.append({"id": row.id, "text": text[row.said : sure]})
            row.said = sure
        return [*said, {"id": row.id, "end": end}] if end else said


def read_requests(into: queue.Queue[Any]) -> None:
    """The lines of standard input; None after the last."""
    for line in sys.stdin:
        if line.strip():
            into.put(json.loads(line))
    into.put(None)


def arrived(requests: queue.Queue[Any] | None, wait: bool) -> list[Any]:
    """What rank 0 has read since the last step, on every rank. wait: for at least one, a while."""
    found: list[Any] = []
    if requests is not None:
        try:
            if wait:
                found.append(requests.get(timeout=60))
            while True:
                found.append(requests.get_nowait())
        except queue.Empty:
            pass
    if dist.is_initialized():
        holder = [found]
        dist.broadcast_object_list(holder)
        found = holder[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face directory; a small random model without")
    parser.add_argument("--rows", type=int, default=4, help="requests at one time")
    parser.add_argument("--length", type=int, default=256, help="tokens a row holds")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of a prompt read at once")
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.model:
        model: Any = AutoModelForCausalLM.from_pretrained(args.model).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, eos_token_id=None, **sizes, **heads))
        model, tokenizer = model.eval(), Bytes()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        options = {"mesh": {"tp": ranks}, "inner": args.inner, "outputs": "sharded"}
        # each step's mask is another; what arrives is the same on every rank
        options |= {"planner": {"recover_masks": False}}
        model.compile(backend="autoshard", options=options)
    ends = model.generation_config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends} - {None}
    batch = Batch(model, tokenizer, args.rows, args.length, args.chunk, ends)
    speaks = os.environ.get("RANK", "0") == "0"
    requests: queue.Queue[Any] | None = queue.Queue() if speaks else None
    if requests is not None:
        threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    more = True
    while more or batch.busy:
        said = []
        if more:
            for request in arrived(requests, wait=not batch.busy):
                more = more and request is not None
                refused = request and batch.add(request)
                said += [{"id": request["id"], "error": refused}] if refused else []
        if batch.busy:
            said += batch.step()
        for line in said if speaks else ():
            print(json.dumps(line), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
