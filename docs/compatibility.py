"""Write docs/compatibility.md from the adapters: python docs/compatibility.py [--check]

Every room keeps the torch names that torch does not promise to keep in one module, `_torch.py`. This reads those
modules and lists the names, each with the comment that says what it is for.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
HEAD = """\
# Compatibility

autoshard is written for Python 3.11 and later, and torch 2.11 and later. Its tests run on the versions in
`constraints.txt`, on CPU devices over gloo. With a newer torch than 2.14 it works as far as the table tells, and warns
once, at the first capture:

| torch | Python | tests | passed | skipped | failed | date |
|---|---|---|--:|--:|--:|---|
| 2.14.1 | 3.11 | `tests/quick.txt` | 2144 | 0 | 1 | 2026-11-27 |
| 2.14.1 | 3.11 | `capture`, `planner` of `tests` | 1364 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | `search`, `compare`, `reshard`, `program`, `specs`, `memory`, `simulate`, `solver`, `verify`, \
`doctor`, `options`, `kernels`, `cluster`, `fuzz` of `tests` | 1750 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | `tests/runtime`, as it was then | 363 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | 699 of `tests/pipeline`, `tests/integrations`, `tests/cli`, `tests/plans` | 699 | | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | `tests/patterns` | 2298 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | top level of `tests` | 552 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | `selfcheck`, `benchmarks`, `fake_cuda` of `tests`, torchtitan | 88 | 33 | 0 | 2026-11-27 |
| 2.13.0 | 3.11 | all: what `make test` runs | 7353 | 1 | 2 | 2026-11-27 |
| 2.13.0 | 3.13 | `tests/quick.txt` | 2146 | 0 | 1 | 2026-11-27 |
| 2.12.0 | 3.12 | `tests/quick.txt` | 2156 | 1 | 0 | 2026-11-28 |
| 2.12.0 | 3.13 | all but 54 tests | 7265 | 44 | 12 | 2026-11-28 |
| 2.11.0 | 3.12 | `capture`, `planner` of `tests` | 1361 | 3 | 0 | 2026-11-28 |
| 2.11.0 | 3.12 | `pipeline`, `runtime` of `tests` | 903 | 2 | 0 | 2026-11-28 |
| 2.11.0 | 3.12 | `tests/patterns` | 2252 | 44 | 0 | 2026-11-28 |
| 2.11.0 | 3.12 | the other folders of `tests` but those of the next row | 2063 | 4 | 0 | 2026-11-28 |
| 2.11.0 | 3.12 | `selfcheck`, `benchmarks`, `fake_cuda`, `integrations` of `tests` | 113 | 34 | 0 | 2026-11-28 |
| 2.11.0 | 3.12 | top level of `tests` | 551 | 3 | 0 | 2026-11-28 |

With 2.11 and 2.14 folders were run one after the other, on commits of two days; what failed was mended, and run again
by itself: the numbers are those behind the mend. The two of 2.13 were faults of tests; they pass since. The run of
2.12 was beside other work on two cores. Of its twelve, two are refused with a clear error since; nine, of builds for
GPUs, pass or are skipped when they run alone; one failed in no file of its place when these ran again. The one that
failed in the quick list, with 2.14.1 and with Python 3.13, is a search that ran out of time on a busy machine; it
passes alone, and has more time since.

What a release lacks is found by trying, and its tests are skipped (`tests/releases.py`); with the release of the
constraints such a test fails:

* **Builds for GPUs** take no other hooks: the 33 tests that have torch believe in GPUs need a build for CPUs.
* **2.11, 2.12** send a gradient for all that a pipeline's stage receives (whole numbers that one stage computes and
  another reads are refused). They can't export `torch.func.jvp`, nor language models that repeat key heads (Llama)
  with a dynamic length; their autograd functions take no keyword arguments. They remove from graphs the check by which
  `lu_factor` finds that a matrix has no inverse. A `torch.Generator` in `forward` is refused.
* **2.11** has no groups of ranks in descending order and no stateless generator (a generator of the device draws). It
  has no strategies of its own for `native_batch_norm`, no shapes of the gradient of one attention kernel, no products
  in eight bits on CPUs with scales of rows, and no rule for `_foreach_lerp_` of `DTensor`s, so that the memory of
  Adafactor with `foreach` is not measured. `DTensor`s of its own class can't be gathered from strided pieces;
  parameters here can. Torchtitan 0.3 does not run with it.

