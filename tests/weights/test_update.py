"""Updates between the ranks of one process, threads with connections of their own: values, bytes,
memory, errors on all sides."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard import weights
from autoshard.errors import AutoshardError
from autoshard.weights import WeightLink
from autoshard.weights.link import DEVICE_GROUPS
from autoshard.weights.parts import Sender, Tensors
from autoshard.weights.update import Update
from linked import SERVES, TRAINS, checked, moved, parts, ranks, some


@pytest.mark.parametrize("buffer", [64, 1000, 1 << 20])
@pytest.mark.parametrize("background", [False, True])
def test_from_rows_to_columns(buffer: int, background: bool) -> None:
    old, new = some(1), some(2)
    found = checked(
        ranks(
            4, lambda link: moved(link, old, new, version=7, buffer=buffer, background=background)
        )
    )
    reports = [report for _, report in found]
    for rank in (2, 3):
        expected = parts(new, SERVES[1], SERVES[0], rank - 2)
        for name, part in found[rank][0].items():
            assert torch.equal(part.tensor, expected[name].tensor), name
        lacked = sum(part.tensor.nbytes for part in expected.values())
        assert (reports[rank].received, reports[rank].copied) == (lacked, 0)
    assert [report.version for report in reports] == [7] * 4
    assert {(r.fullest, r.total) for r in reports} == {
        (max(r.sent for r in reports), sum(r.sent for r in reports))
    }
    assert max(report.buffer for report in reports) <= buffer
    assert reports[0].total == sum(report.received for report in reports)


@pytest.mark.parametrize(
    ("sent", "wanted", "size"),
    [
        (torch.float32, torch.bfloat16, 2),
        (torch.bfloat16, torch.float32, 2),
        (torch.float16, torch.bfloat16, 2),
    ],
)
def test_what_is_narrower_travels(sent: torch.dtype, wanted: torch.dtype, size: int) -> None:
    """bfloat16 travels in half the bytes of the float32 that is trained; float32 that is wanted of
    bfloat16 is made where it arrives."""
    old, new = some(1, wanted), some(2, sent)
    found = checked(ranks(4, lambda link: moved(link, old, new)))
    expected = parts(new, SERVES[1], SERVES[0], 0)
    for name, part in found[2][0].items():
        assert torch.equal(part.tensor, expected[name].tensor.to(wanted)), name
    count = sum(part.tensor.numel() for part in expected.values())
    assert found[2][1].received == count * size


class Tied(nn.Module):
    def __init__(self, tied: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(3)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize(("sends", "takes"), [(True, True), (True, False), (False, False)])
def test_of_modules_with_buffers_and_tied_weights(sends: bool, takes: bool) -> None:
    source, target = Tied(sends, 1), Tied(takes, 2)
    source.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    kept = target.embedding.weight

    def run(link: WeightLink) -> Any:
        if link.rank:
            return weights.receive(target, link).wait()
        return weights.send(source, link, version=1).wait()

    _, report = checked(ranks(2, run))
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    assert target.embedding.weight is kept
    once = {id(v): v.nbytes for v in target.state_dict(keep_vars=True).values()}
    assert report.received >= sum(once.values()) - 60 * (sends and not takes)


def test_untied_weights_for_a_tied_model_are_refused() -> None:
    source, target = Tied(False, 1), Tied(True, 2)
    before = {name: value.clone() for name, value in target.state_dict().items()}

    def run(link: WeightLink) -> Any:
        taken = weights.receive if link.rank else weights.send
        with pytest.raises(AutoshardError, match="one tensor here, and are sent as two"):
            taken(target if link.rank else source, link)
        # the link stays: what is right goes on
        return taken(target if link.rank else Tied(True, 3), link).wait()

    checked(ranks(2, run))
    assert not torch.equal(target.state_dict()["head.weight"], before["head.weight"])


def test_a_process_gives_itself_what_it_holds() -> None:
    source, target = Tied(True, 1), Tied(True, 2)
    report = weights.transfer(source, target).wait()
    assert report.sent == report.received == report.buffer == 0 and report.copied > 0
    assert torch.equal(source.head.weight, target.head.weight)


def test_what_leaves_in_the_background_is_that_of_its_step() -> None:
    """The next step writes the weights before any of them has left."""
    source, target, stepped = Tied(True, 1), Tied(True, 2), threading.Event()
    expected = {name: value.clone() for name, value in source.state_dict().items()}

    def run(link: WeightLink) -> Any:
        if link.rank:
            assert stepped.wait(30)
            return weights.receive(target, link).wait()
        update = weights.send(source, link, version=5, background=True)
        for value in source.state_dict().values():
            value.zero_()
        assert not update.done
        stepped.set()
        return update.wait()

    assert [report.version for report in checked(ranks(2, run))] == [5, 5]
    for name, value in target.state_dict().items():
        assert torch.equal(value, expected[name]), name


def refused(change: Callable[[dict[str, torch.Tensor], WeightLink], dict[str, Any]]) -> list[str]:
    """What each rank says of an update that `change` has made impossible; old weights are whole."""
    old, new = some(1), some(2)

    def run(link: WeightLink) -> str:
        mesh, states = TRAINS if link.rank < 2 else SERVES
        held = parts(new if link.rank < 2 else old, states, mesh, link.rank % 2)
        options = {"version": None, "buffer": 4096, "background": False}
        changed = change(held, link)
        before = {name: part.tensor.clone() for name, part in held.items()}
        names = {name: name for name in held}
        ends = (Sender(held), None) if link.rank < 2 else (None, Tensors(held, names))
        with pytest.raises(AutoshardError) as error:
            Update(link, *ends, **{**options, **changed})
        for name, part in held.items():
            assert torch.equal(part.tensor, before[name])
        return str(error.value)

    return checked(ranks(4, run))


def test_a_changed_model_is_an_error_on_all_sides() -> None:
    def another_shape(held: Any, link: WeightLink) -> dict[str, Any]:
        if link.rank == 3:
            held["w0"] = held["w0"]._replace(shape=(8, 12))
        return {}

    said = refused(another_shape)
    assert said[3].startswith("w0 has the shape [8, 12] here, and is sent as [7, 12]")
    assert all(text == f"rank 3: {said[3]}" for text in said[:3])

    def one_more(held: Any, link: WeightLink) -> dict[str, Any]:
        if link.rank >= 2:
            held["extra"] = held["w0"]
        return {}

    assert all("1 of 6 tensors are not sent: extra" in text for text in refused(one_more))

    def two_dtypes(held: Any, link: WeightLink) -> dict[str, Any]:
        if link.rank == 1:
            held["w1"] = held["w1"]._replace(tensor=held["w1"].tensor.half())
        return {}

    assert "rank 0 sends w1 as float32 [9], and rank 1 as float16 [9]" in refused(two_dtypes)[2]
    assert "send the versions ['0', '1']" in refused(lambda _, link: {"version": link.rank % 2})[0]


def test_an_error_in_one_process_is_one_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of an update: the others do not wait for the time limit."""
    original = Update._round

    def failing(self: Any, *args: Any) -> Any:
        if self._link.rank == 1 and len(rounds_run) >= 2:
            raise MemoryError("no room")
        rounds_run.append(self._link.rank)
        return original(self, *args)

    rounds_run: list[int] = []
    monkeypatch.setattr(Update, "_round", failing)

    def small(held: Any, link: WeightLink) -> dict[str, Any]:
        return {"buffer": 64}

    said = refused(small)
    assert all("rank 1: MemoryError: no room" in text for text in said)
    assert len(rounds_run) >= 2


