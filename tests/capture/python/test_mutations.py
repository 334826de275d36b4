"""What `forward` leaves in containers, objects and variables is what one device leaves there, or refused by line."""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import CaptureError
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks


class Record:
    """A plain object of the model's, or of nobody's."""

    def __init__(self) -> None:
        self.last: Any = None
        self.items: list[Any] = []


LIST: list[Any] = []
DICT: dict[str, Any] = {}
RECORD = Record()
LAST: Any = None
COUNT = 0


def _kept_by_default(loss: Tensor, factors: list[float] = [1.0, 0.5], *, kept: list[Tensor] = []) -> Tensor:  # noqa: B006
    """Functions of models have such defaults, whatever one thinks of them."""
    kept.append(loss)
    return loss * factors[1]


DEFAULTS: Any = _kept_by_default.__kwdefaults__


class Leaving(nn.Module):
    """Leaves something everywhere."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.part = nn.Identity()
        self.part.stats = {}  # type: ignore[assignment]
        self.record, self.log, self.losses, self.numbers = Record(), [], [], []
        self.nested: dict[str, list[Any]] = {"a": []}
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.last_loss = 0.0

    def forward(self, x: Tensor) -> Tensor:
        global LAST, COUNT
        h = self.linear(x)
        loss = h.square().mean()
        self.part.stats["x"] = h  # type: ignore[operator, index]
        self.log.append(h.detach())
        self.losses.append(loss.item())
        self.numbers.append(h.shape[0])
        self.recent.append(h.mean())
        self.last_loss = loss.item()
        self.made = {"x": h, "pair": (h, 2 * h), "number": 3}
        self.record.last = h
        LIST.append(h)
        DICT["x"] = loss
        RECORD.last = h
        LAST = loss
        COUNT += 1
        type(self).kept = h
        return _kept_by_default(loss)


X = torch.randn(4, 8, dtype=torch.float64)


def _left(module: Any) -> list[Any]:
    own = [module.part.stats, module.log, module.losses, module.numbers, module.recent, module.last_loss, module.made]
    return [own, vars(module.record), LIST, DICT, vars(RECORD), LAST, COUNT, module.kept, DEFAULTS]


def _forget() -> None:
    global LAST, COUNT
    LIST.clear()
    DICT.clear()
    DEFAULTS["kept"].clear()
    RECORD.__init__()  # type: ignore[misc]
    LAST, COUNT, Leaving.kept = None, 0, None


def _same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) or isinstance(theirs, Tensor)
    if isinstance(theirs, Tensor):
        assert ours.requires_grad == theirs.requires_grad
        for held in held_by_ranks(ours.detach()):
            assert torch.allclose(held, theirs.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        _same(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, (list, tuple, collections.deque)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _same(one, other)
    else:
        assert ours == pytest.approx(theirs)


def test_what_forward_leaves_is_what_one_device_leaves() -> None:
    _forget()
    module = Leaving()
    alone = copy.deepcopy(module)
    for _ in range(6):
        alone(X)
    expected = copy.copy(_left(alone))
    expected[2:4] = copy.copy(LIST), copy.copy(DICT)
    expected[4], expected[8] = dict(expected[4]), {"kept": [*DEFAULTS["kept"]]}
    _forget()
    with simulated_mesh(x=2) as mesh:
        autoshard.parallelize(module, mesh, (X,), cluster=fast_links())
        assert (LIST, DICT, RECORD.last, LAST, COUNT, module.log, Leaving.kept) == ([], {}, None, None, 0, [], None)
        for _ in range(6):  # more calls than there may be states
            module(X)
        _same(_left(module), expected)
        served = vars(module)["_autoshard_runtime"].programs.table
        assert [len(one.candidates()) for one in served.values()] == [2]  # some variables are None at first
    _forget()


Leave = Callable[[Any, Tensor], Tensor | None]


def _read_log(module: Any, h: Tensor) -> Tensor:
    h = sum(module.log, h)
    module.log.append(h.detach())
    return h


def _in_an_object(module: Any, h: Tensor) -> None:
    module.record = Record()
    module.record.last = h


def _computed_number(module: Any, h: Tensor) -> None:
    module.log.append(h.sum().item() * 2)


REFUSED: dict[Leave, str] = {
    _read_log: "reads a tensor in self.log, which forward changes",
    _in_an_object: "keeps a Record with tensors in self.record",
    _computed_number: r"keeps a number in self.log\[0\] that was computed of numbers in a tensor",
}


@pytest.mark.parametrize("leave", REFUSED, ids=lambda leave: leave.__name__)
def test_what_no_graph_can_leave_is_refused_by_its_line(leave: Leave) -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8, dtype=torch.float64)
            self.log, self.record = [X], Record()

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            left = leave(self, h)
            return (h if left is None else left).sum()

    with pytest.raises(CaptureError, match=rf"test_mutations.py:\d+ .*{REFUSED[leave]}"):
        capture(Net(), (X,), {})


def test_a_list_that_forward_looks_at_has_a_program_for_every_length() -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8, dtype=torch.float64)
            self.log: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            if len(self.log) == 2:
                self.log.clear()
            self.log.append(super().forward(x).detach())
            return super().forward(x).sum() * len(self.log)

    module = Net()
    alone = copy.deepcopy(module)
    with simulated_mesh(x=2) as mesh:
        autoshard.parallelize(module, mesh, (X,), cluster=fast_links())
        for _ in range(4):
            _same([module(X), module.log], [alone(X), alone.log])


def test_a_hook_finds_what_forward_left_though_forward_counts() -> None:
    class Net(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = super().forward(x)
            DICT["scale"] = x.mean()
            h.register_hook(lambda gradient: gradient * DICT["scale"])
            return h.sum()

    _forget()
    state = capture(Net(8, 8, dtype=torch.float64), (X,), {}).state
    assert {mutation.path for mutation in state.mutations} == {"self.calls", f"{__name__}.DICT"}
    assert not DICT


class Monitor(threading.Thread):
    """A thread that counts for itself, as the monitors of progress bars do."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ticks = 0
        self.asked, self.answered = threading.Event(), threading.Event()

    def run(self) -> None:
        while self.asked.wait():
            self.asked.clear()
            self.ticks += 1
            self.answered.set()

    def tick(self) -> None:
        self.asked.set()
        assert self.answered.wait(60.0)
        self.answered.clear()


MONITOR = Monitor()


class Watched(nn.Module):
    """Runs beside a thread that the code of its forward and its backward can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.linear.register_full_backward_hook(lambda *_: MONITOR.tick())

    def forward(self, x: Tensor) -> Tensor:
        MONITOR.tick()
        return self.linear(x).sum()


def test_what_a_thread_changes_beside_a_call_is_not_of_the_call() -> None:
    MONITOR.start()
    ticks = MONITOR.ticks
    graph = capture(Watched(), (torch.randn(4, 8, dtype=torch.float64),), {})
    assert MONITOR.ticks > ticks
    assert not graph.state.mutations


class Showing(nn.Module):
    """Shows a bar of progress, which torch does too while it traces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.layers[0].register_full_backward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in tqdm(self.layers, disable=True):
            x = layer(x)
        return x.sum()


def test_a_bar_of_progress_is_no_state_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor", None)  # the first bar of a process makes it
    graph = capture(Showing(), (torch.randn(4, 8, dtype=torch.float64),), {})
    assert not graph.state.mutations