Of transformers, 5.23 and 5.24 were run; of accelerate 1.15, of Lightning 2.6, of torchtitan 0.3. With transformers
5.22.2 ranks of the Trainer wait for one another when it saves, and torchtitan 0.2.2 has other modules: both are not
allowed.

To try a release, run `make test-torch TORCH=2.14.1`: it makes an environment for the release, and runs the tests in it.

## All-gathers over gloo may end a process

Torch 2.13.0 gives every group of gloo two threads, which both write the name of what they did last into one string,
without a lock. Names of more than 15 letters live on the heap, and that of the all-gather that functional collectives
and `DTensor` run has 19: where two of them end at once, the string is freed twice, and the process dies of a signal
there or somewhat later (`segfault`, `double free`, `malloc(): corrupted`). Eight all-gathers in flight, again and
again, do it within seconds, without autoshard; training does it rarely. NCCL is not concerned. A backend whose groups
have one thread is safe:

<!-- python: 2 processes -->

```python
import torch.distributed as dist


def one_thread(store, rank, size, timeout):
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend("gloo_one_thread", one_thread, devices=["cpu"])
dist.init_process_group("gloo_one_thread")
dist.barrier()  # a process that ends takes what the others may still ask it for
```

## Names that torch does not promise to keep

Some of what autoshard stands on has no public name in torch yet. Each room keeps such names in one module, `_torch.py`,
so that a new release of torch is met in these places alone. A name that a supported release lacks is guarded there,
with an error that says which release has it. The list below is written by `python docs/compatibility.py`.
"""


@dataclass(frozen=True, slots=True)
class Use:
    """A name of torch that an adapter uses.

    Attributes:
        name: the whole name.
        purpose: the comment beside it.
        is_asked_for: True if the adapter does without it where a release lacks it: it is imported in a `try`, or stands
            as a string in a question such as `hasattr`.
    """

    name: str
    purpose: str
    is_asked_for: bool


def uses(source: str) -> Iterator[Use]:
    """The torch names that stand in a module, in order: imported from torch, or private attributes of it."""
    comments, tree = _comments(source), ast.parse(source)
    tried = {id(part) for node in ast.walk(tree) if _is_try(node) for part in ast.walk(node)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    imported = _imported(tree)
    seen: set[str] = set()
    asked: set[str] = set()
    for node in ast.walk(tree):
        for name, line in _names(node, imported):
            if name not in seen and not any(other.startswith(f"{name}.") for other in seen):
                seen.add(name)
                # What belongs to a name that was asked for is asked for, too.
                if id(node) in tried or name.rpartition(".")[2] in strings:
                    asked.add(name)
                is_asked_for = any(f"{name}.".startswith(f"{other}.") for other in asked)
                yield Use(name, comments.get(line) or comments.get(line - 1, ""), is_asked_for)


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def _is_try(node: ast.AST) -> bool:
    return isinstance(node, ast.Try) and any("ImportError" in ast.unparse(each.type or node) for each in node.handlers)


def _imported(tree: ast.AST) -> dict[str, str]:
    """Name in a module -> the name in torch that it was imported from."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"
        for alias in node.names
    }


def _names(node: ast.AST, imported: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if _is_private(name):
                yield name, alias.lineno
    elif isinstance(node, ast.Attribute):
        root, _, rest = ast.unparse(node).partition(".")
        name = f"{imported.get(root, root)}.{rest}"
        if (
            name.startswith("torch.")
            and re.fullmatch(r"[\w.]+", name)
            and _is_private(name)
            and not name.endswith("__")
        ):
            yield name, node.lineno


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def page() -> str:
    """The text of docs/compatibility.md."""
    lines = [HEAD]
    for adapter in sorted((ROOT / "autoshard").rglob("_torch.py")):
        rows = [f"| `{use.name}` | {use.purpose} |" for use in uses(adapter.read_text(encoding="utf-8"))]
        if rows:
            lines += [f"## `{adapter.relative_to(ROOT)}`\n", "| name | what it is for |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            print(f"{PAGE.relative_to(ROOT)} is out of date: run python docs/compatibility.py")
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
