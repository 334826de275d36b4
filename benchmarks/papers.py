"""The tables of the three papers, by our plans and prices, beside what was published: python benchmarks/papers.py

Prints each quantity as published and as predicted here, how far they are apart, and what is assumed. `--write` puts the
tables into docs/papers.md; of a few parts alone, `--only PART`, it replaces theirs there. Nothing is fitted: one set of
figures per kind of device, one batch per model. `--depth` gives deep models a share of their layers, for a quick look.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from published import (
    rhino,
    rhino_others,
    rhino_scaling,
    tensoropt,
    whale_data,
    whale_hybrid,
    whale_m6,
    whale_pipelines,
    whale_unequal,
)
from published.part import Part, Row
from rich.console import Console
from rich.table import Table

PAGE = Path(__file__).parent.parent / "docs" / "papers.md"
PARTS = {
    "whale-data": whale_data.PART,
    "whale-pipelines": whale_pipelines.PART,
    "whale-hybrid": whale_hybrid.PART,
    "whale-unequal": whale_unequal.PART,
    "whale-m6": whale_m6.PART,
    "tensoropt": tensoropt.TABLE_PART,
    "tensoropt-devices": tensoropt.DEVICES_PART,
    "rhino-gpt": rhino.GPT_PART,
    "rhino-moe": rhino.MIXTURE_PART,
    "rhino-alone": rhino.ALONE_PART,
    "rhino-scaling": rhino_scaling.PART,
    "rhino-others": rhino_others.PART,
}
_HEAD = """\
# What the papers measured, and what is predicted here

Written by `python benchmarks/papers.py --write`. The figures here are predicted steps of plans: nothing is run, and no
constant is fitted.

* In all rows, devices reach 0.89 of the rates of their data sheets. V100s were measured at 14 of 15.7 TFLOP/s in large
  products of float32 matrices (github.com/mli/transformers-benchmarks), and at 750 GiB/s of 900 GB/s (Jia et al.,
  “Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking”, 2018).
* Attention is computed in several operators and holds its scores, as in TensorFlow and XLA.
* A step is its forward and backward half, without the optimizer's update.
* Published ratios are those that the papers' text gives. If a value is only shown in a figure, ours has no comparison.
"""
_COLUMNS = ("where", "what", "published", "here", "apart")


def section(part: Part, rows: Iterable[Row]) -> str:
    """A part's section of the page, without the marks that begin a heading."""
    lines = [part.title, "", part.assumed, "", "| " + " | ".join(_COLUMNS) + " |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row.cells) + " |" for row in rows]
    if part.differs:
        lines += ["", part.differs]
    return "\n".join(lines) + "\n"


def page(text: str, found: Mapping[str, Iterable[Row]]) -> str:
    """The page with the sections of these parts, and of the others as they are in `text`."""
    known = {one.partition("\n")[0]: one.rstrip() + "\n" for one in text.split("\n## ")[1:]}
    for key, rows in found.items():
        known[PARTS[key].title] = section(PARTS[key], rows)
    kept = [known[part.title] for part in PARTS.values() if part.title in known]
    return _HEAD + "".join(f"\n## {one}" for one in kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--depth", type=float, default=1.0, help="share of the layers of deep models")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/papers.md")
    args = parser.parse_args()
    if args.write and args.depth != 1.0:
        parser.error("--write is for models of full depth")
    torch.set_num_threads(1)
    console = Console(width=140)
    for key in args.only or PARTS:
        part = PARTS[key]
        rows = []
        for row in part.rows(args.depth):
            console.print(" | ".join(row.cells), style="dim")
            rows.append(row)
        table = Table(*_COLUMNS, title=part.title, caption="\n".join([part.assumed, part.differs]))
        for row in rows:
            table.add_row(*row.cells)
        console.print(table)
        if args.write:
            PAGE.write_text(page(PAGE.read_text("utf-8") if PAGE.exists() else "", {key: rows}), "utf-8")


if __name__ == "__main__":
    main()
