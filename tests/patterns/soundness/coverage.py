"""Write docs/coverage.md, what is known of every operator: python -m tests.patterns.soundness.coverage [--check]"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import autoshard.operators  # noqa: F401  # which captures and rules need
from autoshard.errors import RuleError
from autoshard.patterns.registry import has_rule, is_borrowed, rule_for, rule_names
from autoshard.patterns.soundness import sample_call
from autoshard.specs.spec import placement_text
from tests.patterns.soundness._torch import OpOverload
from tests.patterns.soundness.peers import (
    Offer,
    holds,
    is_covered,
    own_offers,
    passes_sums_only,
    torch_offers,
    torch_operators,
)
from tests.patterns.soundness.record import RecordedOperator
from tests.patterns.soundness.sweep import (
    NOT_COMPARED,
    SIZES,
    OperatorSamples,
    ambiguous,
    collect,
    everything,
    findings,
    strategy_count,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "coverage.md"
COMMAND = "python -m tests.patterns.soundness.coverage"
MOST = 4
_UNREAD = (
    "the operand is not read, but every choice here says where it lies, and none takes partial sums and leaves a whole "
    "result: they would be reduced for nothing"
)
_CONTRACTED = (
    "an axis splits a loop or passes partial sums, not both: the term that is added is reduced first; as operators of "
    "their own, a product and a sum wait together"
)
_TRUTH = "whether sums are zero does not follow from their terms: it holds where no terms cancel, as on these samples"

REASONS = {
    "aten._linalg_solve_ex.default": (
        "a set of partial operands leaves all results partial; here the solution would be, and the matrix's factors, "
        "pivots and errors would not, which do not depend on the right-hand side"
    ),
    "aten.addmm.default": _CONTRACTED,
    "aten.any.default": _TRUTH,
    "aten.any.dim": _TRUTH,
    "aten.any.dims": _TRUTH,
    "aten.baddbmm.default": _CONTRACTED,
    "aten.full_like.default": _UNREAD,
    "aten.nansum.default": "a term that is no number counts as zero, whatever it would add up to with the others",
    "aten.new_empty.default": _UNREAD,
    "aten.new_empty_strided.default": _UNREAD,
    "aten.new_full.default": _UNREAD,
    "aten.new_ones.default": _UNREAD,
    "aten.new_zeros.default": _UNREAD,
    "aten.ones_like.default": _UNREAD,
    "aten.special_xlog1py.default": (
        "of zero it is zero even where the logarithm is infinite; of terms that add up to zero it would be no number"
    ),
    "aten.zeros_like.default": _UNREAD,
}
"""Why a rule does not offer what torch offers besides, by operator."""

UNEXPLAINED = "not explained yet"

HEAD = """\
# Coverage: which operators have a rule, and how it was checked

Written by `{command}`; a test checks that page and registry agree.
Every function of torch's operator database (`torch.testing`), and some of our own with more divisible sizes, were run
forward and backward, as in a capture. The page lists every operator that they call. A rule's strategies are run on all
ranks of axes of {sizes} and of a 2 × 2 mesh, and compared with the operator. Random operators are compared by
distribution.

{totals}

* **rule**: `own`: a rule of ours. `borrowed`: no rule of ours, but strategies of torch's registry, as docs/rules.md
  describes. `declines` is added if some of the calls have no strategy; these are replicated. `none`: replicated, with
  a warning that names the operator.
* **calls**: distinct calls by shapes and arguments; in brackets the number that was checked, chosen so that each adds a
  strategy.
* **strategies**: the number that was run on all ranks and compared.
* **torch besides**: placements on one axis (operands → results) that torch's own registry (DTensor) offers, that hold
  when the operator is run on such shards, and that ours does not offer.

{peers}

| operator | rule | calls | strategies | torch besides | why not here |
|---|---|---|---|---|---|
"""

PEERS = """\
torch also lets partial averages, maxima, minima or products pass through an operator ({passing} of its strategies on
these calls). Ours passes partial sums only: every contraction makes these; the others are rare and are reduced at once.
{unverified} strategies of torch do not hold when the operator is run unchanged: an argument refers to the whole tensor,
such as a shape, which torch changes on the way. They are not compared here. torch's registry has {registry} functional
operators that are not made of others. {missing} of these have no rule of ours: operators on lists, which optimizers are
made of, and {others}. Their strategies are borrowed where possible."""

UNMET = """
## Rules of operators that no sample meets

These are overloads that the samples do not use, kernels of other devices, and operators that only captures of modules
give. Their tests are in `tests/patterns/ops` and `tests/operators`.

"""


@dataclass(slots=True)
class Row:
    """What the page says of one operator."""

    name: str
    rule: str
    calls: int
    checked: int = 0
    strategies: int = 0
    besides: set[str] = field(default_factory=set)
    unsound: list[str] = field(default_factory=list)


def rows(met: dict[str, OperatorSamples], tally: Counter[str]) -> Iterator[Row]:
    """A row for every operator that was met, its strategies checked and compared with torch's."""
    for name, entry in sorted(met.items()):
        op = next(iter(entry.calls)).op
        row = Row(name, source(op, entry), len(entry.calls))
        for recorded in entry.chosen:
            if recorded.op._schema.name not in NOT_COMPARED and not ambiguous(recorded):
                row.checked += 1
                row.strategies += strategy_count(recorded)
                row.unsound += findings(recorded)
        for recorded in entry.chosen or entry.samples:
            own = rule_for(recorded.call)
            size = _dividing_size(recorded)
            offered = set() if own is None else own_offers(recorded, own, size)
            for offer in sorted(torch_offers(recorded, size), key=offer_text):
                if is_covered(offer, offered):
                    tally["covered"] += 1
                elif not passes_sums_only(offer):
                    tally["passing"] += 1
                elif holds(recorded, offer, size):
                    row.besides.add(offer_text(offer))
                else:
                    tally["unverified"] += 1
        yield row


