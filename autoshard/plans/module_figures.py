"""The charts of a model's modules: the tree of them with placements and costs, and their collectives."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.names import group_names, index_of
from autoshard.plans.expenses import COMPUTE, Expenses
from autoshard.plans.html import Figure, View
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_text import WorkRow, collective_rows
from autoshard.specs.spec import placement_text
from autoshard.units import byte_unit, format_bytes, format_seconds, second_unit

_MODULES = 24  # modules of the chart of collectives: about a screen
_HATCHES = ("", "/", "x", ".", "-")  # of the mesh axes
_PALETTE = 7  # colours of placements; further ones begin again
_READABLE = {"mode": "hide", "minsize": 10}  # smaller texts are left out


@dataclass(eq=False)
class ModuleNode:
    """A module, or layers that are alike, in the tree of a model.

    Attributes:
        name: the last part of its path; of layers that are alike, their indices.
        count: modules that it stands for.
        operators: predicted seconds of its own operators, of all modules that it stands for.
        collectives: predicted seconds of its own collectives, likewise.
        parameters: own parameters and buffers: name -> shape and placements.
        children: by name.
    """

    name: str
    count: int = 1
    operators: float = 0.0
    collectives: float = 0.0
    parameters: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = field(default_factory=dict)
    children: dict[str, ModuleNode] = field(default_factory=dict)

    def child(self, path: str) -> ModuleNode:
        """Return the module at a path below this one, which is made if it is not there."""
        node = self
        for name in filter(None, path.split(".")):
            node = node.children.setdefault(name, ModuleNode(name))
        return node

    def total(self, amount: Callable[[ModuleNode], float]) -> float:
        """Return the sum of an amount over this module and all below it."""
        return amount(self) + sum(child.total(amount) for child in self.children.values())

    @property
    def form(self) -> Hashable:
        """Equal for modules whose parameters, placements and children are alike."""
        children = tuple((child.name, child.count, child.form) for child in self.children.values())
        return tuple(self.parameters.items()), children


def module_tree(plan: PlanContents) -> ModuleNode:
    """Return the modules of a plan, with layers that are alike as one node."""
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
    """Return a tree in which children of a module that have numbers as names, and are alike, are one."""
    children = {name: _merge_alike(child) for name, child in node.children.items()}
    # A child that only held another one has the other's name behind its own.
    indexed = {name: (child.name.removeprefix(name), child.form) for name, child in children.items() if index_of(name)}
    groups = {name: group for group in group_names(indexed) for name in group.names}
    merged: dict[str, ModuleNode] = {}
    for name, child in children.items():
        kept = child
        if name in groups and len(groups[name].names) > 1:
            if groups[name].names[0] != name:
                continue
            # The group's text has braces for a glob, which a picture can do without.
            text = re.sub(r"[{}]", "", groups[name].text) + child.name.removeprefix(name)
            kept = _sum([children[member] for member in groups[name].names], text)
        merged[kept.name] = kept
    is_link = len(merged) == 1 and not (node.operators or node.collectives or node.parameters)
    if is_link and node.name:
        # A module that only holds another one, such as a list of layers, is a box that says nothing.
        (only,) = merged.values()
        return replace(only, name=f"{node.name}.{only.name}")
    return replace(node, children=merged)


def _sum(nodes: Sequence[ModuleNode], name: str) -> ModuleNode:
    """Return modules that are alike as one node."""
    first = nodes[0]
    return ModuleNode(
        name,
        sum(node.count for node in nodes),
        sum(node.operators for node in nodes),
        sum(node.collectives for node in nodes),
        first.parameters,
        {key: _sum([node.children[key] for node in nodes], key) for key in first.children},
    )


def modules_figure(plan: PlanContents, prefix: str = "") -> Iterator[Figure]:
    """Yield the tree of modules, sized by the time of operators, of collectives, and by parameters on one device."""
    tree, unit = module_tree(plan), plan.mesh
    seconds = tree.total(lambda node: node.operators), tree.total(lambda node: node.collectives)
    elements = tree.total(lambda node: _elements(plan, node))
    views = []
    if seconds[0]:
        views.append(_time_view(plan, tree, "Operators", lambda node: node.operators))
    if seconds[1]:
        views.append(_time_view(plan, tree, "Collectives", lambda node: node.collectives))
    if elements:
        views.append(_parameter_view(plan, tree))
    if views:
        yield Figure(
            f"{prefix}modules",
            f"Tree of modules: operators take {format_seconds(seconds[0])}, collectives {format_seconds(seconds[1])}, "
            f"and one of {unit.size} devices holds {elements:,.0f} elements of parameters and buffers",
            tuple(views),
            # Room for the text of a box, as far as a screen has it.
            min(620, 200 + 24 * sum(1 for _ in _walk(plan, tree))),
            "Layers that are alike are one box. Select a box, or press the arrow keys, to look into it.",
        )


def _time_view(plan: PlanContents, tree: ModuleNode, label: str, amount: Callable[[ModuleNode], float]) -> View:
    """Return the tree sized by an amount of seconds, with the share of collectives as colour."""
    boxes: list[_Box] = []
    values: list[float] = []
    shares: list[float] = []
    texts: list[str] = []

    def add(box: _Box, value: float, total: float, operators: float, sent: float) -> None:
        boxes.append(box)
        values.append(value / second)
        shares.append(sent / (operators + sent))
        texts.append(f"{format_seconds(total)}  {box.placements}")

    second = second_unit(tree.total(amount))[1]
    remainders = []
    for box in _walk(plan, tree):
        if box.node is None or not box.node.total(amount):
            continue
        node, own = box.node, amount(box.node)
        inner = any(child.total(amount) for child in node.children.values())
        sums = node.total(lambda node: node.operators), node.total(lambda node: node.collectives)
        add(box, 0.0 if inner else own, node.total(amount), *sums)
        if inner and own:
            itself = replace(box, path=f"{box.path}/ ", parent=box.path, label="itself", placements="")
            remainders.append((itself, own, own, node.operators, node.collectives))
    # Behind the modules within: boxes of one parent are drawn, and entered, in this order.
    for remainder in remainders:
        add(*remainder)
    trace = _tree_trace(boxes, values) | {"text": texts}
    trace["marker"] = {
        "colors": shares,
        "colorscale": [[0, "var(--share-0)"], [0.5, "var(--share-1)"], [1, "var(--share-2)"]],
        "cmin": 0,
        "cmax": 1,
        "showscale": True,
        "colorbar": {
            "title": {"text": "collectives' share of seconds", "side": "right"},
            "tickformat": ".0%",
            "thickness": 12,
            "outlinewidth": 0,
        },
        "line": {"color": "var(--surface)", "width": 1.5},
    }
    return View(label, [trace], {"margin": {"l": 0, "r": 0, "t": 30, "b": 0}, "uniformtext": _READABLE})


def _parameter_view(plan: PlanContents, tree: ModuleNode) -> View:
    """Return the tree sized by elements on one device, with a colour for every combination of placements."""
    boxes = [box for box in _walk(plan, tree) if box.elements or (box.node and box.node.total(_counter(plan)))]
    whole = _placements(plan, ["R"] * plan.mesh.ndim)
    names = [name for name in dict.fromkeys(box.placements for box in boxes if box.node is None) if name != whole]
    # Grey for what every device holds.
    colours = {whole: "var(--placement-0)"} if any(box.placements == whole for box in boxes) else {}
    colours |= {name: f"var(--placement-{1 + index % _PALETTE})" for index, name in enumerate(names)}
    trace = _tree_trace(boxes, [box.elements for box in boxes])
    trace["text"] = [box.placements if box.node is None else "" for box in boxes]
    trace["marker"] = {
        "colors": [colours[box.placements] if box.node is None else "var(--soft)" for box in boxes],
        "line": {"color": "var(--surface)", "width": 1.5},
    }
    # A legend of colours: traces without points.
    legend = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [None],
            "y": [None],
            "name": name,
            "marker": {"color": colour, "symbol": "square", "size": 11},
        }
        for name, colour in colours.items()
    ]
    hidden = {"visible": False, "fixedrange": True}
    layout = {
        "margin": {"l": 0, "r": 0, "t": 30, "b": 30},
        "legend": {"y": 0, "yanchor": "top", "itemclick": False, "itemdoubleclick": False},
        "showlegend": True,
        "uniformtext": _READABLE,
        "xaxis": hidden,
        "yaxis": hidden,
    }
    return View("Parameters", [trace, *legend], layout)


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of the tree: a module, or a parameter, which has no node.

    Attributes:
        path: of its ancestors and itself, as the identity of the box.
        parent: the path of its parent; empty for the root.
        label: written in it.
        placements: of the parameter, or of the parameters that the module has itself.
        elements: of the parameter on one device, over all modules that it stands for; 0 for modules.
        hover: shown of it when it is pointed at.
    """

    path: str
    parent: str
    label: str
    node: ModuleNode | None
    placements: str
    elements: float
    hover: str


