from __future__ import annotations

import json

from autoshard.plans.trace import trace
from autoshard.simulate.task_events import Task

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
