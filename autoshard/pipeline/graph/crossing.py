"""The values between stages of a cut, and the checks of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from autoshard.errors import PlanError
from autoshard.pipeline.graph.forward_export import ExportedModule, is_part

Recompute = Mapping[str, Collection[int]]


def stages_of(
    exported: ExportedModule, stage_of: Mapping[str, int], stages: int, recompute: Recompute
) -> dict[fx.Node, int]:
    """Return the stage of every operator, in the order of the graph; parts of a result are where the operator is.

    Raises:
        PlanError: as for `cut`.
    """
    operators = exported.operators
    if stages < 1 or stages > len(operators):
        raise PlanError(
            f"stages={stages}: {type(exported.module).__name__} has {len(operators)} operators, and every stage but "
            "those that hand on what they receive needs one. Ask for fewer stages."
        )
    _check_names(exported, stage_of, stages, recompute)
    placed: dict[fx.Node, int] = {}
    for node in operators:
        placed[node] = placed[node.all_input_nodes[0]] if is_part(node) else stage_of[node.name]
        for source in node.all_input_nodes:
            if placed.get(source, 0) > placed[node]:
                raise PlanError(
                    f"{node.name} is on stage {placed[node]} and takes the result of {source.name} on stage "
                    f"{placed[source]}: values go forward only. Put {node.name} on stage {placed[source]} or later."
                )
    by_name = {node.name: stage for node, stage in placed.items()}
    for group in exported.together:
        placements = {by_name[name]: name for name in reversed(group)}
        if len(placements) > 1:
            listed = ", ".join(f"{name} on stage {stage}" for stage, name in sorted(placements.items()))
            raise PlanError(
                f"{listed}: they read or change the same tensor, which is changed in place, and so must be on one "
                f"stage, "
                f"with all of {', '.join(group[:8])}{', ...' if len(group) > 8 else ''}. Put them together, or use "
                "operators that do not work in place (ReLU without inplace=True)."
            )
    return placed


def _check_names(exported: ExportedModule, stage_of: Mapping[str, int], stages: int, recompute: Recompute) -> None:
    names = {node.name for node in exported.operators}
    missing = [node.name for node in exported.operators if node.name not in stage_of and not is_part(node)]
    if missing:
        raise PlanError(
            f"{len(missing)} of {len(names)} operators have no stage, such as {missing[0]}: stage_of needs one for "
            "every node of exported.operators."
        )
    for argument, mentioned in (("stage_of", stage_of), ("recompute", recompute)):
        unknown = [name for name in mentioned if name not in names]
        if unknown:
            raise PlanError(
                f"{argument} names {unknown[0]}, which is no operator of {type(exported.module).__name__}: was it made "
                "for another export?"
            )
    outside = [name for name, stage in stage_of.items() if stage not in range(stages)]
    if outside:
        name = outside[0]
        raise PlanError(f"{name} is on stage {stage_of[name]}: with stages={stages} there are 0 to {stages - 1}.")


def values_across(
    exported: ExportedModule, placed: Mapping[fx.Node, int], stages: int, recompute: Recompute
) -> list[tuple[fx.Node, ...]]:
    """Return the values that every stage receives from the one before, in the order of the graph.

    Args:
        exported, stages, recompute: as for `cut`.
        placed: the stage of every operator.

    Raises:
        PlanError: nothing goes from a stage to the next.
    """
    has: list[set[fx.Node]] = [set() for _ in range(stages)]
    for node, stage in placed.items():
        has[stage].update(node.all_input_nodes)
    has[-1].update(exported.forward.outputs)
    received: list[tuple[fx.Node, ...]] = [()] * stages
    # From the last stage backwards: a stage has what it reads and what the next one receives, and receives what it has
    # and does not make.
    for stage in range(stages - 1, 0, -1):
        received[stage] = tuple(
            node
            for node, place in placed.items()
            if node in has[stage] and place < stage and stage not in recompute.get(node.name, ())
        )
        has[stage - 1].update(received[stage])
    _check_across(placed, received)
    return received


def _check_across(placed: Mapping[fx.Node, int], received: Sequence[Sequence[fx.Node]]) -> None:
    counts = Counter(placed.values())
    for stage, nodes in enumerate(received[1:], 1):
        if not nodes:
            raise PlanError(
                f"nothing goes from stage {stage - 1} ({counts[stage - 1]} operators) to stage {stage} "
                f"({counts[stage]} operators), so they are no pipeline. Put some of the operators that lead to the "
                f"model's outputs on stage {stage - 1} or before."
            )
        for node in nodes:
            if not isinstance(node.meta["val"], torch.Tensor):
                raise PlanError(
                    f"{node.name} would go from stage {stage - 1} to stage {stage} and is no tensor but "
                    f"{type(node.meta['val']).__name__}. Put it on the stage of what takes it."
                )


def recomputed_nodes(
    exported: ExportedModule,
    placed: Mapping[fx.Node, int],
    stage: int,
    received: Collection[fx.Node],
    returned: Collection[fx.Node],
) -> set[fx.Node]:
    """Return the operators of earlier stages that a stage runs anew, for values that it needs and does not receive.

    Args:
        exported: as for `cut`.
        placed: the stage of every operator.
        stage: the stage.
        received, returned: the values that it takes from others and gives to others.

    Raises:
        PlanError: one of them must not be run again.
    """
    operators = [node for node, place in placed.items() if place == stage]
    given = {*received, *operators}
    needed = [*(source for node in operators for source in node.all_input_nodes), *returned]
    # For every node that runs anew, a value that needs it.
    wanted_for = {node: node for node in needed if node in placed and node not in given}
    waiting = list(wanted_for)
    for node in waiting:  # grows while it is walked
        _check_recomputable(exported, node, wanted_for[node], stage)
        for source in node.all_input_nodes:
            if source in placed and source not in given and source not in wanted_for:
                wanted_for[source] = wanted_for[node]
                waiting.append(source)
    return set(waiting)


def _check_recomputable(exported: ExportedModule, node: fx.Node, wanted: fx.Node, stage: int) -> None:
    """Refuse to run `node` anew for `wanted` if its result there would differ, or be unavailable."""
    fault = None
    if node.name in exported.random:
        fault = "may draw random numbers, which would be others"
    elif any(node.name in group for group in exported.together):
        fault = "is changed in place, or made of what is"
    else:
        sources = exported.sources
        for source in node.all_input_nodes:
            if source in sources and sources[source].kind == "parameter":
                fault = f"depends on parameter {sources[source].name}, which that stage would have to hold"
    if fault:
        of = "" if node is wanted else f" is made from {node.name}, which"
        raise PlanError(
            f"recompute says that stage {stage} computes {wanted.name} anew, but it{of} {fault}. Leave "
            f"{stage} out of recompute[{wanted.name!r}]: the value is handed on then."
        )
