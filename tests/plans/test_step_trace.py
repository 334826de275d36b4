from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard import PlanError, ShardingPlan
from autoshard.plans.step_trace import StepTasks, trace
from autoshard.simulate.events import Task
from tests.sample_plan import sample_plan

TASKS = [
    Task("0F0", "forward", "compute", (0,), 1.0, label="0"),
    Task("0SEND_F0", "send forward", "link", (0, 1), 0.5, (0,)),
    Task("1F0", "forward", "compute", (1,), 1.0, (1,), label="0"),
    Task("nothing", "reduction", "reduction", (1,), 0.0, (2,)),
]
STARTS, ENDS = (0.0, 1.0, 1.5, 2.5), (1.0, 1.5, 2.5, 2.5)


def test_every_task_is_on_the_threads_of_its_ranks() -> None:
    events = json.loads(trace(TASKS, STARTS, ENDS))["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ran = [(e["name"], e["pid"], named[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert ran == [
        ("0F0", 0, "compute", 0.0, 1e6),
        ("0SEND_F0", 0, "link with rank 1", 1e6, 0.5e6),
        ("0SEND_F0", 1, "link with rank 0", 1e6, 0.5e6),
        ("1F0", 1, "compute", 1.5e6, 1e6),
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_memory_is_a_counter() -> None:
    events = json.loads(trace(TASKS, STARTS, ENDS, [[(0.0, 5), (1.0, 3)], [(0.0, 7)]]))["traceEvents"]
    counted = [(e["pid"], e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counted == [(0, "memory", 0.0, 5), (0, "memory", 1e6, 3), (1, "memory", 0.0, 7)]


def test_a_step_of_nothing_is_a_trace() -> None:
    assert json.loads(trace([], [], []))["traceEvents"] == []


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    with torch.device("meta"):
        module, x = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), torch.empty(64, 512)
    made = autoshard.plan(module, {"dp": 2, "tp": 2}, (x,), hints={"0": autoshard.split("tp")}, optimizer="sgd")
    assert isinstance(made, ShardingPlan)
    return made


def test_tasks_are_the_calls_of_the_step(plan: ShardingPlan) -> None:
    step = StepTasks.of(plan)
    # Waits for collectives take no time, and end after these. The replay is rounded to nanoseconds.
    assert 0 < max(step.ends) <= plan.step_replay.seconds <= plan.step_seconds + 1e-9
    compute = [task for task in step.tasks if task.stream == "compute"]
    # Kernels take as long as the operators of the plan, and copies come on top.
    least = sum(choice.seconds for choice in plan.choices)
    assert least * (1 - 1e-3) <= sum(task.seconds for task in compute) <= plan.step_seconds
    assert {task.kind for task in compute} == {"forward", "backward"}
    assert any(task.name.startswith("2: aten.") for task in compute)
    sent = [task for task in step.tasks if task.stream != "compute"]
    assert {task.stream for task in sent} == {f"communication on {sent.axis}" for sent in plan.collectives}
    # Gradients of several parameters are reduced together.
    assert 0 < len(sent) <= sum(collective.count for collective in plan.collectives)


def test_memory_rises_to_the_peak(plan: ShardingPlan) -> None:
    moments, amounts = zip(*StepTasks.of(plan).memory, strict=True)
    assert list(moments) == sorted(moments)
    assert max(amounts) == plan.memory.peak
    assert amounts[0] >= plan.memory.parameters


def test_a_trace_is_a_file_and_the_saved_plan_has_the_same(plan: ShardingPlan, tmp_path: Path) -> None:
    plan.trace(tmp_path / "step.json")
    ShardingPlan.from_json(plan.to_json()).trace(tmp_path / "again.json")
    text = (tmp_path / "step.json").read_text()
    assert (tmp_path / "again.json").read_text() == text
    events = json.loads(text)["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"compute", *(f"communication on {sent.axis}" for sent in plan.collectives)}
    assert sum(event["ph"] == "X" for event in events) == len(StepTasks.of(plan).tasks)


def test_a_plan_without_calls_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not have the calls of its step"):
        sample_plan().trace(tmp_path / "step.json")
