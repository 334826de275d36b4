"""What a step changes, read when it is changed already."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.joint import capture
from tests.capture.interpret import run_joint
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks

aten = torch.ops.aten


class Queue(nn.Module):
    """Scores against a queue of keys, into which the keys of the batch go (MoCo)."""

    queue: torch.Tensor
    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.linspace(-1, 1, 96, dtype=torch.float64).cos().view(8, 12))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            keys = self.key(x)
        queries = self.query(x)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().detach()], 1)
        with torch.no_grad():
            places = (self.place + torch.arange(4)) % 12
            self.queue[:, places] = keys.T
            self.place[0] = (self.place[0] + 4) % 12
        return scores.logsumexp(1).mean() - scores[:, 0].mean()


def _queue() -> Queue:
    torch.manual_seed(0)
    return Queue()


X = torch.linspace(-2, 2, 32, dtype=torch.float64).sin().view(4, 8)


def test_a_copy_of_what_is_changed_later_stays_a_copy() -> None:
    module = _queue()
    graph = capture(module, (X,), {})
    copies = [node for node in graph.graph.nodes if node.target is aten.clone.default]
    assert [copy.all_input_nodes[0] for copy in copies] == [item.node for item in graph.inputs if item.name == "queue"]
    assert list(copies[0].all_input_nodes[0].users) == copies
    changed = {output.name for output in graph.outputs if output.kind == "mutation"}
    assert changed == {"queue", "place", "key.weight", "key.bias"}
    assert torch.equal(run_joint(graph, module, (X,)).output, module(X))


def test_without_gradients_nothing_is_copied() -> None:
    graph = capture(_queue(), (X,), {}, grad=False)
    assert not [node for node in graph.graph.nodes if node.target is aten.clone.default]


def _train(module: Queue) -> dict[str, list[torch.Tensor]]:
    """Losses of four steps, in the third of which the module is called twice before backward, and what is left."""
    optimizer = torch.optim.SGD(module.query.parameters(), lr=0.1)
    found = {}
    for step in range(4):
        loss = module(X)
        if step == 2:
            loss = loss + module(0.5 * X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    found |= {name: parameter.detach() for name, parameter in module.named_parameters()} | dict(module.named_buffers())
    return {name: held_by_ranks(value) for name, value in found.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_queue_of_keys_and_a_teacher_that_follows_train_as_on_one_device(ranks: int) -> None:
    module = _queue()
    expected = _train(copy.deepcopy(module))
    with simulated_mesh(x=ranks) as mesh:
        autoshard.parallelize(module, mesh, (X,), cluster=fast_links())
        found = _train(module)
    for name, values in found.items():
        for value in values:
            assert torch.allclose(value, expected[name][0], rtol=TOLERANCE, atol=TOLERANCE), name
