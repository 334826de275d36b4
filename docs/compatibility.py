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

autoshard is written for Python 3.11 and later, and torch 2.13 and later. Its tests run on the versions in
`constraints.txt`, on CPU devices over gloo. With a newer torch than 2.14 it works as far as the table tells, and warns
once, at the first capture. Older releases are not allowed, since tests fail on them:

| torch | Python | tests | passed | skipped | failed | date |
|---|---|---|--:|--:|--:|---|
| 2.14.1 | 3.11 | `tests/quick.txt` | 2144 | 0 | 1 | 2026-11-27 |
| 2.14.1 | 3.11 | `tests/capture` | 908 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | `tests/planner` | 456 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | `search`, `compare`, `reshard`, `program`, `specs`, `memory`, `simulate`, `solver`, `verify`, \
`doctor`, `options`, `kernels`, `cluster`, `fuzz` of `tests` | 1750 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | `tests/runtime` | 363 | 0 | 0 | 2026-11-27 |
| 2.14.1 | 3.11 | 699 of `tests/pipeline`, `tests/integrations`, `tests/cli`, `tests/plans` | 699 | | 0 | 2026-11-27 |
| 2.13.0 | 3.11 | all: what `make test` runs | 7353 | 1 | 2 | 2026-11-27 |
| 2.13.0 | 3.13 | `tests/quick.txt` | 2146 | 0 | 1 | 2026-11-27 |
| 2.12.0 | 3.12 | that torch has the private names | 9 | 0 | 0 | 2026-11-27 |
| 2.11.0 | 3.12 | `tests/quick.txt` | 2127 | 0 | 16 | 2026-11-27 |
| 2.11.0 | 3.12 | 216 of `tests/runtime`, with what was mended | 216 | 0 | 0 | 2026-11-27 |

The one that failed in the quick list, with 2.14.1 and with Python 3.13, is a search that ran out of time on a busy
machine; it passes alone, and has more time since. With 2.14.1, the top level of `tests`, torchtitan, and what the quick
list leaves out of patterns have not been run. The two of 2.13 were faults of tests, mended on that day: they pass.

What failed with 2.11, of which each was run again by itself on that day: redistribution of strided pieces, which torch
refuses there, and for whose states and parameters the whole tensor is gathered now (three tests, which pass); the
memory of optimizers without `foreach`, where a test counted fake tensors (five, which pass); a `torch.Generator` in
`forward` (one, which passes); pipelines with two neighbouring stages on a rank (one, which passes); and a search that
ran out of time (one, not run again). Five are skipped, by what torch lacks: products in eight bits on CPUs with scales
of rows and columns (one) or in lists (three), and the memory of Adafactor with `foreach`, of which a list operator has
no rule for `DTensor`s (one). The class of parameters is not told of operators there, and sees functions in its place:
changes of parameters between calls are those of one device (`tests/runtime/test_placed_tensor.py`). Until capture, the
runtime and pipelines have been run with it as a whole, 2.11 is not allowed.

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
