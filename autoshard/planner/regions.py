"""Regions of a step: parts whose operators are recomputed, or whose values are kept, or moved to the host.

A region is a module that a hint matches, a context in `forward`, or a call of `torch.utils.checkpoint`. Regions change
the captured step before it is planned: its graph has the recomputation and offloading, and the planner decides the
rest. If nested regions contradict, the innermost counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from torch import fx

from autoshard.capture.capture_errors import node_line
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.marks import Region, RegionKind, Saving, add_region, marked_regions
from autoshard.capture.offloading import base_in_memory, offload_values, values_of_modules
from autoshard.capture.recomputation import names_of_region, recompute_layers
from autoshard.errors import HintError
from autoshard.names import ancestors, matching, suggestion
from autoshard.options.placements import InfeasibleHintError
from autoshard.planner.hints import HintValue

_CONTRADICTIONS = (frozenset(("keep", "recompute")), frozenset(("keep", "offload")))


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """The operators of one region.

    Attributes:
        kind: as in `Region`.
        text: the user's text, for errors.
        glob: the glob of the hint that makes the region; None for a region in the model's code.
        nodes: its operators in the forward half.
    """

    kind: RegionKind
    text: str
    glob: str | None
    nodes: frozenset[fx.Node]


def with_regions(graph: JointGraph, hints: Mapping[str, HintValue] | None, modules: Collection[str]) -> JointGraph:
    """Return a step with the recomputation, saving and offloading that hints and the model's code ask for.

    Args:
        graph: the captured step; returned unchanged if nothing is asked for, or if there is no backward half.
        hints: as for `hints.resolve`; those with another value than `recompute()`, `keep()` or `offload()` are ignored.
        modules: paths of the modules.

    Raises:
        HintError: a glob matches no module; a hint recomputes or moves nothing; or two regions contradict each other,
            and neither is inside the other.
    """
    paths = hinted_paths(hints, modules)
    if not graph.gradients:
        return graph
    forward = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "forward"]
    stretches = [*_marked_stretches(forward), *_hinted_stretches(graph, forward, hints or {}, paths)]
    inner = _contradicting_stretches_inside(stretches)
    kept = {
        node.name: stretch.text
        for stretch in stretches
        if stretch.kind == "keep"
        for node in sorted(stretch.nodes.difference(*inner[stretch]))  # nodes compare by their places
        if base_in_memory(node) is node
    }
    graph = replace(graph, kept=kept) if kept else graph
    again: dict[_Stretch, list[str]] = {}
    moved: dict[_Stretch, frozenset[fx.Node]] = {}
    for stretch in stretches:
        without = frozenset[fx.Node]().union(*inner[stretch])
        if stretch.kind == "recompute":
            again[stretch] = names_of_region(graph, stretch.nodes, without)
        elif stretch.kind == "offload":
            moved[stretch] = stretch.nodes - without
    _check_effects(again, "runs nothing again: of the values that the backward half reads of {}, none is made and used "
        "inside. Drop the hint, or match the modules around.", paths)  # fmt: skip
    graph = recompute_layers(graph, {name for names in again.values() for name in names})
    _check_effects(
        {stretch: values_of_modules(graph, nodes) for stretch, nodes in moved.items()},
        "moves nothing: the backward half reads no tensor that the forward half makes in {}, but for what the step "
        "returns, is kept or made again. Drop the hint, or match the modules whose activations are large.",
        paths,
    )
    asked = {node for nodes in moved.values() for node in nodes}
    return offload_values(graph, values_of_modules(graph, asked)) if asked else graph


def hinted_paths(hints: Mapping[str, HintValue] | None, modules: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, for every hint of a region, the modules that it makes regions: its matches outside its other matches.

    Args:
        hints, modules: as for `with_regions`.

    Raises:
        HintError: a glob matches no module.
    """
    found = {}
    # `hints.resolve` raises the error for hints that are no mapping.
    for glob, value in hints.items() if isinstance(hints, Mapping) else ():
        if isinstance(value, Saving):
            matched = set(matching(str(glob), modules))
            if not matched:
                raise HintError(
                    f"the hint {glob!r}: {value} matches no module. {suggestion(str(glob), set(modules) - {''})}"
                )
            found[glob] = tuple(path for path in modules if path in matched and matched.isdisjoint(_around(path)))
    return found


