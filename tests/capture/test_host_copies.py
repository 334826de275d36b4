"""Copies between a device and its host: what they copy, and on which stream they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.capture import host_copies
from autoshard.capture.host_copies import AWAIT_COPY, START_TO_DEVICE, START_TO_HOST, TO_DEVICE, TO_HOST
from autoshard.patterns import check
from autoshard.patterns.registry import op_call, rule_for
from autoshard.patterns.strategy import axis_choices, fitting_choices, operand_specs
from autoshard.specs.axes import MeshShape

LAYOUTS = {
    "rows": torch.randn(3, 4),
    "columns": torch.randn(4, 3).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "bfloat16": torch.randn(5).bfloat16(),
    "complex": torch.randn(2, 2, dtype=torch.complex64),
    "integers": torch.arange(6).view(2, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ops", [(TO_HOST, TO_DEVICE), (START_TO_HOST, START_TO_DEVICE)], ids=["whole", "started"])
def test_what_comes_back_is_what_was_moved(name: str, ops: tuple[Any, Any]) -> None:
    tensor = LAYOUTS[name]
    host = AWAIT_COPY(ops[0](tensor), tensor)
    back = AWAIT_COPY(ops[1](host))
    assert back.equal(tensor)
    assert back.stride() == tensor.stride()
    assert len({each.untyped_storage()._cdata for each in (tensor, host, back)}) == 3


def test_without_numbers_the_host_has_the_tensor() -> None:
    with FakeTensorMode():
        tensor = torch.empty(4, 3, device="cuda").t()
        host = TO_HOST(tensor)
        back = TO_DEVICE(host, tensor.device)
    assert (host.device.type, back.device) == ("cpu", tensor.device)
    assert host.stride() == back.stride() == tensor.stride()


class _Streams:
    """Streams that note what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names: dict[int, str] = {}
        self.computing = self.Stream(None, "compute")

    def Stream(self, device: Any, name: str = "aside") -> mock.Mock:  # noqa: N802
        stream = mock.Mock()
        stream.wait_stream.side_effect = lambda other: self.log.append(f"{name} waits for {self.names[id(other)]}")
        stream.wait_event.side_effect = lambda event: self.log.append(f"{name} waits for {event}")
        stream.record_event.side_effect = lambda: self.log.append(f"event on {name}") or f"event of {name}"
        self.names[id(stream)] = name
        return stream

    def current_stream(self, device: Any) -> mock.Mock:
        return self.computing

    @contextlib.contextmanager
    def stream(self, stream: mock.Mock) -> Iterator[None]:
        self.log.append(f"copies on {self.names[id(stream)]}")
        yield


def _note(copy: torch.Tensor, source: torch.Tensor, device: torch.device, direction: str) -> torch.Tensor:
    setattr(copy, host_copies._COPIED, direction)
    return copy


def test_a_copy_waits_for_compute_and_compute_for_the_copy_where_it_is_awaited() -> None:
    streams, tensor = _Streams(), torch.randn(4)
    device = torch.device("cuda", 0)
    with mock.patch.object(torch, "get_device_module", return_value=streams):
        host_copies._stream.cache_clear()
        copy = host_copies.copy_aside(torch.empty(4), tensor, device, "to host")
        again = host_copies.copy_aside(torch.empty(4), tensor, device, "to host")
        # On the processor, nothing is waited for: what a kernel returns keeps what it knows of its copy.
        awaited = AWAIT_COPY(copy, tensor)
        AWAIT_COPY(copy, tensor)
        host_copies._stream.cache_clear()
    # What a kernel notes on its result is on the tensor that its caller gets.
    with mock.patch.object(host_copies, "copy_aside", side_effect=_note):
        assert getattr(START_TO_HOST(tensor), host_copies._COPIED) == "to host"
        assert getattr(START_TO_DEVICE(tensor), host_copies._COPIED) == "from host"
    issued = ["aside waits for compute", "copies on aside", "event on aside"]
    assert streams.log == [*issued, *issued, "compute waits for event of aside"]
    assert awaited.equal(tensor)
    assert again.equal(tensor)


@pytest.mark.parametrize("op", [TO_HOST, TO_DEVICE], ids=["to host", "to device"])
def test_any_placement_passes(op: Any) -> None:
    for shape in ((12, 12), (12, 5), (7,), (1, 12, 3)):
        tensor = torch.randn(shape, dtype=torch.float64)
        assert check(op, (tensor,)) == []
        graph = fx.Graph()
        node = graph.call_function(op, (graph.placeholder("x"),))
        node.args[0].meta["val"] = node.meta["val"] = tensor  # type: ignore[union-attr]
        rule = rule_for(op_call(node))
        assert rule is not None
        mesh = MeshShape.of({"x": 2, "y": 2})
        choices = fitting_choices(rule, [axis_choices(rule, size) for size in mesh.sizes], mesh)
        specs = {str(spec) for spec in operand_specs(rule, choices, mesh, 0)}
        # Whole, sums, and shards of every dim that an axis splits.
        assert {"R R", "P(sum) R", "R P(sum)"} <= specs
        assert {f"S({dim}) R" for dim, size in enumerate(shape) if size > 1} <= specs