def source(op: OpOverload, entry: OperatorSamples) -> str:
    """Where the rule of an operator comes from."""
    if not has_rule(op) or (is_borrowed(op) and not entry.chosen):
        return "none"
    return ("borrowed" if is_borrowed(op) else "own") + (", declines" if entry.declined else "")


def _dividing_size(recorded: RecordedOperator) -> int:
    """The smallest axis that divides some dim of an operand: torch is asked for even shards."""
    dims = [dim for meta in recorded.call.operands for dim in meta.shape if dim > 1]
    return next((size for size in SIZES if any(dim % size == 0 for dim in dims)), SIZES[0])


def offer_text(offer: Offer) -> str:
    """A strategy as the page has it, such as `S(1), S(0) → P(sum)`."""
    ins, outs = (", ".join(placement_text(placement) for placement in side) for side in offer)
    return f"`{ins} → {outs}`"


def page(table: Iterable[Row], tally: Counter[str]) -> str:
    """The text of docs/coverage.md."""
    table = list(table)
    own, borrowed = (sum(row.rule.startswith(source) for row in table) for source in ("own", "borrowed"))
    sound = "none of them unsound" if not any(row.unsound for row in table) else "UNSOUND ONES AMONG THEM"
    totals = (
        f"**{len(table)} operators met, {own} with a rule of ours, {borrowed} with one borrowed from torch; "
        f"{sum(row.checked for row in table)} calls and "
        f"{sum(row.strategies for row in table)} strategies checked, {sound}.** Of torch's strategies on these calls "
        f"{tally['covered']} are offered here too. torch {torch.__version__.partition('+')[0]}."
    )
    registry = torch_operators()
    missing = [str(op) for op in registry if not has_rule(op) or is_borrowed(op)]
    peers = PEERS.format(
        passing=tally["passing"],
        unverified=tally["unverified"],
        registry=len(registry),
        missing=len(missing),
        others=", ".join(f"`{name}`" for name in missing if not name.startswith(("aten._foreach_", "aten._fused_"))),
    )
    sizes = ", ".join(map(str, SIZES))
    head = HEAD.format(command=COMMAND, sizes=sizes, totals=textwrap.fill(totals, 120), peers=textwrap.fill(peers, 120))
    lines = [_line(row) for row in table]
    unmet = ", ".join(f"`{name}`" for name in unmet_rules(row.name for row in table))
    return head + "".join(lines) + UNMET + f"{textwrap.fill(unmet, 120)}\n"


def _line(row: Row) -> str:
    calls = f"{row.calls} ({row.checked})"
    return f"| `{row.name}` | {row.rule} | {calls} | {row.strategies} | {_besides(row)} | {reason(row)} |\n"


def _besides(row: Row) -> str:
    shown = sorted(row.besides, key=lambda text: (len(text), text))
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def reason(row: Row) -> str:
    """Why a rule does not offer what torch offers besides."""
    if not row.besides:
        return ""
    return "no rule" if row.rule == "none" else REASONS.get(row.name, UNEXPLAINED)


def unmet_rules(met: Iterable[str]) -> list[str]:
    """Registered names that stand for none of the operators met, in the form that torch prints."""
    known = {name for operator in met for name in (operator, operator.rpartition(".")[0])}
    return [name for key in rule_names() if (name := key.replace("::", ".")) not in known and "." in name]


def problems(text: str) -> Iterator[str]:
    """Where a page disagrees with the registry, or with the reasons."""
    table = dict(re.findall(r"^\| `([\w.]+)` \| ([\w, ]+) \|", text, re.MULTILINE))
    for name, rule in table.items():
        try:
            op = sample_call(name, ())[0]
        except RuleError:  # of a part of torch that nothing has imported yet
            continue
        own = has_rule(op) and not is_borrowed(op)
        if own != rule.startswith("own") or (rule.startswith("borrowed") and not is_borrowed(op)):
            yield f"{name} stands there with rule: {rule}"
    listed = re.findall(r"`([\w.]+)`", text.partition(UNMET)[2])
    yield from (f"{name} has a rule and is missing" for name in sorted({*unmet_rules(table)} - {*listed}))
    yield from (f"{name} stands there and has no rule" for name in sorted({*listed} - {*unmet_rules(table)}))
    offers = dict(re.findall(r"^\| `([\w.]+)` \|[^|]*\|[^|]*\|[^|]*\| ([^|]*)\|", text, re.MULTILINE))
    yield from (f"{name} has a reason and nothing to explain" for name in REASONS if not offers.get(name, "").strip())
    explained = re.findall(rf"^\| `([\w.]+)` .*\| {UNEXPLAINED} \|$", text, re.MULTILINE)
    yield from (f"{name} needs a reason why it does not offer what torch does" for name in explained)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if page and registry disagree")
    if parser.parse_args().check:
        found = list(problems(PAGE.read_text(encoding="utf-8")))
        sys.stdout.write("".join(f"docs/coverage.md: {problem}; run {COMMAND}\n" for problem in found))
        return bool(found)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's samples exercise what is deprecated
    tally: Counter[str] = Counter()
    table = list(rows(collect(everything(), MOST), tally))
    unsound = [finding for row in table for finding in row.unsound]
    sys.stdout.write("".join(f"{finding}\n" for finding in unsound))
    PAGE.write_text(page(table, tally), encoding="utf-8")
    return bool(unsound)


if __name__ == "__main__":
    sys.exit(main())
