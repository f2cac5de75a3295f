"""The quantized form of a checkpoint, a part at a time, its accuracy, and which tensors are
quantized: the weights of linear layers and of experts.

Kept as they are: the head and the embeddings, routers (of as many outputs as there are experts, or
fewer than 16), convolutions, whatever is no matrix, and weights whose sizes the layout has not.

How far quantized weights are from the model's: the weights themselves, and what it then says.

Activations are not quantized here, as servers do it in their own ways.

A quantized checkpoint in shares: what each of several processes computes of it, from the values
that it needs for that, so that it can go to a running server without a file.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autoshard.export.errors import export_error
from autoshard.export.published_form import (
    CheckpointPart,
    Description,
    in_published_form,
    published_parts,
    state_tensors,
    whole_parts,
)
from autoshard.export.quantization.layouts import BLOCK, WeightLayout, layout
from autoshard.export.serial_graph import WeightSource, unwrapped
from autoshard.export.spec import weight_dtype

FILE = "quantization_accuracy.json"
_TOKENS = (2, 64)

Inputs = Mapping[str, torch.Tensor]
"""The keyword arguments of a call."""


@dataclass
class Accuracy:
    """What is known of the weights so far. errors: of each, relative to its norm. values: those of
    the parameters with quantized weights, where they are kept for a call of the model."""

    keep: bool
    errors: dict[str, float] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, name: str, weight: torch.Tensor, restored: torch.Tensor) -> None:
        """One weight, by its published name."""
        difference = float((weight.double() - restored.double()).square().sum())
        norm = float(weight.double().square().sum())
        self.errors[name] = math.sqrt(difference / max(norm, 1e-300))
        self._squares = [a + b for a, b in zip(self._squares, (difference, norm))]

    def keep_values(
        self,
        parameters: Mapping[str, torch.Tensor],
        published: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
        restored: Mapping[str, torch.Tensor],
    ) -> None:
        """The values of parameters whose published form is partly `restored`.

        published: what parameters become in the published form. It only moves entries, so numbered
        ones say where each came from.
        """
        if not self.keep or not restored:
            return
        sizes = [one.numel() for one in parameters.values()]
        values = torch.cat([one.reshape(-1) for one in parameters.values()])

        def apart(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            pieces = zip(parameters.items(), flat.split(sizes))
            return {name: piece.view(one.shape) for (name, one), piece in pieces}

        for name, places in published(apart(torch.arange(len(values)))).items():
            if name in restored:
                values[places.reshape(-1)] = restored[name].reshape(-1).to(values.dtype)
        self.values |= apart(values)

    def weights(self) -> dict[str, Any]:
        """How many, how far all of them together are from the model's, and which is farthest."""
        worst = max(self.errors, key=self.errors.__getitem__)
        difference, norm = self._squares
        return {
            "quantized": len(self.errors),
            "relative_error": math.sqrt(difference / max(norm, 1e-300)),
            "largest": {"name": worst, "relative_error": self.errors[worst]},
        }


def example(model: nn.Module) -> Inputs | None:
    """Random token ids, where the model takes them; else None."""
    inner = unwrapped(model)
    config, taken = getattr(inner, "config", None), inspect.signature(inner.forward).parameters
    rows = getattr(config, "vocab_size", None)
    required = {
        name
        for name, one in taken.items()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    }
    if rows is None or "input_ids" not in taken or required - {"input_ids"}:
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    generator = torch.Generator().manual_seed(0)
    device = next(inner.parameters()).device
    return {"input_ids": torch.randint(rows, _TOKENS, generator=generator).to(device)}


def compared(model: nn.Module, accuracy: Accuracy, inputs: Inputs) -> dict[str, Any]:
    """The model's first output with its own weights and with quantized ones; where that is the
    logits of token ids, also the loss of each next token and how often both say the same one. Both
    are computed in the model's own dtype."""
    inner = unwrapped(model)
    own_dtypes = {name: one.dtype for name, one in inner.state_dict().items()}
    values = {name: one.to(own_dtypes[name]) for name, one in accuracy.values.items()}
    with torch.no_grad():
        own = _first(inner(**inputs))
        other = _first(functional_call(inner, values, (), dict(inputs)))
    own, other = own.double(), other.double()
    found: dict[str, Any] = {"relative_error": float((own - other).norm() / own.norm())}
    ids = inputs.get("input_ids")
    if ids is None or own.dim() != 3 or own.shape[:2] != ids.shape:
        return found
    found["same_token"] = float((own.argmax(-1) == other.argmax(-1)).double().mean())
    targets = ids[:, 1:].reshape(-1)
    for name, logits in (("loss", own), ("loss_quantized", other)):
        rows = logits[:, :-1].reshape(len(targets), -1)
        found[name] = float(nn.functional.cross_entropy(rows, targets))
    return found


