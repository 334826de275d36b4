"""The table of `docs/memory.md`, from real runs: `python -m tests.memory_table --write`, or without, to print it."""

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

import autoshard
from autoshard.errors import BudgetError
from autoshard.units import format_bytes
from tests.memory_models import MODELS, build
from tests.memory_tracker import first_rank, track_step
from tests.training import fast_links

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
START, END = "<!-- table: python -m tests.memory_table --write -->", "<!-- end of table -->"
LINE, SQUARE = {"x": 2}, {"x": 2, "y": 2}
TIGHT = 0.9  # of the peak of the plan without a limit
SECONDS = 300.0  # for a search: enough, so that no plan depends on how busy the machine is
ROWS = (
    *itertools.product(MODELS, (LINE,), (False, True)),
    *itertools.product(MODELS, (SQUARE,), (False,)),
    *itertools.product(("MLP", "GPT"), (SQUARE,), (True,)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a model on a mesh, with or without a limit; bytes of one device that were predicted and measured."""

    model: str
    mesh: tuple[int, ...]
    limited: bool
    predicted: int
    measured: int
    phase: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def row(model: str, sizes: Mapping[str, int], limited: bool) -> Row:
    """Plan a model, train it for two steps with AdamW as the first rank of a mesh, and watch the second."""
    module, inputs = build(model)
    with first_rank(sizes) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule
        options: dict[str, Any] = {"cluster": fast_links(), "time_limit": SECONDS}
        if limited:
            free = autoshard.plan(module, sizes, (), inputs, **options)
            options["memory_limit"] = _possible(module, sizes, inputs, int(TIGHT * free.memory.peak), options)
        autoshard.parallelize(module, mesh, (), inputs, **options)
        tracked = track_step(module, inputs, torch.optim.AdamW(module.parameters()))
    memory = module.sharding_plan.memory
    return Row(model, tuple(sizes.values()), limited, memory.peak, tracked.peak.bytes, memory.phase)


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
    yield "tight" if one.limited else "none"
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
    rows = []
    for model, sizes, limited in ROWS:
        rows.append(row(model, sizes, limited))
        logger.info("%s", " | ".join(cells(rows[-1])))
    made = table(rows)
    if asked.write:
        before, _, rest = PAGE.read_text("utf-8").partition(START)
        PAGE.write_text(f"{before}{START}\n\n{made}\n{END}{rest.partition(END)[2]}", "utf-8")
    else:
        print(made)  # noqa: T201 - what the command is for


if __name__ == "__main__":
    main()
