"""Add a rule for a custom operator and check it: torchrun --nproc-per-node 2 examples/custom_operator.py

The operator is a gated unit with a scale per channel, as a custom kernel would fuse it: y = x · sigmoid(gate) · scale.
torch needs a `torch.library.custom_op` with a fake for tracing and a backward. autoshard needs one rule for each of the
two operators. `autoshard.patterns.check` compares the rules with the operators before a model uses them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard


@torch.library.custom_op("example::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    return x * torch.sigmoid(gate) * scale


@gated.register_fake
def _(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("example::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    opened = torch.sigmoid(gate)
    inner = grad * scale
    return inner * opened, inner * x * opened * (1 - opened), (grad * x * opened).sum((0, 1))


@gated_backward.register_fake
def _(grad: Tensor, x: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate), torch.empty_like(scale)


gated.register_autograd(
    lambda ctx, grad: gated_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# The unit is linear in x and in the scale, so partial sums of these may pass; it is not linear in the gate.
autoshard.register_rule("example::gated", "b s h, b s h, h -> b s h", linear="0, 2")
# The scale's gradient lacks b and s, so their shards leave partial sums: the all-reduce of data parallelism.
autoshard.register_rule("example::gated_backward", "b s h, b s h, b s h, h -> b s h, b s h, h", linear="0")


def check_rules() -> None:
    """Check the rules against the operators, and show the finding of a wrong rule."""
    x, gate, grad = torch.randn(3, 4, 6, 12, dtype=torch.float64)
    scale = torch.randn(12, dtype=torch.float64)
    print("findings, forward: ", len(autoshard.patterns.check(gated, (x, gate, scale))))
    print("findings, backward:", len(autoshard.patterns.check(gated_backward, (grad, x, gate, scale))))

    autoshard.register_rule("example::gated", "b s h, b s h, h -> b s h", linear="0, 1, 2", replace=True)
    wrong = autoshard.patterns.check("example::gated", (x, gate, scale), sizes=(2,))
    print(f"said to be linear in the gate too: {str(wrong[0])[:110]}...")
    autoshard.register_rule("example::gated", "b s h, b s h, h -> b s h", linear="0, 2", replace=True)


class Block(nn.Module):
    def __init__(self, width: int = 256, inner: int = 1024) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, inner))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.down(gated(self.up(x), self.gate(x), self.scale)), target)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients by name."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Block().double()
    x, target = torch.randn(2, 4, 16, 256, dtype=torch.float64)
    expected = model(x, target)
    expected.backward()
    on_one_device = gradients(model)
    model.zero_grad()

    autoshard.parallelize(model, mesh, example_args=(x, target))
    loss = model(x, target)
    loss.backward()
    difference = max((grad - on_one_device[name]).abs().max().item() for name, grad in gradients(model).items())

    if dist.get_rank() == 0:
        check_rules()
        strategies = {row.operator: row.strategy for row in model.sharding_plan.choices if "gated" in row.operator}
        print("strategies:", strategies)
        print("placements:", {name: placed[0] for name, placed in model.sharding_plan.placements.items()})
        print(f"loss {loss.item():.6f}, on one device {expected.item():.6f}; gradients differ by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