def _walk(plan: PlanContents, node: ModuleNode, parent: _Box | None = None) -> Iterator[_Box]:
    """Yield the boxes of a module and all below it."""
    path = f"{parent.path}/{node.name}" if parent else node.name
    above = parent.node.count if parent and parent.node else 1
    times = f" × {node.count // above}" if node.count > above else ""
    operators, sent = node.total(lambda node: node.operators), node.total(lambda node: node.collectives)
    parameters = [(name, shape, _placements(plan, placements)) for name, (shape, placements) in node.parameters.items()]
    listed = "".join(f"<br>{name} {_shape(shape)}: {text}" for name, shape, text in parameters[:6])
    hover = (
        f"<b>{node.name}</b>{times}<br>operators {format_seconds(operators)}, collectives {format_seconds(sent)}"
        f"<br>{node.total(_counter(plan)):,.0f} elements of parameters on one device{listed}"
    )
    own = ", ".join(dict.fromkeys(text for *_, text in parameters))
    box = _Box(path, parent.path if parent else "", f"{node.name}{times}", node, own, 0.0, hover)
    yield box
    for name, shape, text in parameters:
        elements = _share(plan, shape, node.parameters[name][1]) * node.count
        hover = f"<b>{name}</b> {_shape(shape)}<br>{text}<br>{elements:,.0f} elements on one device"
        yield _Box(f"{path}/{name} ", path, name, None, text, elements, hover)
    for child in node.children.values():
        yield from _walk(plan, child, box)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _placements(plan: PlanContents, placements: Sequence[str]) -> str:
    """Return `"dp R, tp S(0)"`."""
    return ", ".join(f"{axis} {text}" for axis, text in zip(plan.mesh.names, placements, strict=True))


