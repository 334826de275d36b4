"""Random models against one device, for as long as one likes: `python -m tests.fuzz --minutes 120`.

Prints what is not right with its seed; `--seeds 7 19` runs these alone. Seeds that failed once are kept in
`tests/fuzz/test_fuzz.py`. `--blocks fourier_filter` runs random plans of this block alone; with `--lowered`, in
bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from tests.fuzz.case import Case, Outcome, run

CHUNK = 20


def outcomes(cases: Sequence[Case], processes: int) -> Iterator[Outcome]:
    """What becomes of these cases, in new processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.case"])
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(run, case): case for case in cases}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool as error:
                yield Outcome(futures[future], "crash", f"this process, or one beside it, died: {error}", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="these alone")
    parser.add_argument("--blocks", nargs="*", help="these alone, each by itself")
    parser.add_argument("--lowered", action="store_true", help="blocks in bfloat16")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    counts: Counter[str] = Counter()
    seeds = options.seeds or itertools.count(options.first)
    cases = (
        alone(Case.of(seed), options.blocks[seed % len(options.blocks)], options.lowered)
        if options.blocks
        else Case.of(seed)
        for seed in seeds
    )
    for chunk in itertools.takewhile(lambda _: time.monotonic() < end, _chunks(cases)):
        for outcome in outcomes(chunk, options.processes):
            counts[outcome.kind] += 1
            if outcome.kind != "right" or options.seeds:
                said = f"{outcome.kind.upper()} {outcome.seconds:.1f} s, {outcome.case}\n{outcome.said}\n"
                print(said, flush=True)  # noqa: T201
    print(dict(counts), flush=True)  # noqa: T201


def alone(case: Case, block: str, lowered: bool) -> Case:
    """A random plan of one block, on the mesh and with the sizes of a case."""
    drawn = replace(case.drawn, blocks=((block, case.drawn.blocks[0][1]),), width=min(case.drawn.width, 12))
    draw = random.Random(case.seed)
    return Case(
        *(case.seed, drawn, case.mesh),
        recompute=case.recompute,
        forced=draw.choice((0.0, 0.3, 0.7)),
        uneven=draw.choice((0.0, 0.0, 0.5)),
        planned_outputs=case.planned_outputs,
        lowered=lowered,
    )


def _chunks(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Some cases at a time."""
    rest = iter(cases)
    while chunk := list(itertools.islice(rest, CHUNK)):
        yield chunk


if __name__ == "__main__":
    main()
