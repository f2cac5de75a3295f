"""Training on the axis cp in processes: storage, lazy logits, recomputation, one batch for all."""

from __future__ import annotations

from typing import Any

import pytest

from models import CASES
from side_by_side import Pair


def train_on_cp() -> dict[str, Any]:
    """Losses and gradients of two checkpointed steps, and logits, beside the serial model's."""
    from torch.distributed.tensor import DTensor

    model: Any = CASES["llama"].make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [CASES["llama"].make_batch(seed) for seed in (0, 1)]
    short = [{name: value[:1] for name, value in batch.items()} for batch in batches]
    pair = Pair(model, mesh={"cp": 2})
    pair.train([lambda m, b=b: m(**b).loss for b in short])
    ids = short[0]["input_ids"]
    pair.forward(lambda m: m(input_ids=ids, labels=ids).logits)
    stored = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return {"loss": pair.loss, "gradient": pair.gradient, "share": pair.share(), "stored": stored}


def test_training_on_cp_is_serial_training(gloo2: Any) -> None:
    for found in gloo2(train_on_cp):
        assert found["loss"] < 1e-5 and found["gradient"] < 1e-5, found
        assert found["share"] > 0.9
        assert found["stored"] <= {"(Shard(dim=0),)", "(Replicate(),)"}


def other_batches() -> str:
    import torch.distributed as dist

    pair = Pair(CASES["llama"].make_model(), mesh={"cp": 2})
    batch = CASES["llama"].make_batch(dist.get_rank())
    with pytest.raises(Exception, match="batch") as raised:
        pair.compiled(**batch)
    return str(raised.value)


def test_ranks_of_cp_are_given_one_batch(gloo2: Any) -> None:
    for told in gloo2(other_batches):
        assert "cp" in told