def mark_regions(graph: fx.Graph, hints: Mapping[str, HintValue] | None, modules: Collection[str]) -> None:
    """Mark the operators of an exported forward graph with the regions of hints.

    A part that is cut from the graph has other modules, but then keeps its regions.

    Args:
        graph: an exported graph, with the modules of every node.
        hints, modules: as for `with_regions`.

    Raises:
        HintError: a glob matches no module.
    """
    paths = [(glob, path) for glob, matched in hinted_paths(hints, modules).items() for path in matched]
    regions: dict[str, list[Region]] = defaultdict(list)
    for number, (glob, path) in enumerate(paths, 1):
        value = (hints or {})[glob]
        assert isinstance(value, Saving)
        regions[path].append(Region(value.kind, -number, f"the hint {glob!r}: {value}"))
    for node in graph.nodes if regions else ():
        if node.op == "call_function":
            stack = node.meta.get("nn_module_stack") or {"": ("",)}
            path = next(reversed(stack.values()))[0]
            for each in (path, *_around(path)):
                for region in regions.get(each, ()):
                    add_region(node, region)


def _around(path: str) -> Iterator[str]:
    """Yield the paths of the modules that contain a module, the root last."""
    if path:
        yield from ancestors(path)
        yield ""


def _marked_stretches(forward: Sequence[fx.Node]) -> Iterator[_Stretch]:
    """Yield the regions marked on operators, outer ones first."""
    members: dict[Region, list[fx.Node]] = {}
    for node in forward:
        for region in marked_regions(node):
            members.setdefault(region, []).append(node)
    for region, nodes in members.items():
        line = next(filter(None, map(node_line, nodes)), "")
        text = region.origin if region.number < 0 or not line else f"{region.origin} around {line}"
        yield _Stretch(region.kind, text, None, frozenset(nodes))


def _hinted_stretches(
    graph: JointGraph, forward: Sequence[fx.Node], hints: Mapping[str, HintValue], paths: Mapping[str, Sequence[str]]
) -> Iterator[_Stretch]:
    wanted = {path for matched in paths.values() for path in matched}
    members: dict[str, list[fx.Node]] = defaultdict(list)
    for node in forward:
        path = graph.module_path(node)
        for each in wanted.intersection((path, *_around(path))):
            members[each].append(node)
    for glob, matched in paths.items():
        value = hints[glob]
        assert isinstance(value, Saving)
        for path in matched:
            yield _Stretch(value.kind, f"the hint {glob!r}: {value}", glob, frozenset(members[path]))


def _contradicting_stretches_inside(stretches: Sequence[_Stretch]) -> dict[_Stretch, list[frozenset[fx.Node]]]:
    """Return, for every region, the operators of each region inside it that contradicts it.

    Raises:
        HintError: two regions contradict each other, and neither is inside the other.
    """
    inner: dict[_Stretch, list[frozenset[fx.Node]]] = {stretch: [] for stretch in stretches}
    around: dict[fx.Node, list[_Stretch]] = defaultdict(list)
    for stretch in stretches:
        for node in stretch.nodes:
            around[node].append(stretch)
    overlapping = {pair for several in around.values() for pair in combinations(several, 2)}
    for first, second in combinations(stretches, 2):
        if (first, second) not in overlapping:
            continue
        if frozenset((first.kind, second.kind)) not in _CONTRADICTIONS:
            continue
        if first.nodes < second.nodes:
            inner[second].append(first.nodes)
        elif second.nodes < first.nodes:
            inner[first].append(second.nodes)
        else:
            node = min(first.nodes & second.nodes)
            raise InfeasibleHintError(
                f"{first.text} and {second.text} contradict each other on the operator {node.name} of "
                f"{node.meta.get('module_path') or '(root)'}, and neither is inside of the other. Drop one of them, or "
                "give them different operators."
            )
    return inner


def _check_effects(effects: Mapping[_Stretch, Collection[str]], fault: str, paths: Mapping[str, Sequence[str]]) -> None:
    """Raise a `HintError` if the regions of some hint change nothing; `fault` has a place for their modules."""
    globs = dict.fromkeys(stretch.glob for stretch in effects)
    for glob in globs:
        if glob is not None and not any(names for stretch, names in effects.items() if stretch.glob == glob):
            text = next(stretch.text for stretch in effects if stretch.glob == glob)
            where = ", ".join(path or "the root module" for path in paths[glob][:3])
            raise HintError(f"{text} {fault.format(where)}")
