"""Plans that move values to the host: they compute what one device computes, and hold what they say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.capture import capture
from autoshard.capture.host_copies import AWAIT_COPY, START_TO_DEVICE, START_TO_HOST
from autoshard.specs.axes import MeshShape
from tests.memory_models import build as build_for_memory
from tests.memory_tracker import first_rank, track_step
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh
from tests.runtime.test_recompute import Dropped, _loss_and_slope, _mesh
from tests.training import (
    ONE_LAYER,
    TOLERANCE,
    build,
    captured_as,
    compare,
    fast_links,
    one_device,
    train,
    train_random_plan,
)
from tests.workers import Workers

MOVED: dict[str, Any] = {"forced": 0.3, "offload": 0.5}
FAST = [
    ("mlp", (2, 2), 0, MOVED),
    (ONE_LAYER, (3,), 1, MOVED | {"uneven": 0.5, "recompute": 1.0}),
]
SLOW = [
    ("hf_gpt2", (2,), 2, MOVED | {"rerun": 0.5}),
    ("hf_mixtral", (2,), 3, MOVED),
    ("resnet18", (2,), 4, MOVED | {"recompute": 0.5}),
    ("wide_resnet", (3,), 5, MOVED | {"uneven": 0.5, "rerun": 0.3}),
    ("unet", (2,), 6, MOVED),
    ("lstm", (2,), 7, MOVED),
]
CASES = [*(pytest.param(*case) for case in FAST), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("model", "mesh", "seed", "options"), CASES)
def test_random_plans_that_move_values_equal_one_device(
    model: str, mesh: tuple[int, ...], seed: int, options: Mapping[str, Any]
) -> None:
    trace = train_random_plan(model, _mesh(mesh), seed, **options)
    assert compare(trace, one_device(model, len(trace.losses))).worst <= TOLERANCE


def test_dropout_drops_the_same_elements_of_what_was_moved() -> None:
    graph = capture(Dropped().double(), (torch.randn(12, 24, dtype=torch.float64),), {})
    for seed in range(2):
        plan = random_plan(graph, MeshShape.of({"x": 2, "y": 2}), seed, offload=0.7, recompute=seed)
        assert plan.offloaded
        with captured_as(graph):
            losses, slopes = _loss_and_slope(plan)
        assert losses == pytest.approx(slopes, rel=1e-12)


def _train_moved(file: str) -> float:
    """On a real process: the largest difference to one device of training under a plan that moves values."""
    module, inputs = build(ONE_LAYER)
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("axis0",))
    plan = autoshard.ShardingPlan.load(file)
    autoshard.parallelize(module, mesh, (), inputs, plan=plan)
    assert module.sharding_plan.offloaded == plan.offloaded
    return compare(train(module, inputs), one_device(ONE_LAYER)).worst


def test_real_processes_run_a_saved_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    module, inputs = build(ONE_LAYER)
    hints = {"*": autoshard.offload()}
    plan = autoshard.plan(module, {"axis0": 2}, (), inputs, hints=hints, cluster=fast_links(), recompute="none")
    plan.save(file)
    assert plan.offloaded
    assert plan.hints == {"*": "offload()"}
    with Workers(2) as workers:
        assert max(workers.run(_train_moved, str(file))) <= TOLERANCE


@pytest.mark.parametrize(("model", "recompute"), [("GPT", "none"), ("MLP", "full")])
def test_what_is_said_is_held(model: str, recompute: str) -> None:
    peaks = []
    for hints in (None, {"*": autoshard.offload()}):
        module, inputs = build_for_memory(model)
        with first_rank({"x": 2}) as mesh:
            options: dict[str, Any] = {"cluster": fast_links(), "recompute": recompute, "hints": hints}
            autoshard.parallelize(module, mesh, (), inputs, **options)
            tracked = track_step(module, inputs, torch.optim.AdamW(module.parameters()))
        memory = module.sharding_plan.memory
        assert memory.peak == pytest.approx(tracked.peak.bytes, rel=1e-3)
        assert bool(memory.host) == bool(hints)
        peaks.append(memory.peak)
    assert recompute == "full" or peaks[1] < peaks[0]


def test_a_program_that_is_not_compiled_copies_beside_compute() -> None:
    module, inputs = build("mlp")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with simulated_mesh(x=2) as mesh:
        hints = {"*": autoshard.offload()}
        autoshard.parallelize(module, mesh, (), inputs, hints=hints, mp_policy=policy, cluster=fast_links())
        calls: list[Any] = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(func)
                return func(*args, **(kwargs or {}))

        with Watch():
            train(module, inputs, 1)
    count = len(module.sharding_plan.offloaded)
    assert count
    assert calls.count(START_TO_HOST) == calls.count(START_TO_DEVICE) == count
    assert calls.count(AWAIT_COPY) == 2 * count
