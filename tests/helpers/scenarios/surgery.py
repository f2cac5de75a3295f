"""Models changed around their steps: parametrised, pruned, resized, adapted, frozen, tied, cast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from scenarios.job import WIDTH, Job, Net

Change = Callable[[Net], Any]


def around_the_first_call(change: Change, undo: Change | None = None) -> Callable[[Job], None]:
    """The change before the first call of one model, and after that of another; both train."""

    def scenario(job: Job) -> None:
        for when in ("before", "after"):
            net, compiled = job.pair()
            if when == "after":
                job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [5])
            net.zero_grad()
            torch.manual_seed(2)
            change(net)
            job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
            job.record(f"{when} keys", [*net.state_dict()])
            job.record_model(net, when)
            job.record(f"{when} weight", net.up.weight)
            if undo is not None:
                undo(net)
                net.zero_grad()
                job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [2])
                job.record_model(net, f"{when}, undone")

    return scenario


class LowRank(nn.Module):
    """A low-rank term added to a weight, as a parametrization."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, columns) * 0.1)
        self.b = nn.Parameter(torch.randn(rows, 2) * 0.1)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


class Adapted(nn.Module):
    """A parametrization on and off in each forward, as PEFT's `target_parameters` have it."""

    def __init__(self, net: Net, frozen: bool) -> None:
        super().__init__()
        self.net, self.plus = net, LowRank(*net.up.weight.shape)
        net.up.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.net.up
        needs = up.weight.requires_grad
        parametrize.register_parametrization(up, "weight", self.plus)
        up.parametrizations["weight"].original.requires_grad_(needs)
        try:
            y: torch.Tensor = self.net(x)
        finally:
            parametrize.remove_parametrizations(up, "weight", leave_parametrized=False)
        return y


def parametrized_in_forward(job: Job) -> None:
    """The weight below trains or is frozen; its optimizer's state stays its own."""
    for frozen in (True, False):
        model = Adapted(job.net(), frozen)
        compiled = job.compile(model)
        left = [p for p in model.parameters() if p.requires_grad]
        job.train(compiled, torch.optim.SGD(left, lr=0.1, momentum=0.9), 3)
        job.record_model(model, f"frozen {frozen}")
        job.record(f"frozen {frozen} keys", [*model.state_dict()])
        job.is_stored(model, "net.up.weight")


def frozen_below_a_view(job: Job) -> None:
    """Parameters frozen before the first call, of which something that was read is alive."""
    for how in ("weight_norm", "read", "view"):
        net = job.net()
        kept = net.down.weight * 2 if how == "read" else net.down.weight.detach().view(-1)
        before = kept.detach().clone()
        if how == "weight_norm":
            nn.utils.weight_norm(net.down)
            net.down.weight_g.requires_grad_(False)
        else:
            net.down.weight.requires_grad_(False)
        compiled = job.compile(net)
        trained = [p for p in net.parameters() if p.requires_grad]
        job.train(compiled, torch.optim.SGD(trained, lr=0.1), 2)
        job.record_model(net, how)
        job.record_model(net, how, gradients=True)
        assert how == "weight_norm" or torch.equal(kept, before)  # that trains the same memory


def weight_norm(net: Net) -> None:
    parametrizations.weight_norm(net.up)


def spectral_norm(net: Net) -> None:
    parametrizations.spectral_norm(net.up)


def orthogonal(net: Net) -> None:
    parametrizations.orthogonal(net.down)


def low_rank(net: Net) -> None:
    parametrize.register_parametrization(net.up, "weight", LowRank(33, WIDTH))
    net.up.parametrizations.weight.original.requires_grad_(False)  # type: ignore[union-attr, operator]


def no_parametrization(net: Net) -> None:
    for module in (net.up, net.down):
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")


def no_low_rank(net: Net) -> None:
    parametrize.remove_parametrizations(net.up, "weight", leave_parametrized=False)


