"""Training steps that others measured on GPUs, beside predicted ones: python benchmarks/hardware.py [--write]

A row is planned in its published parallelism, which hints and task graphs force (`published/training_steps.py`), at the
prices of the library's presets. Prints tokens, or images, per second and GPU, published and predicted. `--write` puts
them into docs/hardware.md, where rows that were not asked for stay as they are. `--exact` plans all layers of deep
models instead of continuing two depths.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from published.training import TrainingRow
from published.training_rows import LEFT_OUT, ROWS
from published.training_steps import Prediction, predict
from rich.console import Console

PAGE = Path(__file__).parent.parent / "docs" / "hardware.md"
NEAR = 0.15
"""How far a ratio may be from one without a reason."""
_COLUMNS = (
    "row",
    "model",
    "GPUs",
    "parallelism",
    "samples x runs x tokens",
    "recomputed",
    "program",
    "published",
    "predicted",
    "ratio",
)
_HEAD = """\
# Training steps measured by others, and predicted here

Written by `python benchmarks/hardware.py --write`. Figures are tokens, or images, per second and GPU; the ratio is
predicted over published. Every row is planned in its published parallelism, precision and recomputation, at the prices
of the library's presets. Nothing is run here, and no price is fitted to a row. Held-out rows are only used to check.

* A step is the plan's forward and backward (`step_seconds`) and the optimizer's update (`update_seconds`; AdamW is
  fused, images use SGD with momentum). It does not include loading data, logging and clipping gradients.
* Samples are those of one device, or of one tensor parallel group, in one run of the step. Runs are the runs whose
  gradients are accumulated before the update; in a pipeline, runs are its microbatches.
* Models of many layers are planned at two depths, and their steps are extrapolated along a straight line to the
  published depth, because layers are equal (`--exact` plans all of them).
* FSDP gathers a parameter once per run, or again in the backward half if the plan says so. Systems that free it after
  the forward half gather twice.
* If tensor parallel devices split the layers' matrices, the planner chooses how the tensors between them are placed:
  whole, or in shards of the sequence.
"""


@dataclass(frozen=True)
class Line:
    """A row of the page's tables: its cells, and the ratio that the last one shows."""

    key: str
    cells: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return float(self.cells[-1])

    @staticmethod
    def of(row: TrainingRow, prediction: Prediction) -> Line:
        """The line of a prediction."""
        predicted = prediction.throughput(row)
        tokens = f" x {row.sequence}" if row.sequence else ""
        cells = (
            f"[{row.key}]({row.source.link})",
            row.built.name,
            f"{row.devices} {row.cluster}",
            row.layout or "one device",
            f"{row.microbatch} x {row.accumulation}{tokens}",
            row.recomputation,
            "compiled" if row.compiled else "eager",
            f"{row.throughput:,.0f}",
            f"{predicted:,.0f}",
            f"{predicted / row.throughput:.2f}",
        )
        return Line(row.key, cells)


def lines_of(text: str) -> dict[str, Line]:
    """The lines of a page's tables, by the key of their rows."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"\| \[([^\]]+)\]\(", line)
        if match and match[1] in ROWS:
            found[match[1]] = Line(match[1], tuple(cell.strip() for cell in line.strip("| ").split(" | ")))
    return found


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean by which a ratio and its inverse cancel."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def page(lines: Mapping[str, Line]) -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, held_out in (("Rows", False), ("Held-out rows", True)):
        chosen = [lines[key] for key, row in ROWS.items() if row.held_out == held_out and key in lines]
        if chosen:
            parts.append(_section(title, chosen))
    parts.append(_sources(lines))
    parts.append("## Left out\n\n" + "".join(f"* {text}\n" for text in LEFT_OUT))
    return "\n".join(parts)


def _section(title: str, lines: list[Line]) -> str:
    ratios = [line.ratio for line in lines]
    summary = (
        f"{len(lines)} rows, geometric mean of the ratios {geometric_mean(ratios):.2f}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}."
    )
    table = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    table += ["| " + " | ".join(line.cells) + " |" for line in lines]
    far = [line.key for line in lines if abs(line.ratio - 1.0) > NEAR]
    reasons = [f"* {key}: {ROWS[key].reason or 'no reason is known.'}" for key in far]
    told = ["", f"More than {NEAR:.0%} from the measured value:", "", *reasons] if reasons else []
    return "\n".join([f"## {title}", "", summary, "", *table, *told]) + "\n"


def _sources(lines: Mapping[str, Line]) -> str:
    used = dict.fromkeys(row.source for key, row in ROWS.items() if key in lines)
    listed = []
    for source in used:
        assumed = f" {source.assumed}" if source.assumed else ""
        places = ", ".join(dict.fromkeys(ROWS[key].place for key in lines if ROWS[key].source == source))
        listed.append(f"* [{source.title}]({source.link}) ({places}). {source.devices}. {source.precision}.{assumed}")
    return "## Sources\n\n" + "\n".join(listed) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS, action="append", metavar="ROW", help="default: all but slow ones")
    parser.add_argument("--slow", action="store_true", help="rows that take longer than three minutes too")
    parser.add_argument("--exact", action="store_true", help="plan all layers of deep models")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/hardware.md")
    args = parser.parse_args()
    if args.write and args.exact:
        parser.error("--write is for rows as the page describes them, without --exact")
    torch.set_num_threads(1)
    console = Console(width=140)
    lines = lines_of(PAGE.read_text("utf-8")) if PAGE.exists() else {}
    quick = [key for key, row in ROWS.items() if args.slow or not row.slow]
    for key in args.only or sorted(quick, key=lambda key: ROWS[key].held_out):
        prediction = predict(ROWS[key], exact=args.exact)
        lines[key] = Line.of(ROWS[key], prediction)
        planned = f"{prediction.planning_seconds:.0f} s, layers {', '.join(map(str, prediction.layers))}"
        console.print(" | ".join((key, *lines[key].cells[1:], planned)), style="dim", soft_wrap=True, markup=False)
        if args.write:
            PAGE.write_text(page(lines), "utf-8")
    for held_out in (False, True):
        ratios = [lines[key].ratio for key, row in ROWS.items() if key in lines and row.held_out == held_out]
        if ratios:
            console.print(f"{'held out' if held_out else 'compared'}: {len(ratios)} rows, {geometric_mean(ratios):.3f}")


if __name__ == "__main__":
    main()