def _first(outputs: Any) -> torch.Tensor:
    """The logits of a model of transformers, else the first tensor."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    leaves = pytree.tree_leaves(outputs)
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


_WEIGHT, _FEW = ".weight", 16
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def quantized_names(
    model: nn.Module, parts: Sequence[CheckpointPart], kind: str, how: WeightLayout
) -> tuple[frozenset[str], list[str]]:
    """The published names of the weights that are quantized, and of the modules that are not.

    Raises ExportError where there is nothing to quantize, and for experts that the layout has not:
    no server reads a layer of experts that are partly quantized."""
    inner = unwrapped(model)
    modules = dict(inner.named_modules())
    get_head = getattr(inner, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    routed = {getattr(getattr(inner, "config", None), name, None) for name in _EXPERTS}
    names: set[str] = set()
    kept = [name for name, module in modules.items() if head is not None and module is head]
    for part in parts:
        owners = [modules.get(one.name.rpartition(".")[0]) for one in part.sources]
        if any(isinstance(owner, nn.Embedding) for owner in owners):
            continue
        stacked = any(one.value.dim() == 3 and one.value.shape[0] in routed for one in part.sources)
        linear = stacked or all(isinstance(o, nn.Linear) and o is not head for o in owners)
        named = (item for item in part.written.items() if item[0].endswith(_WEIGHT))
        matrices = {name: one for name, one in named if len(one[0]) == 2}
        fitting = {name for name, one in matrices.items() if linear and _fits(one, how, routed)}
        if stacked and (len(fitting) < len(part.written) or not how.experts):
            raise export_error(
                f"{part.sources[0].name}, experts in one tensor of {part.sources[0].value.dim()} "
                f"dims, is written as {len(part.written)} tensors of "
                f"{sorted({shape for shape, _ in part.written.values()})}, which {kind} has not"
                + ("" if how.experts else ": transformers reads no experts of it"),
                remedy="Give another layout; quantize='fp8' has matrices of any size.",
            )
        names |= fitting
        kept += [name.removesuffix(_WEIGHT) for name in matrices.keys() - fitting]
    if not names:
        raise export_error(
            f"{type(inner).__name__} has no weight to quantize: no linear layer with inputs that "
            f"{how.inputs} divides",
            remedy="Export without quantize.",
        )
    return frozenset(names), sorted(set(kept))


def _fits(one: Description, how: WeightLayout, routed: Collection[Any]) -> bool:
    (outputs, inputs), dtype = one
    router = outputs < _FEW or outputs in routed
    return not router and inputs % how.inputs == 0 and dtype.is_floating_point


def quantized_parameters(
    model: nn.Module, parts: Sequence[CheckpointPart], kind: str
) -> dict[str, int]:
    """The parameters whose weights are quantized in their published form, by name, and how many
    rows each published matrix of it has. Raises ExportError as `quantized_names`, and for one that
    is published in part quantized, or turned."""
    names, _ = quantized_names(model, parts, kind, layout(kind))
    found: dict[str, int] = {}
    for part in parts:
        if names.isdisjoint(part.written):
            continue
        shapes = [shape for shape, _ in part.written.values()]
        rows = {shape[0] for shape in shapes if len(shape) == 2}
        for one in part.sources:
            alike = {shape[-1] for shape in shapes} == {one.value.shape[-1]}
            if not part.written.keys() <= names or len(rows) != 1 or not alike:
                raise export_error(
                    f"{one.name} is published as {len(shapes)} tensors of {sorted(set(shapes))}, "
                    "which are no rows of it that are quantized alike",
                    remedy="Export a Hugging Face directory, or without quantize.",
                )
            (found[one.name],) = rows
    return found


class Quantizer:
    """Quantizes the weights of a model that a layout has.

    kind: name of the layout. parts: of the checkpoint as it is published. inputs: of a call of the
    model, with which its outputs are compared; None: only weights are. Raises ExportError for an
    unknown layout, one whose library is missing, and a model without a weight to quantize.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[CheckpointPart],
        kind: str,
        inputs: Inputs | None,
    ) -> None:
        self._model, self._kind, self._inputs = model, kind, inputs
        self._layout = layout(kind)
        self.names, self._kept = quantized_names(model, parts, kind, self._layout)
        self._accuracy = Accuracy(keep=inputs is not None)
        self.parts = [self._described(part) for part in parts]

    def _described(self, part: CheckpointPart) -> CheckpointPart:
        """What is written of a part, told by tensors without memory."""
        written = {}
        for name, (shape, dtype) in part.written.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            for new, tensor in self._tensors(name, empty).items():
                written[new] = (tuple(tensor.shape), tensor.dtype)
        return replace(part, written=written)

    def _tensors(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is written in the place of one published tensor."""
        if name not in self.names:
            return {name: tensor}
        made = self._layout.quantized(tensor)
        return {f"{name.removesuffix('weight')}{last}": one for last, one in made.items()}

    def written(
        self, part: CheckpointPart, tensors: Mapping[str, torch.Tensor], heard: bool = True
    ) -> dict[str, torch.Tensor]:
        """The values to write of a part. tensors: the whole values of its sources, by name. heard:
        whether they count in the report."""
        given = dict(tensors)
        made: dict[str, torch.Tensor] = {}
        restored: dict[str, torch.Tensor] = {}
        for name, tensor in in_published_form(self._model, part, given).items():
            new = self._tensors(name, tensor)
            made |= new
            if heard and name in self.names:
                stem = name.removesuffix("weight")
                state = {full.removeprefix(stem): one for full, one in new.items()}
                restored[name] = self._layout.restored(state)
                self._accuracy.add(name, tensor, restored[name])
        published = partial(in_published_form, self._model, part)
        self._accuracy.keep_values(given, published, restored)
        return made

    def configuration(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        return self._layout.configuration(self._kept)

    def report(self) -> dict[str, Any]:
        """How accurate the whole is, once every part is written."""
        found = {"quantize": self._kind, "weights": self._accuracy.weights()}
        if self._inputs is not None:
            found["outputs"] = compared(self._model, self._accuracy, self._inputs)
        return found


def measured(model: nn.Module, source: WeightSource, dtype: torch.dtype | None, kind: str) -> Any:
    """How accurate a model is with its weights quantized, where nothing is written of them.
    Collective where the model stores shards; then weights alone are compared."""
    inputs = example(model) if source.job.size == 1 else None
    quantizer = Quantizer(model, published_parts(model, state_tensors(model, dtype)), kind, inputs)
    for part, tensors in whole_parts(source, quantizer.parts):
        if source.job.rank == 0:
            quantizer.written(part, tensors)
    return quantizer.report() if source.job.rank == 0 else None


class Share(NamedTuple):
    """A part of a checkpoint that one process computes. rows: of its one matrix; None: all of
    it."""

    part: CheckpointPart
    rows: tuple[int, int] | None


class WrittenRows(NamedTuple):
    """Of a tensor of the directory, of `shape`, the rows from `first` on."""

    name: str
    values: torch.Tensor
    shape: tuple[int, ...]
    first: int


class QuantizedModel:
    """A model as `autoshard.export.huggingface(model, ..., quantize=kind, dtype=dtype)` writes it,
    for `autoshard.weights.send`: names, numbers and scales are those of that directory.

        autoshard.weights.send(autoshard.export.QuantizedModel(model, "fp8", dtype="bfloat16"))

    A scale is of whole rows or blocks of a matrix: each process that sends takes a share of the
    rows of every matrix, of which it lacks little where they are stored by rows, and quantizes it;
    what is published in another form is computed whole by one of them. Raises ExportError as the
    export does.
    """

    def __init__(
        self, model: nn.Module, kind: str, *, dtype: str | torch.dtype | None = None
    ) -> None:
        self.model = model
        chosen = None if dtype is None else weight_dtype(dtype)
        self.form = f"{kind} of {chosen or 'its own dtypes'}"
        parts = published_parts(model, state_tensors(model, chosen))
        self._quantizer = Quantizer(model, parts, kind, None)
        self._written = {n: d[0] for part in self._quantizer.parts for n, d in part.written.items()}
        names = self._quantizer.names
        self._parts = [(part, not names.isdisjoint(part.written)) for part in parts]

    @property
    def kept(self) -> list[str]:
        """The tensors that the directory has as they are stored."""
        return [part.sources[0].name for part, changed in self._parts if part.plain and not changed]

    def shares(self, count: int) -> list[list[Share]]:
        """What each of `count` processes computes."""
        found: list[list[Share]] = [[] for _ in range(count)]
        load = [0] * count
        for part, changed in self._parts:
            if part.plain and changed:
                rows = part.sources[0].value.shape[0]
                blocks = -(-rows // BLOCK)
                for i, own in enumerate(found):
                    low, high = (min(rows, blocks * j // count * BLOCK) for j in (i, i + 1))
                    if low < high:
                        own.append(Share(part, (low, high)))
            elif changed or not part.plain:
                least = load.index(min(load))
                found[least].append(Share(part, None))
                load[least] += sum(one.value.numel() for one in part.sources)
        return found

    def written(self, share: Share, tensors: dict[str, torch.Tensor]) -> Iterator[WrittenRows]:
        """A share's tensors of the directory. tensors: its rows of the sources, by name."""
        whole = share.part.sources[0].value.shape
        for name, made in self._quantizer.written(share.part, tensors, False).items():
            shape, first = self._written[name], 0
            if share.rows is not None and made.dim() < 2:
                made = made.new_tensor(whole)  # a layout says the matrix's shape beside its numbers
            elif share.rows is not None:
                first = share.rows[0] // (1 if shape[0] == whole[0] else BLOCK)
            yield WrittenRows(name, made, shape, first)
