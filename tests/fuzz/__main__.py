"""Random models against one device, for as long as one likes: `python -m tests.fuzz --minutes 120`.

Prints what is not right with its seed; `--seeds 7 19` runs these alone. Seeds that failed once are kept in
`tests/fuzz/test_fuzz.py`.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from tests.fuzz.case import Case, Outcome, run_seed

CHUNK = 20


def outcomes(seeds: Sequence[int], processes: int) -> Iterator[Outcome]:
    """What becomes of these seeds, in new processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.case"])
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(run_seed, seed): seed for seed in seeds}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool as error:
                yield Outcome(Case.of(futures[future]), "crash", f"this process, or one beside it, died: {error}", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="these alone")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    counts: Counter[str] = Counter()
    given = options.seeds or itertools.count(options.first)
    for seeds in itertools.takewhile(lambda _: time.monotonic() < end, _chunks(given)):
        for outcome in outcomes(seeds, options.processes):
            counts[outcome.kind] += 1
            if outcome.kind != "right" or options.seeds:
                said = f"{outcome.kind.upper()} {outcome.seconds:.1f} s, {outcome.case}\n{outcome.said}\n"
                print(said, flush=True)  # noqa: T201
    print(dict(counts), flush=True)  # noqa: T201


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    """Some seeds at a time."""
    rest = iter(seeds)
    while chunk := list(itertools.islice(rest, CHUNK)):
        yield chunk


if __name__ == "__main__":
    main()
