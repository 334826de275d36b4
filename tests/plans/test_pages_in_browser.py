"""Pages in a browser: they load nothing, draw what the plan says, and follow theme, paper and keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoshard.plans.plan_tables import collective_rows
from autoshard.report import HasReport
from tests.pipeline.test_pipeline_plan import plan_of
from tests.plans.planned_gpt import planned_gpt
from tests.plans.test_frontier import bent
from tests.search.test_result import result_of

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


def opened(browser: Any, thing: HasReport, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the page of an object in the browser with its charts drawn, and a list of what goes wrong in it."""
    file = folder / "page.html"
    thing.to_html(file)
    page = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: None if request.url == file.as_uri() else faults.append(request.url[:80]))
    page.goto(file.as_uri())
    page.wait_for_function("() => document.documentElement.dataset.charts === 'drawn'")
    return page, faults


def count(page: Any, chart: str, shapes: str) -> int:
    """Return how many shapes a chart has."""
    found: int = page.locator(f"#chart-{chart} {shapes}").count()
    return found


def tip(page: Any, place: Any) -> str:
    """Return what is shown of a shape that is pointed at."""
    place.hover(force=True)
    text: str = page.locator(".tip").inner_text()
    return text


def ticks(page: Any, chart: str) -> list[str]:
    """Return the numbers of the x axis of a chart."""
    texts: list[str] = page.locator(f"#chart-{chart} svg > text[text-anchor=middle]:not(.title)").all_text_contents()
    return texts


def test_a_plan(browser: Any, tmp_path: Path) -> None:
    plan = planned_gpt()
    page, faults = opened(browser, plan, tmp_path, color_scheme="light")
    # Every kind of memory is an area, and every call a bar.
    kinds = {kind for kind, amounts in plan.step_replay.bytes_by_kind(len(plan.choices)).items() if any(amounts)}
    assert count(page, "memory", ".area") == len(kinds) >= len(plan.memory.held)
    assert count(page, "timeline", ".bar-shape") >= len(plan.step_replay.collectives) > 0
    assert count(page, "modules", ".box") > 3
    # What a chart says of its marks are the numbers of the plan.
    bar = page.locator("#chart-collectives-by-module .bar-shape").first
    largest = collective_rows(plan.collectives)[0]
    assert tip(page, bar).splitlines()[:2] == [f"{largest.labels[0]} over x, {largest.labels[2]}", largest.module]
    assert "[µs]" in page.locator("#chart-collectives-by-module .x.title").text_content()

    # A button shows the peak in both charts of the step, keys move and zoom, and 0 shows the whole again.
    whole = ticks(page, "memory")
    page.get_by_role("button", name="Peak").click()
    assert ticks(page, "timeline") == ticks(page, "memory") != whole
    page.focus("#chart-timeline .plot")
    page.keyboard.press("0")
    assert ticks(page, "memory") == ticks(page, "timeline") == whole
    page.keyboard.press("+")
    zoomed = ticks(page, "memory")
    page.keyboard.press("ArrowRight")
    assert ticks(page, "memory") != zoomed != whole

    # Dragging shows a part of the step, and a double click the whole again.
    page.keyboard.press("0")
    page.locator("#chart-memory .plot").scroll_into_view_if_needed()
    place = page.locator("#chart-memory .plot").bounding_box()
    middle = place["y"] + place["height"] / 2
    page.mouse.move(place["x"] + 300, middle)
    page.mouse.down()
    page.mouse.move(place["x"] + 500, middle)
    page.mouse.up()
    assert ticks(page, "timeline") == ticks(page, "memory") != whole
    page.locator("#chart-memory .plot").dblclick()
    assert ticks(page, "memory") == whole
    # A moment says what is held then.
    moment, *held = tip(page, page.locator("#chart-memory .plot")).splitlines()
    assert moment.split()[1] in ("µs", "ms")
    assert held[0].startswith("parameters ")
    assert held[-1].startswith("all ")

    # Keys enter modules and leave them, and buttons above the tree name those that were entered.
    path = page.locator("#chart-modules .path button")
    assert path.all_text_contents() == ["whole model"]
    page.focus("#chart-modules .plot")
    page.keyboard.press("ArrowRight")
    assert path.count() == 2
    page.keyboard.press("ArrowLeft")
    assert path.count() == 1

    # Another theme has other colours, and the same part of the step. Paper is white, on dark pages too.
    colour = "getComputedStyle(document.querySelector('#chart-memory .title')).fill"
    light, shown = page.evaluate(colour), ticks(page, "memory")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(colour) != light
    assert ticks(page, "memory") == shown
    page.emulate_media(media="print")
    assert page.evaluate(colour) == light
    page.emulate_media(media="screen")
    assert page.pdf().startswith(b"%PDF")
    assert faults == []
    page.close()


def test_a_page_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    page, faults = opened(browser, planned_gpt(), tmp_path)
    page.set_viewport_size({"width": 420, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert faults == []
    page.close()


def test_a_pipeline(browser: Any, tmp_path: Path) -> None:
    plan = plan_of()
    page, faults = opened(browser, plan, tmp_path)
    assert count(page, "memory", ".curve") == plan.schedule.ranks
    assert count(page, "timeline", ".bar-shape") == sum(task.seconds > 0 for task in plan.simulation.tasks)
    # Charts of a stage are drawn when it is unfolded.
    assert count(page, "stage-1-modules", "svg") == 0
    page.get_by_text("Stage 1: h.3.attn to head").click()
    page.wait_for_selector("#chart-stage-1-modules svg")
    assert count(page, "stage-0-modules", "svg") == 0
    assert faults == []
    page.close()


def test_a_frontier(browser: Any, tmp_path: Path) -> None:
    frontier = bent()
    page, faults = opened(browser, frontier, tmp_path)
    points = page.locator("#chart-tradeoff .point.linked")
    assert points.count() == len(frontier)
    assert tip(page, points.nth(1)).splitlines() == ["plan 1", "14.0 GiB, 3 s"]
    # A point opens the plan that it stands for.
    assert not page.locator("#plan-0").evaluate("fold => fold.open")
    points.first.click(force=True)
    assert page.locator("#plan-0").evaluate("fold => fold.open")
    assert faults == []
    page.close()


def test_a_search(browser: Any, tmp_path: Path) -> None:
    page, faults = opened(browser, result_of(), tmp_path)
    assert page.locator("#chart-mesh-candidates .inside").all_text_contents() == [
        "12.3 ms",
        "12.5 ms",
        "11 ms",
        "13 ms",
    ]
    page.get_by_role("button", name="Step and memory").click()
    assert count(page, "mesh-candidates", "line.alarm") == 1
    assert count(page, "mesh-candidates", ".point") == 3
    assert faults == []
    page.close()
