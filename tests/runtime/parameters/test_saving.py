"""Stored models saved: on every rank one complete whole; on one rank an error with the way."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

import autoshard
from autoshard.errors import AutoshardError
from autoshard.runtime.agreement import wait_at_most
from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.parameters.shard import shard_parameters
from gloo_pool import GlooPool


class Tied(nn.Module):
    """A weight under two names, one whose rows two ranks do not divide, one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.one = nn.Linear(3, 1)


def stored(model: Any) -> Any:
    """The model with every parameter split by rows."""
    mesh = init_mesh({"tp": 2}, "cpu")
    states = {p: {"tp": "S(0)" if p.dim() else "I"} for p in model.parameters()}
    shard_parameters(states, mesh, broadcast=True)
    return model


def llama(tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied, use_cache=False)
    )


def gathered() -> tuple[list[str], bool, bool, list[str]]:
    """What the first rank gets, whether that is serial's, whether ties last; of the optimizer."""
    plain, model = Tied(), stored(Tied())
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    of_optimizer = autoshard.full_state_dict(optimizer)
    everywhere = autoshard.full_state_dict(model.state_dict(), rank0_only=False)
    state = autoshard.full_state_dict(model)
    same = all(torch.equal(p.full_tensor(), everywhere[k]) for k, p in model.named_parameters())
    plain.load_state_dict(everywhere)
    tied = everywhere["embed.weight"] is everywhere["head.weight"]
    kinds = {type(v).__name__ for s in of_optimizer.get("state", {}).values() for v in s.values()}
    return [*state], same, tied, sorted(kinds)


def test_the_first_rank_gets_the_whole(gloo2: GlooPool) -> None:
    first, second = gloo2(gathered)
    keys = ["embed.weight", "head.weight", "head.bias", "one.weight", "one.bias"]
    assert first == (keys, True, True, ["Tensor"])
    assert second == ([], True, True, [])


def kept(axis: str | None) -> list[str]:
    """Names of what a later step changes in a state dict that was made whole before."""
    model = nn.Sequential(Tied(), nn.BatchNorm1d(4))
    if axis is not None:
        mesh = init_mesh({axis: 2}, "cpu")
        rows = "S(0)" if axis == "dp_shard" else "I"
        states = {p: {axis: rows if p.dim() > 1 else "I"} for p in model.parameters()}
        shard_parameters(states, mesh, broadcast=True)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        for buffer in model.buffers():
            buffer.add_(1)

    step()
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state = autoshard.full_state_dict(both, rank0_only=False)
    before = copy.deepcopy(state)
    step()
    changed = pytree.tree_map(
        lambda x, y: not torch.equal(x, y) if torch.is_tensor(x) else x != y, state, before
    )
    tied = state["model"]["0.embed.weight"] is state["model"]["0.head.weight"]
    paths = pytree.tree_flatten_with_path(changed)[0]
    return [pytree.keystr(path) for path, x in paths if x] + ([] if tied else ["tied"])


def test_a_state_dict_made_whole_is_a_copy(gloo2: GlooPool) -> None:
    """Where a rank holds a part, where it holds the whole, and where nothing is stored."""
    assert kept(None) == []
    for axis in ("dp_shard", "dp_replicate", "tp"):
        assert gloo2(kept, axis) == [[], []], axis


def pretrained(folder: str) -> tuple[bool, list[str]]:
    """Whether what every rank saved opens with serial's logits, at once; the files."""
    model, ids = stored(llama()), torch.arange(8)[None]
    model.save_pretrained(folder)
    opened = type(model).from_pretrained(folder)
    same = torch.equal(opened(ids).logits, llama()(ids).logits)
    return same, sorted(path.name for path in Path(folder).iterdir())


def test_save_pretrained_on_every_rank(gloo2: GlooPool, tmp_path: Path) -> None:
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert gloo2(pretrained, str(tmp_path)) == [(True, files)] * 2
    # a tied weight is in the file once
    assert (tmp_path / "model.safetensors").stat().st_size < llama().num_parameters() * 4 + 4000


class Hub:
    """Of the hub's API, what an upload calls."""

    def __init__(self) -> None:
        self.commits: list[list[str]] = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, *, operations: Any, **_: Any) -> None:
        self.commits.append(sorted(each.path_in_repo for each in operations))