def test_after_a_failure_another_link_goes_on() -> None:
    store, old, new = dist.HashStore(), some(1), some(2)

    def run(link: WeightLink) -> Any:
        with pytest.raises(AutoshardError, match="rank 0: it has other things to do"):
            if link.rank == 0:
                link.begin()
                link.decide("it has other things to do")
            moved(link, old, new)
        with pytest.raises(AutoshardError, match="is closed since an update failed"):
            moved(link, old, new)
        again = WeightLink(store, link.rank, link.size, name="again", timeout=30)
        return moved(again, old, new)

    found = checked(ranks(4, run, store))
    assert torch.equal(found[2][0]["w0"].tensor, new["w0"][:, :6])


@pytest.mark.parametrize("readers", [0, 1, 4])
def test_a_store_that_dies_leaves_one_decision(readers: int) -> None:
    """While the decision is read: whoever could still read it tells the others; if nobody could,
    nothing happens."""
    old, new = some(1), some(2)

    class Dying:
        def __init__(self, store: Any, rank: int) -> None:
            self._store, self._rank = store, rank

        def compare_set(self, *args: str) -> bytes:
            if self._rank >= readers:
                raise RuntimeError("connection reset")
            found: bytes = self._store.compare_set(*args)
            return found

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    def run(link: WeightLink) -> Any:
        mesh, states = TRAINS if link.rank < 2 else SERVES
        held = parts(new if link.rank < 2 else old, states, mesh, link.rank % 2)
        ends = (
            (Sender(held), None) if link.rank < 2 else (None, Tensors(held, {n: n for n in held}))
        )
        arrived = link.gather

        def gather(value: Any) -> list[Any]:
            if value == "all has arrived":
                link._store = Dying(link._store, link.rank)
            return arrived(value)

        link.gather = gather  # type: ignore[method-assign]
        try:
            Update(link, *ends, None, 4096, False)
        except AutoshardError as error:
            assert not readers and "the store with the decision is lost" in str(error)
        return held

    found = checked(ranks(4, run))
    for rank in (2, 3):
        expected = parts(new if readers else old, SERVES[1], SERVES[0], rank - 2)
        for name, part in found[rank].items():
            assert torch.equal(part.tensor, expected[name].tensor), name


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that operators make, those that live at one time at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return made

    def _freed(self, size: int) -> None:
        self.live -= size


