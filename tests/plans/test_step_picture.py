from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from autoshard.plans.step_picture import gantt, trace
from autoshard.simulate.events import Task

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


SVG = "{http://www.w3.org/2000/svg}"


def bars(picture: ElementTree.Element) -> list[tuple[str, float, float, float]]:
    """What each shape is of, where it begins, how wide it is, and how high."""
    return [
        (str(title.text), float(shape.attrib["x"]), float(shape.attrib["width"]), float(shape.attrib["height"]))
        for shape in picture.iter(f"{SVG}rect")
        if (title := shape.find(f"{SVG}title")) is not None
    ]


def words(picture: ElementTree.Element) -> list[str | None]:
    return [text.text for text in picture.iter(f"{SVG}text")]


def test_a_row_per_rank_and_a_bar_per_task() -> None:
    picture = ElementTree.fromstring(gantt(TASKS, STARTS, ENDS, width=590))
    assert [name for name, *_ in bars(picture)] == [
        "0F0: forward",
        "0SEND_F0: send forward",
        "0SEND_F0: send forward",
        "1F0: forward",
    ]
    assert [bar[1:3] for bar in bars(picture)] == [(70, 200), (270, 100), (270, 100), (370, 200)]
    sent, computed = bars(picture)[1][3], bars(picture)[0][3]
    assert sent < computed
    assert {"rank 0", "rank 1", "0", "2.5 s", "forward", "send forward"} <= set(words(picture))
    assert "reduction" not in words(picture)


@pytest.mark.parametrize(("width", "times"), [(1200, 2), (90, 0)])
def test_numbers_are_written_where_there_is_room(width: int, times: int) -> None:
    tasks = [task._replace(label="123" if task.label else "") for task in TASKS]
    assert words(ElementTree.fromstring(gantt(tasks, STARTS, ENDS, width=width))).count("123") == times


def test_the_picture_loads_nothing() -> None:
    text = gantt(TASKS, STARTS, ENDS)
    assert "href" not in text
    assert "url(" not in text


def test_a_step_of_nothing_is_a_picture() -> None:
    assert bars(ElementTree.fromstring(gantt([], [], []))) == []
