"""Charts of a model's modules: their tree with placements and costs, and their collectives."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autoshard.names import group_names, index_of
from autoshard.plans.expenses import COMPUTE, Expenses
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_tables import WorkRow
from autoshard.report import Axis, Box, Chart, Plot, Series, Tree
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import placement_text
from autoshard.units import format_bytes, format_seconds

_MODULES = 24  # modules in the chart of collectives: about a screen
_PALETTE = 7  # colours of placements; they repeat after these


@dataclass(eq=False)
class ModuleNode:
    """A module, or a group of equal layers, in the tree of a model.

    Attributes:
        name: the last part of its path; for equal layers, their indices.
        count: the number of modules in it.
        operators: predicted seconds of its own operators, summed over all its modules.
        collectives: predicted seconds of its own collectives, summed likewise.
        parameters: own parameters and buffers: name -> shape and placements.
        children: the child modules by name.
    """

    name: str
    count: int = 1
    operators: float = 0.0
    collectives: float = 0.0
    parameters: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = field(default_factory=dict)
    children: dict[str, ModuleNode] = field(default_factory=dict)

    def child(self, path: str) -> ModuleNode:
        """Return the module at a path below this one; create it if it is missing."""
        node = self
        for name in filter(None, path.split(".")):
            node = node.children.setdefault(name, ModuleNode(name))
        return node

    def total(self, amount: Callable[[ModuleNode], float]) -> float:
        """Return the sum of an amount over this module and all its descendants."""
        return amount(self) + sum(child.total(amount) for child in self.children.values())

    @property
    def form(self) -> Hashable:
        """A key that is equal for modules with equal parameters, placements and children."""
        children = tuple((child.name, child.count, child.form) for child in self.children.values())
        return tuple(self.parameters.items()), children


def module_tree(plan: PlanContents) -> ModuleNode:
    """Return the modules of a plan, with equal layers as one node."""
    root = ModuleNode("")
    for term, amount in Expenses(plan).terms.items():
        node = root.child(term.module)
        if term.kind == COMPUTE:
            node.operators += amount.seconds
        else:
            node.collectives += amount.seconds
    for name, placements in plan.placements.items():
        module, _, parameter = name.rpartition(".")
        root.child(module).parameters[parameter] = plan.shapes.get(name, ()), tuple(map(placement_text, placements))
    return replace(_merge_alike(root), name="whole model")


def _merge_alike(node: ModuleNode) -> ModuleNode:
    """Return a tree in which equal children of a module with numbers as names are merged."""
    children = {name: _merge_alike(child) for name, child in node.children.items()}
    # The name of a child that only held another child is followed by the other's name.
    indexed = {name: (child.name.removeprefix(name), child.form) for name, child in children.items() if index_of(name)}
    groups = {name: group for group in group_names(indexed) for name in group.names}
    merged: dict[str, ModuleNode] = {}
    for name, child in children.items():
        kept = child
        if name in groups and len(groups[name].names) > 1:
            if groups[name].names[0] != name:
                continue
            # The group's text is a glob with braces, which a picture does not need.
            text = re.sub(r"[{}]", "", groups[name].text) + child.name.removeprefix(name)
            kept = _sum([children[member] for member in groups[name].names], text)
        merged[kept.name] = kept
    is_link = len(merged) == 1 and not (node.operators or node.collectives or node.parameters)
    if is_link and node.name:
        # A module that only holds another one, such as a list of layers, is not shown as a box.
        (only,) = merged.values()
        return replace(only, name=f"{node.name}.{only.name}")
    return replace(node, children=merged)


def _sum(nodes: Sequence[ModuleNode], name: str) -> ModuleNode:
    """Merge equal modules into one node."""
    first = nodes[0]
    return ModuleNode(
        name,
        sum(node.count for node in nodes),
        sum(node.operators for node in nodes),
        sum(node.collectives for node in nodes),
        first.parameters,
        {key: _sum([node.children[key] for node in nodes], key) for key in first.children},
    )


def modules_chart(plan: PlanContents, prefix: str = "") -> Iterator[Chart]:
    """Yield the tree of modules, sized by the time of operators, of collectives, and by parameters on one device."""
    tree = module_tree(plan)
    operators, sent = tree.total(lambda node: node.operators), tree.total(lambda node: node.collectives)
    elements = tree.total(_counter(plan))
    views = []
    if operators:
        views.append(_time_view(plan, tree, "Operators", lambda node: node.operators))
    if sent:
        views.append(_time_view(plan, tree, "Collectives", lambda node: node.collectives))
    if elements:
        views.append(_parameter_view(plan, tree))
    if views:
        yield Chart(
            f"{prefix}modules",
            f"Tree of modules: operators take {format_seconds(operators)}, collectives {format_seconds(sent)}, and one "
            f"of {plan.mesh.size} devices holds {elements:,.0f} elements of parameters and buffers",
            tuple(views),
            # Enough height for the text of boxes, as far as a screen allows.
            min(620, 200 + 24 * sum(1 for _ in _walk(tree))),
            "Layers that are alike are one box. Select a box, or press the arrow keys, to look into it.",
        )


def _time_view(plan: PlanContents, tree: ModuleNode, label: str, amount: Callable[[ModuleNode], float]) -> Tree:
    """Return the tree sized by seconds of `amount`, coloured by the share of collectives."""
    boxes: list[Box] = []
    itself: list[Box] = []
    numbers: dict[ModuleNode, int] = {}
    for node, above in _walk(tree):
        if not node.total(amount):
            continue
        operators, sent = node.total(lambda node: node.operators), node.total(lambda node: node.collectives)
        own = ", ".join(dict.fromkeys(_placements(plan.mesh, placements) for _, placements in node.parameters.values()))
        numbers[node] = len(boxes)
        inner = any(child.total(amount) for child in node.children.values())
        text = f"{format_seconds(node.total(amount))}  {own}"
        parent = numbers[above] if above else -1
        size = 0.0 if inner else amount(node)
        share = sent / (operators + sent)
        boxes.append(Box(parent, _title(node, above), text, size, share, _note(plan, node, above)))
        if inner and amount(node):
            share = node.collectives / (node.operators + node.collectives)
            rest = format_seconds(amount(node))
            itself.append(Box(numbers[node], "itself", rest, amount(node), share, _note(plan, node, above)))
    # After the child modules: boxes of one parent are drawn, and navigated, in this order.
    return Tree(label, (*boxes, *itself), (("collectives' share of seconds", ""),))


def _parameter_view(plan: PlanContents, tree: ModuleNode) -> Tree:
    """Return the tree sized by elements on one device, with one colour per combination of placements."""
    whole = _placements(plan.mesh, ["R"] * plan.mesh.ndim)
    # Grey for what every device holds.
    colours = {whole: "placement-0"}
    used = set()
    boxes: list[Box] = []
    numbers: dict[ModuleNode, int] = {}
    for node, above in _walk(tree):
        if not node.total(_counter(plan)):
            continue
        numbers[node] = len(boxes)
        parent = numbers[above] if above else -1
        boxes.append(Box(parent, _title(node, above), "", 0.0, "soft", _note(plan, node, above)))
        for name, (shape, placements) in node.parameters.items():
            text = _placements(plan.mesh, placements)
            colour = colours.setdefault(text, f"placement-{1 + (len(colours) - 1) % _PALETTE}")
            used.add(text)
            elements = node.count * _share(plan, shape, placements)
            note = f"{name} {_shape(shape)}\n{text}\n{elements:,.0f} elements on one device"
            boxes.append(Box(numbers[node], name, text, elements, colour, note))
    legend = tuple((name, colour) for name, colour in colours.items() if name in used)
    return Tree("Parameters", tuple(boxes), legend)


def _walk(node: ModuleNode, above: ModuleNode | None = None) -> Iterator[tuple[ModuleNode, ModuleNode | None]]:
    """Yield a module and all its descendants, each with its parent."""
    yield node, above
    for child in node.children.values():
        yield from _walk(child, node)


def _title(node: ModuleNode, above: ModuleNode | None) -> str:
    """Return the name of a module, and its count within its parent."""
    count = above.count if above else 1
    return f"{node.name} × {node.count // count}" if node.count > count else node.name


def _note(plan: PlanContents, node: ModuleNode, above: ModuleNode | None) -> str:
    operators, sent = node.total(lambda node: node.operators), node.total(lambda node: node.collectives)
    listed = "".join(
        f"\n{name} {_shape(shape)}: {_placements(plan.mesh, placements)}"
        for name, (shape, placements) in list(node.parameters.items())[:6]
    )
    return (
        f"{_title(node, above)}\noperators {format_seconds(operators)}, collectives {format_seconds(sent)}\n"
        f"{node.total(_counter(plan)):,.0f} elements of parameters on one device{listed}"
    )


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _placements(mesh: MeshShape, placements: Sequence[str]) -> str:
    """Return `"dp R, tp S(0)"`."""
    return ", ".join(f"{axis} {text}" for axis, text in zip(mesh.names, placements, strict=True))


def _counter(plan: PlanContents) -> Callable[[ModuleNode], float]:
    """Return a function that counts the elements of a node's own parameters on one device, over all its modules."""
    return lambda node: node.count * sum(_share(plan, *parameter) for parameter in node.parameters.values())


