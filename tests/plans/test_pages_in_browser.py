"""Pages in a browser: they load nothing, draw what the plan says, and follow theme, paper and keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoshard.plans.html import HasPage
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


def opened(browser: Any, thing: HasPage, folder: Path, **options: Any) -> tuple[Any, list[str]]:
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


def drawn(page: Any, name: str) -> list[dict[str, Any]]:
    """Return the traces of a figure as the browser has them."""
    plot = "document.querySelector(`#chart-${name} .plot`)"
    script = f"name => {plot}.data.map(trace => ({{name: trace.name, x: trace.x, y: trace.y}}))"
    found: list[dict[str, Any]] = page.evaluate(script, name)
    return found


def range_of(page: Any, name: str) -> list[float]:
    ends: list[float] = page.evaluate("name => document.querySelector(`#chart-${name} .plot`).layout.xaxis.range", name)
    return ends


def test_a_plan(browser: Any, tmp_path: Path) -> None:
    plan = planned_gpt()
    page, faults = opened(browser, plan, tmp_path, color_scheme="light")
    # The numbers of the charts are those of the plan.
    *areas, line = drawn(page, "memory")
    unit = next(size for size in (2**10, 2**20, 2**30) if max(line["y"]) * size == plan.memory.peak)
    place = line["y"].index(max(line["y"]))
    assert sorted(area["y"][place] * unit for area in areas if area["y"][place]) == sorted(plan.memory.held.values())
    bars = [x for trace in drawn(page, "collectives-by-module") for x in trace["x"]]
    title = page.locator("#chart-collectives-by-module .xtitle").text_content()
    second = {"time before overlap [ms]": 1e-3, "time before overlap [µs]": 1e-6}[title]
    assert sum(bars) * second == pytest.approx(sum(sent.count * sent.seconds for sent in plan.collectives))
    # Plotly drew every mark: a bar that it refuses is silently left out.
    counts = page.evaluate("[...document.querySelectorAll('#chart-timeline .plot .point')].length")
    assert counts >= sum(len(trace["x"]) for trace in drawn(page, "timeline")) > 0
    assert page.locator("#chart-modules .slice").count() > 3

    # A button shows the peak in both charts of the step, keys move and zoom, and 0 shows the whole again.
    whole = range_of(page, "memory")
    page.get_by_role("button", name="Peak").click()
    assert range_of(page, "timeline") == range_of(page, "memory") != whole
    assert range_of(page, "memory")[0] <= line["x"][place] <= range_of(page, "memory")[1]
    page.focus("#chart-timeline .plot")
    page.keyboard.press("0")
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    width = whole[1] - whole[0]
    assert range_of(page, "memory") == pytest.approx([whole[0] + 0.35 * width, whole[0] + 0.85 * width])
    page.focus("#chart-modules .plot")
    page.keyboard.press("ArrowRight")
    level = page.evaluate("document.querySelector('#chart-modules .plot').data[0].level")
    assert level.startswith("whole model/")

    # Another theme has other colours, and the same part of the step.
    colours = (
        "[...document.querySelectorAll('#chart-memory .plot .xtitle')].map(text => getComputedStyle(text).fill)[0]"
    )
    light, shown = page.evaluate(colours), range_of(page, "memory")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => ({colours}) !== '{light}'")
    assert range_of(page, "memory") == shown

    # Paper is white and narrow, on dark pages too.
    page.emulate_media(media="print")
    page.wait_for_function(f"() => ({colours}) === '{light}'")
    assert page.evaluate("document.querySelector('#chart-memory .main-svg').width.baseVal.value") < 700
    page.emulate_media(media="screen")
    page.wait_for_function(f"() => ({colours}) !== '{light}'")
    assert page.pdf().startswith(b"%PDF")
    assert faults == []
    page.close()


def test_a_pipeline(browser: Any, tmp_path: Path) -> None:
    plan = plan_of()
    page, faults = opened(browser, plan, tmp_path)
    tops = [max(line["y"]) * 2**30 for line in drawn(page, "memory")]
    assert tops == list(plan.simulation.peaks)
    # Charts of a stage are drawn when it is unfolded.
    assert page.locator("#chart-stage-1-modules .main-svg").count() == 0
    page.get_by_text("Stage 1: h.3.attn to head").click()
    page.wait_for_selector("#chart-stage-1-modules .main-svg")
    assert page.locator("#chart-stage-0-modules .main-svg").count() == 0
    assert faults == []
    page.close()


def test_a_frontier(browser: Any, tmp_path: Path) -> None:
    frontier = bent()
    page, faults = opened(browser, frontier, tmp_path)
    points = drawn(page, "tradeoff")[0]
    assert points["y"][:-1] == [plan.step_seconds for plan in frontier]
    # A point opens the plan that it stands for.
    assert not page.locator("#plan-0").evaluate("fold => fold.open")
    page.locator("#chart-tradeoff .plot .point").first.hover(force=True)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_function("() => document.getElementById('plan-0').open")
    assert faults == []
    page.close()


def test_a_search(browser: Any, tmp_path: Path) -> None:
    page, faults = opened(browser, result_of(), tmp_path)
    assert {trace["name"]: trace["x"] for trace in drawn(page, "mesh-candidates")} == {
        "chosen": [12.3],
        "not chosen": [12.5],
        "holds too much": [11.0],
        "lower bound": [13.0],
    }
    page.get_by_role("button", name="Step and memory").click()
    page.wait_for_function("() => document.querySelector('#chart-mesh-candidates .plot').layout.shapes?.length === 1")
    assert faults == []
    page.close()
