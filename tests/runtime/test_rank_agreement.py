"""What tells one batch from another: numbers of any size are near to themselves, and other ones are not.

Seeds are messages between hosts: no device makes them, and none has to be waited for to read them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.runtime import rank_agreement
from autoshard.runtime.rank_agreement import Seeds, _is_close, _summary
from autoshard.runtime.step import Ranks
from tests.runtime.meshes import one_device, per_rank, simulated_mesh

TENSORS = {
    "numbers": torch.randn(50, generator=torch.Generator().manual_seed(0)),
    "the mask of smallest numbers": torch.full((4, 4), torch.finfo(torch.float32).min).triu(1),
    "the mask of infinities": torch.full((4, 4), -torch.inf).triu(1),
    "the largest doubles": torch.full((8,), torch.finfo(torch.float64).max, dtype=torch.float64),
    "not numbers": torch.tensor([1.0, torch.nan, torch.inf]),
    "zeros": torch.zeros(3, 4),
    "nothing": torch.zeros(0, 4),
    "half": torch.arange(5.0).to(torch.bfloat16),
    "one": torch.tensor(2.5),
    "integers": torch.arange(6),
    "flags": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_near_to_itself(name: str) -> None:
    assert _is_close(_summary(TENSORS[name]), _summary(TENSORS[name].clone()))


def test_rounding_is_near_and_another_batch_is_not() -> None:
    batch = TENSORS["numbers"]
    assert _is_close(_summary(batch * (1 + 1e-6)), _summary(batch))
    assert not _is_close(_summary(batch.flip(0)), _summary(batch))
    assert not _is_close(_summary(2 * batch), _summary(batch))
    assert not _is_close(_summary(batch), _summary(torch.zeros(50)))
    assert not _is_close(_summary(torch.zeros(50)), _summary(batch))


def test_masks_of_other_samples_are_told_apart() -> None:
    for name in ("the mask of smallest numbers", "the mask of infinities"):
        assert not _is_close(_summary(TENSORS[name].flip(0)), _summary(TENSORS[name]))


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
        assert rank_agreement.host_group(mesh, 0) is mesh.get_group(0)
        assert not built
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        rank_agreement.host_group(mesh, 1)
    assert built == [([0, 1], {"backend": "gloo", "use_local_synchronization": True})]