def _counter(plan: PlanContents) -> Callable[[ModuleNode], float]:
    return lambda node: _elements(plan, node)


def _elements(plan: PlanContents, node: ModuleNode) -> float:
    """Return the elements of a node's own parameters on one device, of all modules that it stands for."""
    return node.count * sum(_share(plan, *parameter) for parameter in node.parameters.values())


def _share(plan: PlanContents, shape: Sequence[int], placements: Sequence[str]) -> float:
    """Return the elements of a parameter that one device holds, without padding."""
    parts = (size for size, text in zip(plan.mesh.sizes, placements, strict=True) if text.startswith("S"))
    return math.prod(shape) / math.prod(parts)


def _tree_trace(boxes: Sequence[_Box], values: Sequence[float]) -> dict[str, Any]:
    # "remainder": the values are those of the boxes themselves. The totals of children may be above those of their
    # parent by rounding, for which plotly.js would draw nothing.
    return {
        "type": "icicle",
        "ids": [box.path for box in boxes],
        "labels": [box.label for box in boxes],
        "parents": [box.parent for box in boxes],
        "values": list(values),
        "branchvalues": "remainder",
        "customdata": [box.hover for box in boxes],
        "hovertemplate": "%{customdata}<extra></extra>",
        "texttemplate": "<b>%{label}</b><br>%{text}",
        "tiling": {"orientation": "h"},
        "leaf": {"opacity": 1},
        "pathbar": {"visible": True, "thickness": 24},
        "sort": False,
    }


def collectives_figure(plan: PlanContents, prefix: str = "") -> Iterator[Figure]:
    """Yield the chart of the collectives of every module, by kind and axis; none without collectives."""
    rows = collective_rows(plan.collectives)
    if not rows:
        return
    totals: dict[str, float] = defaultdict(float)
    for row in rows:
        totals[row.module] += row.seconds
    names = sorted(totals, key=lambda module: -totals[module])[:_MODULES]
    shown = [name or "(root)" for name in names]
    if len(totals) > len(names):
        shown.append(f"{len(totals) - len(names)} others")
    place = dict(zip(names, shown, strict=False))
    seconds, bytes = second_unit(max(totals.values())), byte_unit(max(row.bytes for row in rows))
    axes = {
        "Time": (f"time before overlap [{seconds[0]}]", lambda row: row.seconds / seconds[1]),
        "Bytes": (f"bytes that one device holds before them [{bytes[0]}]", lambda row: row.bytes / bytes[1]),
    }
    views = []
    for label, (title, amount) in axes.items():
        data = list(_collective_bars(plan, rows, lambda row: place.get(row.module, shown[-1]), amount))
        layout = {
            "barmode": "stack",
            "margin": {"l": 20, "r": 20, "t": 40, "b": 44},
            "xaxis": {"title": {"text": title}, "fixedrange": True},
            "yaxis": {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": shown,
                "autorange": "reversed",
                "automargin": True,
                "fixedrange": True,
                "showgrid": False,
            },
        }
        views.append(View(label, data, layout))
    yield Figure(
        f"{prefix}collectives-by-module",
        f"Collectives of {len(totals)} modules or layers of modules, by kind and axis",
        tuple(views),
        110 + 24 * len(shown),
        "Of all layers together. Patterns are mesh axes.",
    )


def _collective_bars(
    plan: PlanContents, rows: Iterable[WorkRow], place: Callable[[WorkRow], str], amount: Callable[[WorkRow], float]
) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str], list[WorkRow]] = defaultdict(list)
    for row in rows:
        found[row.labels[0], row.labels[1]].append(row)
    # In the order of the axes, so that those of one axis lie side by side.
    for (kind, axis), of_kind in sorted(found.items(), key=lambda item: plan.mesh.index(item[0][1])):
        number = plan.mesh.index(axis)
        yield {
            "type": "bar",
            "orientation": "h",
            "name": f"{kind} over {axis}",
            "y": [place(row) for row in of_kind],
            "x": [amount(row) for row in of_kind],
            "customdata": [
                f"<b>{kind}</b> over {axis}, {row.labels[2]}<br>{row.module or '(root)'}<br>{row.count} of them, "
                f"{format_bytes(row.bytes)}, {format_seconds(row.seconds)}"
                for row in of_kind
            ],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {
                "color": f"var(--{kind})",
                "line": {"width": 0.5, "color": "var(--surface)"},
                "pattern": {
                    "shape": _HATCHES[number % len(_HATCHES)],
                    "size": 6,
                    "solidity": 0.2,
                    "fillmode": "overlay",
                    "fgcolor": "var(--surface)",
                },
            },
        }
