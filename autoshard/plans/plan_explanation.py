"""The explanation of a part of a plan: placements, strategies and collectives that a glob matches."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autoshard.errors import PlanError
from autoshard.names import ancestors, matching, suggestion
from autoshard.plans.backward_half import SOURCES_TITLE, module_rows, sources_of, sources_parts
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_tables import collective_rows, collective_table, operator_rows, operator_table, tensor_table
from autoshard.report import Note, Part, Report, Section
from autoshard.units import format_seconds

STRATEGY_LEGEND = (
    "A strategy names the loop of the operator that a mesh axis splits, as its sharding rule calls it (docs/rules.md): "
    '"i on dp" splits loop i over axis dp, "j.1" is the second factor of loop j, "whole" splits nothing.'
)


def explanation(plan: PlanContents, path_glob: str) -> Report:
    """Return the report on the parameters and modules of a plan that a glob matches.

    Raises:
        PlanError: no parameter, operator or collective of the plan has a path that the glob matches.
    """
    found = {name for name in plan.placements if _under(path_glob, name)}
    owners = {name.rpartition(".")[0] for name in found}
    # A parameter's operators are listed under the module that owns it.
    modules = {module for module in _modules(plan) if module in owners or _under(path_glob, module)}
    if not found and not modules:
        raise no_match_error(path_glob, paths(plan))
    parts: list[Part] = []
    placements = {name: row for name, row in plan.placements.items() if name in found}
    if placements:
        parts.append(tensor_table(plan.mesh.names, placements, plan.shapes, plan.gathered))
    for hint, pinned in plan.hints.items():
        if any(_under(hint, name) for name in found):
            parts.append(Note(f"pinned by the hint {hint!r}: {pinned}"))
    return Report.of("", (*parts, *_work(plan, modules), Note(STRATEGY_LEGEND)))


def _work(plan: PlanContents, modules: Collection[str]) -> Iterator[Part]:
    """Yield the operators and collectives of these modules."""
    operators = operator_rows(choice for choice in plan.choices if choice.module in modules)
    if operators:
        yield operator_table(operators)
    sent = collective_rows(sent for sent in plan.collectives if sent.module in modules)
    yield collective_table(sent, most=len(sent)) if sent else Note("no collectives here")
    sources = {path: of_module for path, of_module in sources_of([plan]).items() if path in modules}
    yield Section(SOURCES_TITLE, sources_parts(module_rows(sources)))
    compute, communication = (format_seconds(sum(row.seconds for row in rows)) for rows in (operators, sent))
    yield Note(f"predicted: operators {compute}, collectives {communication}")


def paths(plan: PlanContents) -> set[str]:
    """Return the paths that can be explained: names of parameters, and paths of modules."""
    above = (path for name in plan.placements for path in ancestors(name))
    return {*plan.placements, *_modules(plan), *above} - {""}


def no_match_error(path_glob: str, known_paths: set[str]) -> PlanError:
    """Return the error about a glob that matches no path, with similar paths."""
    return PlanError(
        f"nothing in the plan is at {path_glob!r}: no parameter and no module matches. "
        f"{suggestion(path_glob, known_paths)}"
    )


def matches(plan: PlanContents, path_glob: str) -> bool:
    """Return True if the glob matches a path that can be explained."""
    return any(_under(path_glob, path) for path in paths(plan))


def _modules(plan: PlanContents) -> set[str]:
    """Return paths of the modules that have operators or collectives."""
    return {choice.module for choice in plan.choices} | {sent.module for sent in plan.collectives}


def _under(glob: str, path: str) -> bool:
    """Return True if the glob matches the path or a module above it."""
    return bool(path) and bool(matching(glob, (path, *ancestors(path))))
