"""Mixed precision on a mesh against one device, and what is sent in which dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import InputError
from autoshard.planner.planning_problem import Constraints
from autoshard.program.split import split
from autoshard.specs.emitter import collectives
from tests.runtime.meshes import simulated_mesh
from tests.runtime.programs import step_on
from tests.training import fast_links, held_by_ranks, relative_difference

aten = torch.ops.aten

BF16 = torch.bfloat16
BF16_TOLERANCE = 3e-2  # of the largest element: eight bits of mantissa, and sums in another order


PASSING = (
    *(aten.view.default, aten.reshape.default, aten.t.default, aten._to_copy.default),
    *(collectives.wait_tensor.default, collectives.all_gather_into_tensor.default),
)
REDUCTIONS = (collectives.all_reduce.default, collectives.reduce_scatter_tensor.default)


class Sent(TorchDispatchMode):
    """While active, notes the kind and dtype of every collective of more than a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        sends = func.namespace == "_c10d_functional" and func is not torch.ops._c10d_functional.wait_tensor.default
        for sent in pytree.tree_leaves(args[0]) if sends else ():
            if sent.numel() > 8:
                self.found.add((func.overloadpacket.__name__, sent.dtype))
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """Embedding and head of one weight, a norm, and a loss in float32 or better."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.outer = nn.Linear(32, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.outer(self.norm(torch.relu(self.inner(self.embed(tokens))))) * scale
        logits = self.head(hidden)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return {"loss": nn.functional.cross_entropy(logits.to(dtype).flatten(0, 1), tokens.flatten()), "logits": logits}


def example(batch: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "tokens": torch.randint(0, 40, (batch, 6), generator=generator),
        "scale": torch.rand(16, generator=generator) + 0.5,
    }


def one_device(dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Loss and float32 gradients of a copy of the model in another dtype."""
    torch.manual_seed(0)
    module, inputs = Tied().to(dtype), example()
    loss = module(inputs["tokens"], inputs["scale"].to(dtype))["loss"]
    loss.backward()
    return loss.detach(), {name: held_by_ranks(p.grad.float()) for name, p in module.named_parameters()}


def on_mesh(policy: MixedPrecisionPolicy, mesh: dict[str, int], **options: Any) -> tuple[Any, Any, nn.Module, Sent]:
    torch.manual_seed(0)
    module, inputs = Tied(), example()
    with simulated_mesh(**mesh) as device_mesh:
        autoshard.parallelize(
            module,
            device_mesh,
            (),
            inputs,
            cluster=fast_links(),
            mp_policy=policy,
            search=autoshard.Search(time_limit=10.0),
            **options,
        )
        with Sent() as sent:
            result = module(**inputs)
            result["loss"].backward()
        gradients = {name: held_by_ranks(p.grad) for name, p in module.named_parameters()}
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in module.parameters())
        result = {name: held_by_ranks(value) for name, value in result.items()} | {"dtype": result["logits"].dtype}
    return result, gradients, module, sent


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}])
def test_compute_in_float64_equals_one_device_in_float64(mesh: dict[str, int]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    loss, expected = one_device(torch.float64)
    result, gradients, _, _ = on_mesh(policy, mesh)
    assert all(abs(float(value - loss)) <= 1e-9 for value in result["loss"])
    assert relative_difference(gradients, expected) <= 1e-6  # rounded to float32 at the end


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_bfloat16_is_near_one_device_in_bfloat16(reduce_dtype: torch.dtype | None) -> None:
    loss, expected = one_device(BF16)
    result, gradients, _, _ = on_mesh(MixedPrecisionPolicy(BF16, reduce_dtype), {"dp": 2, "tp": 2})
    assert all(abs(float(value - loss)) <= BF16_TOLERANCE * float(loss) for value in result["loss"])
    assert relative_difference(gradients, expected) <= BF16_TOLERANCE


@pytest.mark.parametrize(
    ("policy", "reduced_as"),
    [
        (MixedPrecisionPolicy(BF16, torch.float32), torch.float32),
        (MixedPrecisionPolicy(BF16), BF16),
        (MixedPrecisionPolicy(BF16, torch.float16), torch.float16),
        (MixedPrecisionPolicy(reduce_dtype=BF16), BF16),
    ],
)
def test_gradients_are_reduced_in_the_dtype_asked_for(policy: MixedPrecisionPolicy, reduced_as: torch.dtype) -> None:
    graph = capture(Tied(), (), example(batch=512), mp_policy=policy)  # large: data parallel is cheapest
    with simulated_mesh(dp=4) as device_mesh:
        step = step_on(graph, device_mesh, cluster=fast_links())
    final = next(iter(step.graph_module.graph.find_nodes(op="output"))).args[0]
    gradients = [node for node, border in zip(final, step.outputs, strict=True) if border.kind == "gradient"]
    reductions = [dtype for node in gradients for dtype in reductions_behind(node)]
    assert set(reductions) == {reduced_as}


def reductions_behind(node: fx.Node) -> list[torch.dtype]:
    """Dtypes in which a gradient is reduced, from its operator to where it is handed back."""
    found = []
    while node.target in PASSING or node.target in REDUCTIONS:
        if node.target in REDUCTIONS:
            found.append(node.all_input_nodes[0].meta["val"].dtype)
        node = node.all_input_nodes[0]
    return found


def test_gradients_reduced_in_another_dtype_are_reduced_together() -> None:
    inputs = example(batch=512)
    graph = capture(Tied(), (), inputs, mp_policy=MixedPrecisionPolicy(BF16))
    with simulated_mesh(dp=4) as device_mesh:
        everywhere = {name: (Replicate(),) for name, _ in Tied().named_parameters()}
        local = {name: (Shard(0),) for name in inputs if name == "tokens"}
        step = step_on(graph, device_mesh, Constraints(pinned={**everywhere, **local}), fast_links())
        backward = split(step, compile=False).backward
    assert backward is not None
    assert len(backward.graph.find_nodes(op="call_function", target=collectives.all_reduce.default)) < 7


def test_parameters_are_cast_before_they_are_gathered() -> None:
    *_, sent = on_mesh(MixedPrecisionPolicy(BF16, torch.float32), {"dp": 4}, hints={"*": {"dp": Shard(0)}})
    assert {dtype for kind, dtype in sent.found if kind.startswith("all_gather_into_tensor")} == {BF16}


def test_a_plan_tells_of_casts_that_are_gathered_as_of_their_parameters() -> None:
    hints = {"*": {"dp": Shard(0)}}
    full, lowered = (
        autoshard.plan(Tied(), {"dp": 4}, (), example(), hints=hints, mp_policy=policy, cluster=fast_links())
        for policy in (None, MixedPrecisionPolicy(BF16))
    )
    assert lowered.gathered
    assert lowered.gathered.keys() <= full.placements.keys()


def test_outputs_and_inputs_are_cast_as_the_policy_says() -> None:
    result, *_ = on_mesh(MixedPrecisionPolicy(BF16, output_dtype=torch.float32), {"dp": 2})
    assert result["dtype"] is torch.float32
    cast, *_ = on_mesh(MixedPrecisionPolicy(BF16), {"dp": 2})
    assert cast["dtype"] is BF16


@pytest.mark.parametrize("cast", [True, False])
def test_inputs_are_cast_unless_the_policy_says_otherwise(cast: bool) -> None:
    module, inputs = nn.ReLU(), {"input": torch.ones(4, 8)}
    plan = autoshard.plan(module, {"dp": 1}, (), inputs, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=cast))
    assert [choice.operator for choice in plan.choices] == ["aten._to_copy", "aten.relu"][not cast :]


