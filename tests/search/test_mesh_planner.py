"""Where a search begins: which meshes leave room, and with how many microbatches pipelines are planned."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.memory.optimizer import optimizer_memory
from autoshard.search.mesh_planner import InitialGuess, saved_bytes, typical_bytes
from autoshard.search.shapes import PIPELINE_AXIS, Shape, shapes
from autoshard.specs.axes import MeshShape
from tests.search.test_mesh_search import BATCH, WIDE, model, request

PARAMETERS = 4 * (2 * 2 * WIDE * WIDE + 3 * WIDE)
ADAM = optimizer_memory(None, None, foreach=False)


def pipeline(ranks: int, devices: int) -> Shape:
    return Shape(MeshShape.of({PIPELINE_AXIS: ranks, "x": devices // ranks}), PIPELINE_AXIS)


def test_parameters_and_what_belongs_to_them_are_shared_by_stages_and_inside_hosts() -> None:
    _, _, graph = model()
    counts = 4 * 4  # Adam's steps, one for every parameter
    for ranks, parts in ((2, 4), (4, 8), (16, 16)):  # two devices to a host: a stage of eight has all four times
        held = typical_bytes(graph, pipeline(ranks, 16), ADAM, per_host=2)
        largest = 4 * 2 * WIDE * WIDE // parts  # the optimizer makes two tensors of its size, and leaves one of them
        assert 0 <= held - 4 * PARAMETERS // parts - counts - 2 * largest <= largest


def test_what_is_saved_counts_once_whatever_looks_at_it() -> None:
    class Viewed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()  # its derivative reads what it made
            return (y.view(-1).sum() + y.t().sum()).square()

    graph = capture(Viewed(), (torch.empty(4, 8, requires_grad=True),), {})
    assert saved_bytes(graph) == 4 * 8 * 4 + 4  # and the sum that is squared


def test_there_are_more_microbatches_where_less_is_to_be_saved() -> None:
    wanted = request(pipelines="outer")
    shape = pipeline(2, 4)
    assert InitialGuess(wanted).microbatches(shape) == 8
    held = typical_bytes(wanted.graph, shape, wanted.target.settings.optimizer, 2)
    saved = saved_bytes(wanted.graph)
    tight = request(pipelines="outer", memory_limit=held + saved // 2 // 32)
    assert InitialGuess(tight).microbatches(shape) == 32
    none = request(pipelines="outer", memory_limit=held)
    assert InitialGuess(none).microbatches(shape) == max(none.feasible_numbers(shape))


def test_devices_of_a_host_may_share_a_sample_in_a_stage_of_several_hosts() -> None:
    wanted = request(pipelines="outer")  # two devices to a host
    assert max(wanted.feasible_numbers(pipeline(2, 4))) == BATCH // 2
    assert max(wanted.feasible_numbers(pipeline(2, 16))) == BATCH // 4


def test_405_billion_parameters_begin_with_pipelines_that_hold_them() -> None:
    """Eight bytes each with gradients and Adam's state: sixteen stages on hosts of eight H100 hold them with room."""
    cluster = Cluster.of("h100")

    def roomy(shape: Shape) -> bool:
        parts = shape.ranks * min(cluster.devices_per_host, shape.devices_per_rank)
        return 405e9 * (2 + 2 + 4) / parts < cluster.device.memory / 2

    found = [str(shape) for shape in shapes(1024, cluster, "outer", roomy)]
    assert found[:2] == ["pp=16, x=8, y=8", "pp=32, x=4, y=8"]
    assert found.index("pp=4, x=32, y=8") < found.index("x=128, y=4, z=2")


def test_a_mesh_is_roomy_by_the_memory_that_there_is() -> None:
    wanted = request(pipelines="outer")
    shape = pipeline(2, 4)
    held = typical_bytes(wanted.graph, shape, wanted.target.settings.optimizer, 2)
    for limit, expected in ((2 * held, True), (2 * held - 2, False)):
        settings = dataclasses.replace(wanted.target.settings, memory_limit=limit)
        options = dataclasses.replace(wanted.target, settings=settings)
        assert InitialGuess(dataclasses.replace(wanted, target=options)).has_free_memory(shape) is expected
