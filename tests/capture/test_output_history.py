"""The autograd state of outputs, as a capture finds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoshard.capture.joint import capture


class _Outputs(nn.Module):
    """Returns a value, what is detached of it, what is computed from it, and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        with torch.no_grad():
            constant = h * 2
        with torch.enable_grad():
            enabled = self.body(x) + 1
        return h, h.detach(), constant, h * 2, h, x, enabled, h.square().mean()


def test_outputs_that_require_gradients_and_those_they_are_of() -> None:
    histories = capture(_Outputs(), (torch.randn(3, 4),), {}).histories
    assert histories.differentiable == {f"output[{place}]" for place in (0, 3, 4, 6, 7)}
    first = {"output[0]", "output[4]"}
    assert {name: set(ancestors) for name, ancestors in histories.ancestors.items()} == {
        "output[3]": first,
        "output[7]": first,
    }
    assert histories.same == {"output[4]": ("output", "output[0]"), "output[5]": ("input", "x")}
    memory = {name: number for (kind, name), number in histories.memory.items() if kind == "output"}
    assert memory["output[0]"] == memory["output[1]"]
    assert memory["output[2]"] != memory["output[3]"]


def test_only_what_forward_enables_requires_gradients_under_no_grad() -> None:
    graph = capture(_Outputs(), (torch.randn(3, 4),), {}, grad=False)
    assert graph.histories.differentiable == {"output[6]"}
    assert graph.tangent_outputs == ("output[6]",)
    assert set(graph.gradients) == {"body.weight", "body.bias"}
