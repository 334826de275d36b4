"""Seeds are messages between hosts: no device makes them, and none has to be waited for to read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.runtime import host_groups
from autoshard.runtime.host_groups import Seeds
from autoshard.runtime.step import Ranks
from tests.runtime.meshes import one_device, per_rank, simulated_mesh


def test_a_seed_is_one_number_for_all_ranks_and_another_for_every_step() -> None:
    with simulated_mesh(x=2, y=2) as mesh:
        agreed = Seeds(mesh)
        draws = [{int(value) for value in per_rank(agreed.draw(), mesh).values()} for _ in range(2)]
    assert [len(draw) for draw in draws] == [1, 1]
    assert draws[0] != draws[1]


def test_seeds_and_coordinates_are_on_the_host_whatever_the_device() -> None:
    """The meta device stands for an accelerator: reading a number from it is an error."""
    with one_device("meta") as mesh:
        ranks = Ranks(mesh, torch.device("meta"))
        torch.manual_seed(7)
        first = ranks.seed(True)
        torch.manual_seed(7)
        assert int(first) == int(ranks.seed(True))
        device, host, seed = ranks.arguments(first)
    assert device.device.type == "meta"
    assert (int(host), int(seed)) == (0, int(first))


def test_a_group_that_sends_nothing_of_the_cpu_gets_one_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[list[int], dict[str, Any]]] = []

    def new_group(ranks: list[int], **options: Any) -> Any:
        built.append((ranks, options))
        return dist.group.WORLD

    monkeypatch.setattr(dist, "new_group", new_group)
    with simulated_mesh(x=2, y=2) as mesh:
        assert host_groups.host_group(mesh, 0) is mesh.get_group(0)
        assert not built
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        host_groups.host_group(mesh, 1)
    assert built == [([0, 1], {"backend": "gloo", "use_local_synchronization": True})]