def old_weight_norm(net: Net) -> None:
    """The hook-based weight_norm, which many vocoders still use."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(net.up)


def no_old_weight_norm(net: Net) -> None:
    nn.utils.remove_weight_norm(net.up)


def pruned(net: Net) -> None:
    prune.l1_unstructured(net.up, "weight", amount=0.3)
    prune.ln_structured(net.down, "weight", amount=0.25, n=2, dim=0)
    prune.random_unstructured(net.up, "bias", amount=0.2)


def pruned_for_good(net: Net) -> None:
    prune.remove(net.up, "weight")
    prune.remove(net.up, "bias")
    prune.remove(net.down, "weight")


def pruned_globally(net: Net) -> None:
    prune.global_unstructured(
        [(net.up, "weight"), (net.down, "weight")],
        pruning_method=prune.L1Unstructured,
        amount=0.4,
    )


def frozen(net: Net) -> None:
    net.up.requires_grad_(False)
    net.norm.bias.requires_grad = False


def thawed(net: Net) -> None:
    net.requires_grad_(True)


def frozen_between_steps(job: Job) -> None:
    """Layers frozen and thawed between steps, with an optimizer over all that is trained."""
    net, compiled = job.pair()
    for step, change in enumerate((None, frozen, thawed, frozen)):
        if change is not None:
            change(net)
        net.zero_grad()
        trained = [p for p in net.parameters() if p.requires_grad]
        job.train(compiled, torch.optim.SGD(trained, lr=0.1), [step])
        job.record(f"{step} without gradient", [p.grad is None for p in net.parameters()])
        job.record_model(net, f"{step}")


def cast(job: Job) -> None:
    """`.double()`, `.to(bfloat16)`, `.half()` and back, after the first call."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.zero_grad()
    net.double()
    x, y = (t.double() for t in job.rows(1))
    F.mse_loss(compiled(x), y).backward()
    job.record_model(net, "double", gradients=True)
    net.to(torch.bfloat16)
    job.record("dtypes", [str(p.dtype) for p in net.parameters()])
    job.record_model(net, "bfloat16")
    net.half()
    job.record_model(net, "half")
    net.float()
    net.zero_grad()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [2])
    job.record_model(net, "float")
    job.is_stored(net, "up.weight")


class Tokens(nn.Module):
    """An embedding and a head over it, tied or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Embedding(24, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.body(self.embed(ids))))
        return logits


def _token_step(job: Job, net: nn.Module, compiled: Any, step: int, name: str) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    ids = job.ids(step, 24)
    loss = F.cross_entropy(compiled(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    job.record(f"{name} loss", job.everyone(loss))
    job.record_model(net, name, gradients=True)
    optimizer.step()


def tied_later(job: Job) -> None:
    """Weights tied after the first call, untied again, and tied from the start."""
    net = Tokens()
    compiled = job.compile(net)
    _token_step(job, net, compiled, 0, "apart")
    net.head.weight = net.embed.weight
    job.record("one object", net.head.weight is net.embed.weight)
    _token_step(job, net, compiled, 1, "tied")
    job.record("count", len([*net.parameters()]))
    net.head.weight = nn.Parameter(net.embed.weight.detach().clone())
    _token_step(job, net, compiled, 2, "untied")
    both = Tokens(tied=True)
    again = job.compile(both)
    _token_step(job, both, again, 0, "from the start")
    job.record("still one", both.head.weight is both.embed.weight)
    _token_step(job, both, again, 1, "from the start, again")


def shared_modules(job: Job) -> None:
    """One layer in two places, and the parameters of a sharded model in a second model."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.zero_grad()
    second = Net()
    second.up = net.up
    second.down.weight = net.down.weight
    again = job.compile(second)
    job.backward(again, 1)
    job.backward(compiled, 2)
    job.record_model(net, "first", gradients=True)
    job.record_model(second, "second", gradients=True)
    job.record("shared", second.down.weight is net.down.weight)


