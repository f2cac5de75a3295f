"""Text from the engine of one rank: its key-value buffers, prompts in parts, and the next tokens of
logits, the likeliest or drawn of the likely ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.errors import AutoshardError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    temperature: 0 takes the likeliest token; otherwise tokens are drawn from
    softmax(logits / temperature). top_k: of that many likeliest ones. top_p: of the fewest ones
    whose probabilities reach it together (nucleus sampling, Holtzman et al., 2020); after top_k.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        few = self.top_k is not None and self.top_k < 1
        share = self.top_p is not None and not 0 < self.top_p <= 1
        if not self.temperature >= 0 or few or share:
            raise AutoshardError(
                f"temperature {self.temperature}, top_k {self.top_k} and top_p {self.top_p}: "
                "give 0 or more, 1 or more, and more than 0 up to 1"
            )

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Next tokens, one for each row of [rows, vocabulary]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits.cpu() / self.temperature
        scores, order = scaled.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            # as many as are no less likely than the k-th
            least = scores[:, min(self.top_k, scores.shape[-1]) - 1, None]
            scores = scores.masked_fill(scores < least, float("-inf"))
        chances = scores.softmax(-1)
        if self.top_p is not None:
            before = chances.cumsum(-1) - chances
            chances = chances.masked_fill(before >= self.top_p, 0.0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        return order.gather(-1, drawn).squeeze(-1)


Execute = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Function that runs an engine once: tensors by input name -> tensors by output name. The output of
a cache, `<cache>_out`, may be the tensor that came in."""


class NewWeights:
    """New values of an engine's weights, which it takes all at once.

    table: of its weights by name, as config.json has them: `state`, how a rank's part is cut from
    the whole, its `shape` and `dtype`. rank, ranks: of whose parts. take: has the engine read
    `values`, on the host; False where it cannot. The memory stays until then.
    """

    def __init__(
        self, table: Mapping[str, Any], rank: int, ranks: int, take: Callable[[], bool]
    ) -> None:
        self.table, self.rank, self.ranks, self._take = table, rank, ranks, take
        self.values = {
            name: torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]))
            for name, one in table.items()
        }

    def take(self) -> None:
        """Replace the weights. Raises AutoshardError where the engine is not whole any more."""
        if not self._take():
            raise AutoshardError(
                "TensorRT could not replace the weights, and the engine has them in part",
                remedy="Load the engine again; TensorRT has logged why.",
            )


