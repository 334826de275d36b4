"""The tables of `docs/memory.md`, from real runs: `python -m tests.memory_table --write`, or without, to print them."""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache

import autoshard
from autoshard.errors import BudgetError
from autoshard.units import format_bytes
from tests.memory_models import MODELS, build
from tests.memory_tracker import first_rank, track_step
from tests.training import fast_links

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
COMMAND = "python -m tests.memory_table --write -->"
START, END = f"<!-- table: {COMMAND}", "<!-- end of table -->"
COMPILED_START = f"<!-- table of compiled programs: {COMMAND}"
LINE, SQUARE = {"x": 2}, {"x": 2, "y": 2}
TIGHT = 0.9  # of the peak of the plan without a limit
SECONDS = 300.0  # for a search: enough, so that no plan depends on how busy the machine is
ROWS = (
    *itertools.product(MODELS, (LINE,), ("none", "tight")),
    *itertools.product(MODELS, (SQUARE,), ("none",)),
    *itertools.product(("MLP", "GPT"), (SQUARE,), ("tight",)),
)

# Inductor has no code for CPUs for this T5, and Mixtral is sized by data, which is not compiled.
COMPILED_ROWS = tuple(
    itertools.product((name for name in MODELS if name not in ("Mixtral", "T5")), (LINE,), ("none", "tight", "full"))
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a model on a mesh; bytes of one device that were predicted and measured.

    The limit is `"none"`, `"tight"`, or, without one, `"full"`: all layers run again.
    """

    model: str
    mesh: tuple[int, ...]
    limit: str
    predicted: int
    measured: int
    phase: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def row(model: str, sizes: Mapping[str, int], limit: str, compile: bool = False) -> Row:
    """Plan a model, train it for two steps with AdamW as the first rank of a mesh, and watch the second."""
    PyCodeCache.cache_clear()  # each row watches its own code
    module, inputs = build(model)
    with first_rank(sizes) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule
        options: dict[str, Any] = {"cluster": fast_links(), "time_limit": SECONDS, "compile": compile}
        if limit == "full":
            options["recompute"] = "full"
        if limit == "tight":
            free = autoshard.plan(module, sizes, (), inputs, **options)
            options["memory_limit"] = _possible(module, sizes, inputs, int(TIGHT * free.memory.peak), options)
        autoshard.parallelize(module, mesh, (), inputs, **options)
        tracked = track_step(module, inputs, torch.optim.AdamW(module.parameters()))
    memory = module.sharding_plan.memory
    return Row(model, tuple(sizes.values()), limit, memory.peak, tracked.peak.bytes, memory.phase)


def _possible(module: torch.nn.Module, sizes: Mapping[str, int], inputs: Any, limit: int, options: Any) -> int:
    """The limit, or the smallest one that can be met if it cannot."""
    try:
        autoshard.plan(module, sizes, (), inputs, memory_limit=limit, **options)
    except BudgetError as error:
        found = re.search(r"memory_limit to (\d+) bytes", str(error))
        assert found is not None
        return int(found[1])
    return limit


def table(rows: Iterable[Row]) -> str:
    """The rows and their errors as Markdown."""
    rows = list(rows)
    titles = ("Model", "Mesh", "Limit", "Peak in", "Predicted", "Measured", "Error")
    lines = [titles, ["---"] * len(titles), *map(cells, rows)]
    errors = [one.error for one in rows]
    said = (
        f"Mean absolute error {statistics.fmean(map(abs, errors)):.3%}; the largest over the truth {max(errors):+.3%}, "
        f"the largest under it {min(errors):+.3%}.\n\n"
    )
    return said + "".join(f"| {' | '.join(one)} |\n" for one in lines)


def cells(one: Row) -> Iterator[str]:
    """The texts of one line."""
    yield one.model
    yield str(one.mesh)
    yield one.limit
    yield one.phase
    yield f"{format_bytes(one.predicted)}"
    yield f"{format_bytes(one.measured)}"
    yield f"{one.error:+.3%}"


def main() -> None:
    """Run everything and print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    for start, given, compile in ((START, ROWS, False), (COMPILED_START, COMPILED_ROWS, True)):
        rows = []
        for each in given:
            rows.append(row(*each, compile))
            logger.info("%s", " | ".join(cells(rows[-1])))
        made = table(rows)
        if asked.write:
            before, _, rest = PAGE.read_text("utf-8").partition(start)
            PAGE.write_text(f"{before}{start}\n\n{made}\n{END}{rest.partition(END)[2]}", "utf-8")
        else:
            print(made)  # noqa: T201 - what the command is for


if __name__ == "__main__":
    main()
