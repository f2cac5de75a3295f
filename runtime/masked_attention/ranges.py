"""Which keys a query row sees: those from the first of its document or window up to its own."""

from __future__ import annotations

import torch


def first_keys(
    documents: torch.Tensor | None, window: int | None, rows: int, keys: int, device: torch.device
) -> torch.Tensor:
    """The first key that each of the last `rows` positions of `keys` may see: int64 [batch, rows],
    or [1, rows] where all sequences are alike.

    documents: [batch, 1, 1, keys], a number that changes where another document begins. window: how
    many keys a row sees at most, its own among them.
    """
    own = torch.arange(keys - rows, keys, device=device)
    first = torch.zeros_like(own) if window is None else (own - (window - 1)).clamp(min=0)
    first = first.unsqueeze(0)
    if documents is None:
        return first
    at = torch.arange(keys, device=device)
    begun = torch.where(_begins(documents), at, 0).cummax(-1).values
    return torch.maximum(first, begun[:, keys - rows :])


def sees_any(visible: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Whether each query row sees a key: bool [batch, rows]. visible: [batch, 1, 1, keys]."""
    until = visible.flatten(1).cumsum(-1)
    until = torch.nn.functional.pad(until, (1, 0))  # how many are before each place
    rows, keys = first.shape[1], until.shape[1] - 1
    before = until.gather(1, first.expand(until.shape[0], -1))
    return until.expand(before.shape[0], -1)[:, keys - rows + 1 :] > before


def document_bounds(
    documents: torch.Tensor, batch: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What kernels of sequences of many lengths want to know: (where each document begins among the
    queries of all sequences, among their keys, and how many documents, most queries and most keys).

    The first two are int32 [batch * keys + 1], the end repeated behind the last document; the third
    is int64 [3] on the host, which waits for it. The queries are the last `rows` of each sequence.
    """
    keys = documents.shape[-1]
    begins = _begins(documents).expand(batch, keys).reshape(-1)
    count = batch * keys
    place = torch.arange(count, device=documents.device)
    number = torch.where(begins, begins.cumsum(0) - 1, count)  # the rest is written behind the end
    ends = torch.full((count + 1,), count, device=documents.device)
    ends = ends.scatter(0, number, place)
    ends[count] = count
    before = (ends % keys - (keys - rows)).clamp(min=0)
    query_ends = ends // keys * rows + before
    sizes = torch.stack([begins.sum(), query_ends.diff().max(), ends.diff().max()])
    return query_ends.int(), ends.int(), sizes.cpu()


def _begins(documents: torch.Tensor) -> torch.Tensor:
    """bool [batch, keys]: whether a document begins at a place."""
    numbers = documents.flatten(1)
    changed = numbers[:, 1:] != numbers[:, :-1]
    return torch.nn.functional.pad(changed, (1, 0), value=True)