def test_memory_beside_the_new_values_is_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million values, in another dtype, through a buffer of 16 KiB; 4 KiB are for words."""
    most: dict[int, int] = {}
    original = Update._run

    def measured(self: Any) -> Any:
        with Allocated() as mode:
            report = original(self)
        most[self._link.rank] = mode.most
        return report

    monkeypatch.setattr(Update, "_run", measured)
    old = {"w": torch.zeros(500, 1000, dtype=torch.bfloat16), "v": torch.zeros(1000, 500)}
    new = {name: torch.randn(value.shape) for name, value in old.items()}
    found = checked(ranks(4, lambda link: moved(link, old, new, buffer=1 << 14)))
    for rank, (held, report) in enumerate(found):
        shadow = sum(part.tensor.nbytes for part in held.values()) if rank >= 2 else 0
        assert 0 < report.buffer <= 1 << 14 < most[rank] - shadow + (1 << 13)
        assert most[rank] <= shadow + (1 << 14) + (1 << 12)


class DeviceGroup:
    """A group of a device's backend: what is asked of it, in order. Nothing travels."""

    asked: ClassVar[dict[int, list[Any]]] = {}

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._asked = self.asked.setdefault(rank, [])

    def __getattr__(self, name: str) -> Any:
        def asked(*args: Any) -> Any:
            given = args[0][0] if args else torch.empty(0, device="meta")
            assert given.is_meta
            self._asked.append((name, given.nbytes, *args[1:2]))
            return SimpleNamespace(wait=lambda: None)

        return asked


@pytest.mark.parametrize("shared", [False, True])
def test_values_of_devices_stay_there(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the device meta in the place of a GPU: by its backend's group, in one launch a round,
    through memory of the device. Of two processes on one device, or one of them on the host, all
    by the host."""
    here = threading.local()
    properties = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=here.place)
    )
    monkeypatch.setitem(DEVICE_GROUPS, "meta", "ProcessGroupOfMeta")
    monkeypatch.setattr(dist, "ProcessGroupOfMeta", DeviceGroup, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: properties)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(DeviceGroup, "asked", {})
    wholes = {name: value.to("meta") for name, value in some().items()}

    def run(link: WeightLink) -> Any:
        here.place = "both" if shared else link.rank
        try:
            return moved(link, wholes, wholes)[1]
        except AutoshardError as error:
            return str(error)

    found = ranks(4, run)
    if shared:  # a tensor without memory has nothing that the host could send
        assert not DeviceGroup.asked and all("meta" in text for text in found)
        return
    reports = checked(found)
    for rank, asked in DeviceGroup.asked.items():
        names = [name for name, *_ in asked]
        of = "send" if rank < 2 else "recv"
        assert names[:2] == ["allreduce", "_start_coalescing"] and names[-1] == "_end_coalescing"
        assert set(names[2:-1]) == {of}
        sizes = sum(size for name, size, *_ in asked if name == of)
        assert sizes == (reports[rank].sent if rank < 2 else reports[rank].received)


def test_worlds_meet_at_an_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    old, new = some(1), some(2)

    def run(link: Any) -> Any:
        return moved(weights.meet(address, link.rank, 4, timeout=30), old, new, version=3)

    found = checked(ranks(4, run))
    assert found[3][1].version == 3
    assert torch.equal(found[3][0]["w0"].tensor, new["w0"][:, 6:])


def test_an_address_has_a_port() -> None:
    with pytest.raises(AutoshardError, match="'nowhere' is no address"):
        weights.meet("nowhere", 0, 1)
