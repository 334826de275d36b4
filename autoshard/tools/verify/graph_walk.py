"""Walks through FX graphs, one call at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autoshard.size import plain

Call = Callable[[fx.Node, tuple[Any, ...], Mapping[str, Any]], Any]
"""Returns the result of a node, from the values of its arguments."""


def run_graph(module: fx.GraphModule, arguments: Sequence[Any], call: Call) -> Any:
    """Run a graph, and return the values of its output.

    Args:
        module: the graph.
        arguments: the value of every placeholder, in order.
        call: runs the operators. Dynamic sizes in their arguments are the numbers of the example.
    """
    values: dict[fx.Node, Any] = dict(zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True))
    last_user = {source: node for node in module.graph.nodes for source in node.all_input_nodes}

    def value(leaf: Any) -> Any:
        return values[leaf] if isinstance(leaf, fx.Node) else plain(leaf)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(module)
            continue
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), value)
        if node.op == "output":
            return args[0]
        values[node] = args[0][args[1]] if node.target is operator.getitem else call(node, args, kwargs)
        # A tensor is freed after its last use.
        for source in node.all_input_nodes:
            if last_user[source] is node:
                values.pop(source, None)
    raise AssertionError("a graph ends with its output")