class Engine:
    """The engine of a rank, with its key-value buffers.

    config: of the directory. execute: runs the engine once. device: where its tensors live.
    group: of the ranks; the tokens that its rank 0 draws are everybody's. None: nothing is sent.
    encode: runs the encoder of an encoder-decoder once.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        execute: Execute,
        device: torch.device | str = "cpu",
        group: Any = None,
        encode: Execute | None = None,
    ) -> None:
        self.config, self.execute, self.device, self.group = config, execute, device, group
        self._encode, self._encoded = encode, dict[str, torch.Tensor]()
        roles: dict[str, list[Any]] = {}
        for port in config["inputs"]:
            role = "cache" if port["role"].endswith("cache") else port["role"]
            roles.setdefault(role, []).append(port)
        found = {port["name"]: port["shape"] for port in roles.get("input", ())}
        if [len(shape) for shape in found.values()] != [2]:
            raise AutoshardError(
                f"the engine has the inputs {found}; tokens are generated from one, the token "
                "ids [batch, sequence]"
            )
        self._tokens = roles["input"][0]["name"]
        self._dtype = getattr(torch, roles["input"][0]["dtype"])
        self._lengths = [port["name"] for port in roles.get("lengths", ())]
        self._last = [port["name"] for port in roles.get("last_tokens", ())]
        self._caches = roles.get("cache", [])
        self._logits = next(p["name"] for p in config["outputs"] if p["role"] == "output")
        profile = config["profiles"][0]
        (self.min_batch, self.max_batch), (self.min_tokens, self.max_tokens) = (
            (profile[size]["minimum"], profile[size]["maximum"])
            if isinstance(size, str)
            else (size, size)
            for size in roles["input"][0]["shape"]
        )
        self.max_length = config["kv_cache"]["max_length"] if self._caches else self.max_tokens
        self._buffers: dict[str, torch.Tensor] = {}
        self._stop = {*config.get("stop", ())}

    def new_weights(self) -> list[NewWeights]:
        """Memory for new values of all weights of this rank: of the engine, and of the encoder's.
        Raises AutoshardError where they cannot be replaced."""
        engines: Any = [self.execute, *([] if self._encode is None else [self._encode])]
        return [engine.new_weights() for engine in engines]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: int | Iterable[int] | None = None,
        stream: Callable[[int, int], None] | None = None,
        source: Mapping[str, torch.Tensor] | None = None,
    ) -> list[list[int]]:
        """The tokens that follow each prompt, at most `max_new_tokens`.

        temperature, top_k, top_p: see `Sampling`. seed: of the drawing; the same on every rank.
        stop: a token or tokens that end a row, and are not returned; by default those that the
        model was exported with, () for none. stream: called on every rank with (row, token) as
        tokens are made. A row that has ended costs no tokens, the others go on. source: the inputs
        of the encoder of an encoder-decoder by name, a row for each prompt of the decoder.
        Collective.
        Raises AutoshardError for more rows or tokens than the engine holds.
        """
        self._check(prompts, max_new_tokens)
        self._run_encoder(source, len(prompts))
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        ends = self._stop if stop is None else {stop} if isinstance(stop, int) else {*stop}
        generator = torch.Generator().manual_seed(seed)
        rows: list[list[int]] = [list(prompt) for prompt in prompts]
        running = list(range(len(rows)))
        logits = self._prompt(rows)
        for step in range(max_new_tokens):
            drawn = self._shared(sampling.draw(logits, generator)).tolist()
            running = [row for row in running if drawn[row] not in ends]
            for row in running:
                rows[row].append(drawn[row])
                if stream is not None:
                    stream(row, drawn[row])
            if not running or step + 1 == max_new_tokens:
                break
            logits = self._next(rows)  # of a row that has ended, its last token again
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts)]

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if not prompts or not all(prompts):
            raise AutoshardError("there is no prompt, or an empty one")
        if not self.min_batch <= len(prompts) <= self.max_batch:
            raise AutoshardError(
                f"{len(prompts)} prompts, and the engine takes {self.min_batch} to {self.max_batch}"
            )
        # the last new token is never fed; what fills up the fewest tokens the engine takes is
        longest = max(map(len, prompts)) + max(max_new_tokens, 1) - 1
        filled = self.min_tokens - 1 if self._caches else 0
        if longest + filled > self.max_length:
            more = f", and {filled} that fill up the {self.min_tokens} the engine takes at once,"
            raise AutoshardError(
                f"prompts and new tokens are up to {longest} tokens long"
                f"{more if filled else ','} and the engine holds {self.max_length}",
                remedy="Generate fewer, or export with a larger max_length.",
            )

    def _run_encoder(self, source: Mapping[str, torch.Tensor] | None, rows: int) -> None:
        """Keys and values of what the decoder attends to, made once a text."""
        ports = {} if self._encode is None else self.config["encoder"]["inputs"]
        wanted = {port["name"]: port for port in ports}
        given = {} if source is None else source
        if given.keys() != wanted.keys() or any(len(one) != rows for one in given.values()):
            have = {name: tuple(one.shape) for name, one in given.items()}
            raise AutoshardError(
                f"the encoder has the inputs {sorted(wanted)}, and source is {have or None} "
                f"for {rows} prompts",
                remedy="Give generate(..., source={name: tensor}), a row for each prompt.",
            )
        if self._encode is None:
            return
        self._encoded = dict(
            self._encode(
                {
                    name: one.to(self.device, getattr(torch, wanted[name]["dtype"])).contiguous()
                    for name, one in given.items()
                }
            )
        )

    def _prompt(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits after each row's last token, [rows, vocabulary]; caches begin anew.

        A prompt longer than the engine takes at once is fed in parts. Shorter rows are filled up:
        what that writes lies behind their end, and later tokens overwrite it.
        """
        if not self._caches:
            return self._whole(rows)
        self._buffers = {port["name"]: self._buffer(port, len(rows)) for port in self._caches}
        longest = max(map(len, rows))
        last: list[torch.Tensor | None] = [None] * len(rows)
        start = 0
        while start < longest:
            width = min(self.max_tokens, longest - start)
            part = [list(row[start : start + width]) for row in rows]
            logits = self._run(part, [start] * len(rows))
            for i, row in enumerate(rows):
                if start < len(row) <= start + width:
                    last[i] = logits[i, 0 if self._last else len(row) - 1 - start].float()
            start += width
        return torch.stack([found for found in last if found is not None])

    def _next(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits after one more token a row."""
        if not self._caches:
            return self._whole(rows)
        return self._run([row[-1:] for row in rows], [len(row) - 1 for row in rows])[:, 0].float()

    def _whole(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits without a cache: every token is computed again."""
        logits = self._run(rows, [0] * len(rows))
        return torch.stack([logits[i, len(row) - 1] for i, row in enumerate(rows)]).float()

    def _run(self, rows: Sequence[Sequence[int]], past: Sequence[int]) -> torch.Tensor:
        """The logits of each of these tokens, or of the last of each row where the engine has these
        alone; rows are filled up to one length behind their end."""
        width = max(self.min_tokens, *map(len, rows))
        tokens = [[*row, *[0] * (width - len(row))] for row in rows]
        feed = {self._tokens: torch.tensor(tokens, dtype=self._dtype, device=self.device)}
        for name in self._lengths:
            feed[name] = torch.tensor(past, dtype=torch.int32, device=self.device)
        for name in self._last:  # of a row that ended in an earlier part, any
            places = [max(len(row), 1) - 1 for row in rows]
            feed[name] = torch.tensor(places, dtype=torch.int32, device=self.device)
        outputs = self.execute({**feed, **self._encoded, **self._buffers})
        self._buffers = {name: outputs[f"{name}_out"] for name in self._buffers}
        return outputs[self._logits]

    def _buffer(self, port: Mapping[str, Any], rows: int) -> torch.Tensor:
        shape = [rows if isinstance(size, str) else size for size in port["shape"]]
        return torch.zeros(shape, dtype=getattr(torch, port["dtype"]), device=self.device)

    def _shared(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group is not None and dist.get_world_size(self.group) > 1:
            tokens = tokens.to(self.device)
            dist.broadcast(tokens, group=self.group, group_src=0)
        return tokens.cpu()