def grown(job: Job) -> None:
    """Layers added and removed after the first call (progressive growing)."""
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    compiled = job.compile(net)
    job.backward(compiled)
    torch.manual_seed(3)
    net.append(nn.Linear(WIDTH, WIDTH))
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [1])
    del net[1]
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [2])
    job.record("keys", [*net.state_dict()])
    job.record_model(net)


def llama(job: Job, **settings: Any) -> Any:
    """A small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    config = LlamaConfig(
        **sizes, num_attention_heads=2, use_cache=False, pad_token_id=0, **settings
    )
    return LlamaForCausalLM(config)


def language_step(job: Job, net: Any, compiled: Any, step: int, name: str) -> None:
    """A step of SGD on next-token prediction; losses and gradients are recorded."""
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    optimizer.zero_grad()
    ids = job.ids(step, 32)
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    job.record(f"{name} loss", job.everyone(loss))
    job.record_model(net, name, gradients=True)
    optimizer.step()


def resized(job: Job) -> None:
    """`resize_token_embeddings` before and after the first call, larger and smaller."""
    for when in ("before", "after"):
        net = llama(job)
        compiled = job.compile(net)
        if when == "after":
            language_step(job, net, compiled, 0, "first")
        torch.manual_seed(4)
        net.resize_token_embeddings(40, mean_resizing=False)
        job.record(f"{when} embedding", net.get_input_embeddings().weight)
        language_step(job, net, compiled, 1, f"{when}, larger")
        net.resize_token_embeddings(36)
        language_step(job, net, compiled, 2, f"{when}, smaller")
        job.record_model(net, when)


def adapted(when: str) -> Callable[[Job], None]:
    """PEFT: LoRA trained, saved, merged by `merge_and_unload`, and disabled for a reference.

    when: the adapters come "before" or "after" the first call.
    """

    def scenario(job: Job) -> None:
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

        net = llama(job)
        if when == "after":
            language_step(job, net, job.compile(net), 3, "base")
            net.zero_grad()
        torch.manual_seed(5)
        config = LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian"
        )
        model = get_peft_model(net, config)
        compiled = job.compile(model)
        for step in range(2):
            language_step(job, model, compiled, step, str(step))
        job.record("adapters", {k: v for k, v in get_peft_model_state_dict(model).items()})
        ids = job.ids(0, 32)
        with torch.no_grad(), model.disable_adapter():
            job.record("reference", job.everyone(compiled(input_ids=ids, labels=ids).loss))
        merged = model.merge_and_unload()
        job.record_model(merged, "merged")
        with torch.no_grad():
            again = job.compile(merged)
            job.record("of merged", job.everyone(again(input_ids=ids, labels=ids).loss))

    return scenario


def adapters_saved(job: Job) -> None:
    """PEFT's `save_pretrained` of trained adapters, and `from_pretrained` around a fresh model."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
    model = get_peft_model(llama(job), config)
    compiled = job.compile(model)
    for step in range(2):
        language_step(job, model, compiled, step, f"{step}")
    folder = Path(job.folder) / "adapters"
    model.save_pretrained(folder)
    opened = PeftModel.from_pretrained(llama(job), folder)
    job.record_model(opened, "opened")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        job.record("logits", opened(ids).logits)
        job.record("same logits", compiled(ids).logits)


def pretrained(job: Job) -> None:
    """`save_pretrained` of a trained model, and `from_pretrained` of what it wrote."""
    net = llama(job)
    compiled = job.compile(net)
    for step in range(2):
        language_step(job, net, compiled, step, f"{step}")
    opened = net  # as serial, where only the first process of a world would write
    if job.sharded:
        folder = Path(job.folder) / "pretrained"
        net.save_pretrained(folder)  # complete when it returns, on every rank
        opened = type(net).from_pretrained(folder)
    job.record_model(opened, "opened")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        job.record("logits", opened(ids).logits)
        job.record("same logits", compiled(ids).logits)
    language_step(job, net, compiled, 2, "trained on")