def test_memory_counts_parameters_in_their_own_dtype_and_activations_in_that_of_the_compute() -> None:
    full = autoshard.plan(Tied(), {"dp": 1}, (), example())
    lowered = autoshard.plan(Tied(), {"dp": 1}, (), example(), mp_policy=MixedPrecisionPolicy(BF16))
    assert lowered.memory.parameters == full.memory.parameters
    assert lowered.memory.gradients == full.memory.gradients
    assert lowered.fingerprint != full.fingerprint


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(InputError, match="MixedPrecisionPolicy"):
        autoshard.plan(Tied(), {"dp": 2}, (), example(), mp_policy=BF16)
    with pytest.raises(InputError, match=r"reduce_dtype is torch\.int8"):
        autoshard.plan(Tied(), {"dp": 2}, (), example(), mp_policy=MixedPrecisionPolicy(BF16, torch.int8))


class Islands(nn.Module):
    """Products under autocast, and one in float32 between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        with torch.autocast(x.device.type, enabled=False):
            h = self.second(h.float())
        return self.last(h).float().square().mean()


@pytest.mark.parametrize("around_backward", [True, False])
def test_a_program_runs_as_it_was_captured_under_autocast(around_backward: bool) -> None:
    """Autocast that is active around a call casts nothing in its program, which has the casts of the capture."""
    torch.manual_seed(0)
    reference, x = Islands(), torch.randn(8, 16)
    module = Islands()
    module.load_state_dict(reference.state_dict())
    with torch.autocast("cpu", BF16):
        loss = reference(x)
    loss.backward()
    with simulated_mesh(dp=1) as mesh:
        with torch.autocast("cpu", BF16):
            autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
            found = module(x)
            if around_backward:
                found.backward()
        if not around_backward:
            found.backward()
        gradients = {name: held_by_ranks(parameter.grad) for name, parameter in module.named_parameters()}
    expected = {name: [parameter.grad] for name, parameter in reference.named_parameters()}
    assert relative_difference(gradients, expected) < 1e-5  # the same casts: nothing but the order of sums differs


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_lists_of_parameters_follow_their_casts(kind: type[nn.RNNBase]) -> None:
    """Recurrent layers keep one."""
    graph = capture(kind(4, 4), (torch.randn(2, 3, 4),), {}, mp_policy=MixedPrecisionPolicy(BF16))
    assert {item.kind for item in graph.outputs} == {"output", "gradient"}
