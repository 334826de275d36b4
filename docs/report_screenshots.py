"""Write docs/images/report_*.png: python docs/report_screenshots.py [--plans FOLDER]

Plans Llama-3-8B on 64 H100s within a memory limit, the same model as a pipeline, and a small GPT as a frontier and as a
search, which takes some minutes; then takes pictures of their pages in Chromium. Needs transformers, playwright and a
Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import autoshard

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
_MOST_BYTES = 300_000  # of a picture: a repository keeps every version of it

Batch = dict[str, torch.Tensor]


def main() -> int:
    """Make the plans that are not there yet, and pictures of their pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=Path, help="folder of the plans, which are not made again if they are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.plans or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (make, load) in MAKERS.items():
            file = folder / f"{name}.json"
            if not file.exists():
                make().save(file)
                print(f"made {file}")
            load(file).to_html(folder / f"{name}.html")
        # The result of a search has no file.
        if not (folder / "search.html").exists():
            make_search().to_html(folder / "search.html")
        take_pictures(folder)
    return 0


def llama() -> tuple[nn.Module, Batch]:
    """Return Llama-3-8B on the meta device, and a batch of 64 sequences of 4096 tokens."""
    # The configuration of the example, which plans it too.
    config = runpy.run_path(str(ROOT / "examples" / "plan_llama_8b.py"))["LLAMA_3_8B"]
    with torch.device("meta"):
        tokens = torch.empty(64, 4096, dtype=torch.long)
        return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}


def gpt() -> tuple[nn.Module, Batch]:
    """Return a GPT of four layers on the meta device, whose parameters need more memory than its activations."""
    config = GPT2Config(n_layer=4, n_embd=4096, n_head=32, vocab_size=32000, n_positions=256, use_cache=False)
    with torch.device("meta"):
        tokens = torch.empty(32, 256, dtype=torch.long)
        return GPT2LMHeadModel(config).to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}


def make_plan() -> Any:
    """Return a plan within a memory limit."""
    model, batch = llama()
    options: Any = {"cluster": "h100", "memory_limit": "60GiB", "output_placements": "planned"}
    return autoshard.plan(model, {"dp": 8, "tp": 8}, example_kwargs=batch, **options)


def make_pipeline() -> Any:
    """Return the plan of a pipeline."""
    model, batch = llama()
    return autoshard.plan(model, {"pp": 4, "dp": 8}, example_kwargs=batch, cluster="h100", search=FAST)


def make_frontier() -> Any:
    """Return a frontier."""
    model, batch = gpt()
    return autoshard.frontier(model, {"x": 8}, example_kwargs=batch, cluster="a100", gaps=1, search=FAST)


def make_search() -> Any:
    """Return the result of a search."""
    model, batch = gpt()
    return autoshard.search(model, 8, example_kwargs=batch, cluster="a100", search=FAST)


FAST = autoshard.Search(effort="fast")
MAKERS: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    "plan": (make_plan, autoshard.ShardingPlan.load),
    "pipeline": (make_pipeline, autoshard.PipelinePlan.load),
    "frontier": (make_frontier, autoshard.Frontier.load),
}


def take_pictures(folder: Path) -> None:
    """Write the pictures of the pages in a folder."""
    IMAGES.mkdir(exist_ok=True)
    for scheme in ("light", "dark"):
        with opened(folder / "plan.html", scheme, 1420) as page:
            page.screenshot(path=IMAGES / f"report_plan_{scheme}.png")
        with opened(folder / "pipeline.html", scheme, 1120) as page:
            page.screenshot(path=IMAGES / f"report_pipeline_{scheme}.png")
    with opened(folder / "plan.html", "light", 900) as page:
        section(page, "modules", "report_modules_time")
        page.locator("#modules").get_by_role("button", name="Parameters").click()
        section(page, "modules", "report_modules_parameters")
        section(page, "collectives", "report_collectives")
    with opened(folder / "frontier.html", "light", 980) as page:
        page.screenshot(path=IMAGES / "report_frontier.png")
    with opened(folder / "search.html", "dark", 860) as page:
        page.screenshot(path=IMAGES / "report_search.png")
    for image in sorted(IMAGES.glob("report_*.png")):
        size = image.stat().st_size
        print(f"wrote {image}, {size} bytes")
        if size > _MOST_BYTES:
            raise SystemExit(f"{image} has {size} bytes, and a picture may have {_MOST_BYTES}.")


@contextmanager
def opened(file: Path, scheme: str, height: int) -> Iterator[Page]:
    """Open a page in Chromium, in a window of so many pixels, and wait until its charts are drawn."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size: Any = {"width": 1240, "height": height}
        page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(file.resolve().as_uri())
        page.wait_for_function("() => document.documentElement.dataset.charts === 'drawn'")
        yield page
        browser.close()


def section(page: Page, anchor: str, name: str) -> None:
    """Write the picture of one section, without the links that stay on top of the page."""
    page.add_style_tag(content="nav { display: none }")
    page.locator(f"#{anchor}").screenshot(path=IMAGES / f"{name}.png")


if __name__ == "__main__":
    raise SystemExit(main())