def pushed(folder: str) -> list[list[str]]:
    """The commits that this rank made, in both ways of pushing, and of a model with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import modeling_utils
    from transformers.utils import hub

    api = Hub()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "hf_api", lambda: api)
        patch.setattr(modeling_utils, "hf_api", lambda: api)
        card = SimpleNamespace(save=lambda path: Path(path).write_text(""))
        patch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)
        patch.setattr(modeling_utils, "create_and_tag_model_card", lambda *_, **__: card)
        model = stored(llama())
        model.push_to_hub("me/whole")
        model.save_pretrained(folder, push_to_hub=True, repo_id="me/saved")
        adapted = stored(get_peft_model(llama(), LoraConfig(target_modules=["q_proj"])))
        adapted.push_to_hub("me/adapters")
    return api.commits


def test_the_first_rank_pushes(gloo2: GlooPool, tmp_path: Path) -> None:
    first, second = gloo2(pushed, str(tmp_path))
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    adapters = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert first == [files, files, adapters]
    assert second == []


def refused(folder: str) -> str:
    model = stored(llama())
    try:
        model.save_pretrained(folder)
    except (AutoshardError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failed_write_is_an_error_on_every_rank(gloo2: GlooPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = gloo2(refused, str(tmp_path / "file" / "model"))
    assert first.startswith(("NotADirectoryError", "FileExistsError"))
    assert "LlamaForCausalLM: the first rank could not write: NotADirectoryError" in second


def alone(how: str, folder: str) -> str:
    """What is raised where the first rank saves and the second is at something else."""
    model = stored(llama())
    wait_at_most(4.0)
    try:
        if dist.get_rank() == 0:
            if how == "torch.save":
                torch.save(model.state_dict(), io.BytesIO())
            else:
                model.save_pretrained(folder)
        else:
            model.model.norm.weight.sum().item()
    except AutoshardError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["torch.save", "save_pretrained"])
def test_saved_on_one_rank(gloo2: GlooPool, tmp_path: Path, how: str) -> None:
    said = gloo2(alone, how, str(tmp_path))
    remedy = {"torch.save": "autoshard.full_state_dict(", "save_pretrained": "Call it on every"}
    assert remedy[how] in said[0], said
    assert all("test_saving.py:" in text and "has to do it" in text for text in said), said


def surgery() -> tuple[str, list[bool]]:
    """What DDP says of a stored model; parametrizations taken off, either way; copies and files of
    modules that hold a parameter twice, and of what eager code makes of one."""
    model, plain = stored(Tied()), Tied()
    text = ""
    try:
        DistributedDataParallel(model)
    except AutoshardError as error:
        text = str(error)
    same = []
    for leave in (True, False):
        for one in (model, plain):
            parametrizations.orthogonal(one.one, "weight", use_trivialization=False)
            parametrize.remove_parametrizations(one.one, "weight", leave_parametrized=leave)
        same.append(torch.allclose(model.one.weight.full_tensor(), plain.one.weight))
        same.append(type(model.one).__name__ == "Linear" and not model.one._modules)
    x = torch.ones(2, 3, 4)
    for rnn in (nn.LSTM(4, 3, proj_size=2), nn.GRU(4, 3, 2, bidirectional=True)):
        want = rnn(x)[0]
        stored(rnn)
        copies = (copy.deepcopy(rnn), *through_files(rnn), *through_files([rnn])[1])
        same += [torch.allclose(one(x)[0], want) for one in copies]
    row, norm = plain.embed.weight.detach()[1], plain.one.weight.detach().norm()
    view = model.embed.weight.data[1]
    copies = (copy.deepcopy(view), *through_files(view))
    view.add_(1)
    same += [torch.equal(one, row) and type(one) is torch.Tensor for one in copies]
    same += [torch.allclose(one, norm) for one in through_files(model.one.weight.data.norm())]
    return text, same


def through_files(what: Any) -> list[Any]:
    """What pickle and torch.save read of what they wrote."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return [pickle.loads(pickle.dumps(what)), torch.load(file, weights_only=False)]


def test_wrappers_parametrizations_and_copies(gloo2: GlooPool) -> None:
    for text, same in gloo2(surgery):
        assert text.startswith("DistributedDataParallel of a Tied whose parameters are stored")
        assert same == [True] * 17