def _share(plan: PlanContents, shape: Sequence[int], placements: Sequence[str]) -> float:
    """Return the number of a parameter's elements on one device, without padding."""
    parts = (size for size, text in zip(plan.mesh.sizes, placements, strict=True) if text.startswith("S"))
    return math.prod(shape) / math.prod(parts)


def collectives_chart(mesh: MeshShape, rows: Sequence[WorkRow], prefix: str = "") -> Chart:
    """Return a chart of the collectives of every module, by kind and axis; `rows` must not be empty."""
    totals: dict[str, float] = defaultdict(float)
    for row in rows:
        totals[row.module] += row.seconds
    listed = sorted(totals, key=lambda module: -totals[module])[:_MODULES]
    shown = [name or "(root)" for name in listed]
    if len(totals) > len(listed):
        shown.append(f"{len(totals) - len(listed)} others")
    place = dict(zip(listed, shown, strict=False))
    found: dict[tuple[str, str], list[WorkRow]] = defaultdict(list)
    for row in rows:
        found[row.labels[0], row.labels[1]].append(row)
    # In the order of the axes, so that those of one axis are adjacent.
    groups = sorted(found.items(), key=lambda item: mesh.index(item[0][1]))

    def view(label: str, axis: Axis, amount: Callable[[WorkRow], float]) -> Plot:
        series = (
            Series(
                f"{kind} over {over}",
                kind,
                "bars",
                tuple(map(amount, of_kind)),
                tuple(place.get(row.module, shown[-1]) for row in of_kind),
                notes=tuple(map(_row_note, of_kind)),
                pattern=mesh.index(over),
            )
            for (kind, over), of_kind in groups
        )
        return Plot(label, axis, Axis(categories=tuple(shown)), tuple(series), is_stacked=True)

    return Chart(
        f"{prefix}collectives-by-module",
        f"Collectives of {len(totals)} modules or layers of modules, by kind and axis",
        (
            view("Time", Axis("time before overlap", "seconds"), lambda row: row.seconds),
            view("Bytes", Axis("bytes that one device holds before them", "bytes"), lambda row: row.bytes),
        ),
        110 + 24 * len(shown),
        "Of all layers together. Patterns are mesh axes.",
    )


def _row_note(row: WorkRow) -> str:
    kind, axis, phase = row.labels
    return (
        f"{kind} over {axis}, {phase}\n{row.module or '(root)'}\n{row.count} of them, {format_bytes(row.bytes)}, "
        f"{format_seconds(row.seconds)}"
    )
