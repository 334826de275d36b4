"""Where the step of a microbatch is cut: the stage of every node, what crosses boundaries, what stages run anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from autoshard.capture.joint_graph import JointOutput
from autoshard.capture.step_marks import tensor_name
from autoshard.errors import PlanError
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep, value_of

Recompute = Mapping[str, Collection[int]]


def stages_of(step: MicrobatchStep, stage_of: Mapping[str, int], stages: int, recompute: Recompute) -> tuple[int, ...]:
    """Return the stage of every operator, in order.

    Raises:
        PlanError: as for `cut`.
    """
    operators = step.operators
    if stages < 1 or stages > len(operators):
        raise PlanError(
            f"stages={stages}: {type(step.module).__name__} has {len(operators)} operators, and every stage but "
            "those that hand on what they receive needs one. Ask for fewer stages."
        )
    _check_names(step, stage_of, stages, recompute)
    placed = tuple(stage_of[each.name] for each in operators)
    for place, each in enumerate(operators):
        for source in (source for node in each.nodes for source in node.all_input_nodes):
            owner = step.owner(source)
            if owner is not None and placed[owner] > placed[place]:
                raise PlanError(
                    f"{each.name} is on stage {placed[place]} and takes the result of {operators[owner].name} on stage "
                    f"{placed[owner]}: values go forward only. Put {each.name} on stage {placed[owner]} or later."
                )
    for group in step.together:
        placements = {stage_of[name]: name for name in reversed(group)}
        if len(placements) > 1:
            listed = ", ".join(f"{name} on stage {stage}" for stage, name in sorted(placements.items()))
            raise PlanError(
                f"{listed}: they read or change the same tensor, which is changed in place, and so must be on one "
                f"stage, with all of {', '.join(group[:8])}{', ...' if len(group) > 8 else ''}. Put them together, or "
                "use operators that do not work in place (ReLU without inplace=True)."
            )
    return placed


def _check_names(step: MicrobatchStep, stage_of: Mapping[str, int], stages: int, recompute: Recompute) -> None:
    names = [each.name for each in step.operators]
    missing = [name for name in names if name not in stage_of]
    if missing:
        raise PlanError(
            f"{len(missing)} of {len(names)} operators have no stage, such as {missing[0]}: stage_of needs one for "
            "every operator of the step."
        )
    for argument, mentioned, known in (("stage_of", stage_of, {*names}), ("recompute", recompute, step.tensors)):
        unknown = [name for name in mentioned if name not in known]
        if unknown:
            raise PlanError(
                f"{argument} names {unknown[0]}, which is no operator of {type(step.module).__name__}: was it made for "
                "another graph?"
            )
    outside = [name for name, stage in stage_of.items() if stage not in range(stages)]
    if outside:
        name = outside[0]
        raise PlanError(f"{name} is on stage {stage_of[name]}: with stages={stages} there are 0 to {stages - 1}.")


class StageCut:
    """One cut of a step into stages.

    Args:
        step: the step.
        placed: the stage of every operator.
        stages, recompute, grad: as for `cut`.
    """

    def __init__(
        self, step: MicrobatchStep, placed: Sequence[int], stages: int, recompute: Recompute, grad: bool
    ) -> None:
        self.step = step
        self.joint = step.joint
        self.placed = placed
        self.grad = grad
        self.last = stages - 1
        self.forward: list[list[fx.Node]] = [[] for _ in range(stages)]
        self.backward: list[list[fx.Node]] = [[] for _ in range(stages)]
        for node in self.joint.graph.nodes:
            is_backward = self.joint.phase(node) == "backward"
            if is_backward and not grad:
                continue
            halves = self.backward if is_backward else self.forward
            for stage in {placed[owner] for owner in step.owners.get(node, ())}:
                halves[stage].append(node)
        self.changes: list[list[tuple[JointOutput, fx.Node]]] = [[] for _ in range(stages)]
        for output in self.joint.outputs:
            if output.kind == "mutation" and output.node is not None:
                value = value_of(output.node)
                self.changes[self._stage_of_change(output, value)].append((output, value))
        self.across = [*self._values_across(recompute), ()]
        self.again = [self._nodes_to_recompute(stage) for stage in range(stages)]
        self.differentiated = self._values_with_gradients()

    def _stage(self, node: fx.Node) -> int | None:
        owner = self.step.owner(node)
        return None if owner is None else self.placed[owner]

    def _stage_of_change(self, output: JointOutput, value: fx.Node) -> int:
        (changed,) = (node for node, item in self.step.sources.items() if item.name == output.name)
        stages = [stage for node in (value, *changed.users) if (stage := self._stage(node)) is not None]
        return stages[0] if stages else 0

    def _values_across(self, recompute: Recompute) -> list[tuple[fx.Node, ...]]:
        """Return the values that every stage receives from the one before, in the order of the graph.

        Raises:
            PlanError: nothing goes from a stage to the next.
        """
        has = [
            {source for node in (*forward, *backward) for source in node.all_input_nodes}
            for forward, backward in zip(self.forward, self.backward, strict=True)
        ]
        has[-1].update(self.step.outputs)
        received: list[tuple[fx.Node, ...]] = [()] * len(has)
        values = [(node, stage) for stage, nodes in enumerate(self.forward) for node in nodes]
        order = {node: place for place, node in enumerate(self.joint.graph.nodes)}
        values.sort(key=lambda item: order[item[0]])
        # From the last stage backwards: a stage has what it reads and what the next one receives, and receives what it
        # has and does not make.
        for stage in range(self.last, 0, -1):
            received[stage] = tuple(
                node
                for node, place in values
                if node in has[stage] and place < stage and stage not in recompute.get(tensor_name(node), ())
            )
            has[stage - 1].update(received[stage])
        counts = Counter(self.placed)
        for stage, nodes in enumerate(received[1:], 1):
            if not nodes:
                raise PlanError(
                    f"nothing goes from stage {stage - 1} ({counts[stage - 1]} operators) to stage {stage} "
                    f"({counts[stage]} operators), so they are no pipeline. Put some of the operators that lead to the "
                    f"model's outputs on stage {stage - 1} or before."
                )
        return received

    def _nodes_to_recompute(self, stage: int) -> set[fx.Node]:
        """Return the nodes of earlier stages that a stage runs anew, for values that it needs and does not receive.

        Raises:
            PlanError: one of them must not be run again.
        """
        given = {*self.across[stage], *self.forward[stage]}
        needed = [source for node in (*self.forward[stage], *self.backward[stage]) for source in node.all_input_nodes]
        needed += self.results(stage)
        # For every node that runs anew, a value that needs it.
        wanted_for = {node: node for node in needed if self._is_made(node) and node not in given}
        waiting = list(wanted_for)
        # The list grows while it is walked.
        for node in waiting:
            self._check_recomputable(node, wanted_for[node], stage)
            for source in node.all_input_nodes:
                if self._is_made(source) and source not in given and source not in wanted_for:
                    wanted_for[source] = wanted_for[node]
                    waiting.append(source)
        return set(waiting)

    def _is_made(self, node: fx.Node) -> bool:
        return self.step.owner(node) is not None and self.joint.phase(node) == "forward"

    def _check_recomputable(self, node: fx.Node, wanted: fx.Node, stage: int) -> None:
        """Refuse to run `node` anew for `wanted` if its result there would differ, or be unavailable."""
        owner = self.step.owner(node)
        assert owner is not None
        name = self.step.operators[owner].name
        fault = None
        if name in self.step.random:
            fault = "may draw random numbers, which would be others"
        elif name in self.step.changing:
            fault = "is changed in place, or made of what is"
        else:
            for source in node.all_input_nodes:
                if source in self.step.sources and self.step.sources[source].kind == "parameter":
                    fault = (
                        f"depends on parameter {self.step.sources[source].name}, which that stage would have to hold"
                    )
        if fault:
            wanted_name = tensor_name(wanted)
            of = "" if node is wanted else f" is made from {tensor_name(node)}, which"
            raise PlanError(
                f"recompute says that stage {stage} computes {wanted_name} anew, but it{of} {fault}. Leave {stage} out "
                f"of recompute[{wanted_name!r}]: the value is handed on then."
            )

    def results(self, stage: int) -> tuple[fx.Node, ...]:
        return self.step.outputs if stage == self.last else self.across[stage + 1]

    def _values_with_gradients(self) -> list[frozenset[fx.Node]]:
        """Return the values whose gradients every stage has a part of."""
        found: list[set[fx.Node]] = [set() for _ in range(self.last + 1)]
        for value, marks in self.step.gradients.items() if self.grad else ():
            for mark in marks:
                for _, contributor in self.step.contributions[mark]:
                    found[self.last if contributor is None else self.placed[contributor]].add(value)
        for stage in range(self.last - 1, -1, -1):
            found[stage].update(value for value in self.across[stage + 1] if value in found[stage + 1])
        return [frozenset(values) for values in found]
