"""The graphs that are captured to plan a pipeline, each once; and reuse between stages that are equal but for names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import operators as operators  # what captures put into graphs
from autoshard.capture._torch import pytree
from autoshard.capture.capture_errors import node_line
from autoshard.capture.export import named_tensors
from autoshard.capture.joint import capture
from autoshard.capture.joint_graph import JointGraph, fingerprint
from autoshard.capture.marks import Region, marked_regions, marks_by_order
from autoshard.capture.recomputation import copy_graph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import PlanError
from autoshard.options.target import Target
from autoshard.patterns.decisions import Decisions
from autoshard.pipeline.graph.forward_export import ExportedModule, export_forward, read_stage_graph
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.pipeline.graph.stage_modules import StageModule
from autoshard.planner import hints as hint_rules
from autoshard.planner.regions import mark_regions, with_regions
from autoshard.size import is_dynamic
from autoshard.specs.axes import MeshShape


def structural_text(stage: StageModule) -> str:
    """Return a text of everything but names that a capture of a stage depends on: equal texts mean equal captures.

    It has the operators with their arguments, parameters by their place, sizes, marks, and the tensors of the module in
    their order. Names of the model's inputs are in it, since they are keywords of a call.
    """
    module = stage.module
    names = named_tensors(module)
    place = {name: f"#{number}" for number, name in enumerate(names.fakes)}
    lines = [f"{module.training} {sorted(keyword for keyword, _ in stage.inputs.values())}"]
    lines += [f"{type(fake).__name__} {_sizes(fake)} {len(names.aliases[name])}" for name, fake in names.fakes.items()]
    number = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    places: dict[Region, int] = {}
    for node in module.graph.nodes:
        called = node.target if node.op == "call_function" else ""
        if node.op == "get_attr":
            target = str(node.target)
            if target in names.first:
                called = place[names.first[target]]
            else:
                # A graph within the graph, which has no parameters, is its text.
                region = module.get_submodule(target)
                called = str(region.graph) if isinstance(region, fx.GraphModule) else target
        arguments = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        leaves = pytree.tree_leaves((node.args, node.kwargs, node.meta.get("sizes")))
        dynamic = [leaf.expr for leaf in leaves if is_dynamic(leaf)]
        marks = marks_by_order(node, places)
        lines.append(f"{node.op} {called} {arguments} {_sizes(node.meta.get('val'))} {dynamic} {marks}")
    return "\n".join(lines)


def _sizes(value: object) -> list[tuple[object, ...]]:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad) for tensor in tensors]


def has_same_names(first: StageModule, second: StageModule) -> bool:
    """Return True if two stages of one text have the same names, and their nodes the same modules."""
    nodes = zip(first.module.graph.nodes, second.module.graph.nodes, strict=True)
    return list(first.module.state_dict()) == list(second.module.state_dict()) and all(
        (node.name, _module_path(node)) == (like.name, _module_path(like)) for node, like in nodes
    )


def rename_capture(graph: JointGraph, source: StageModule, target: StageModule) -> JointGraph | None:
    """Rename the captured step of one stage to that of another.

    Args:
        graph: the captured step of `source`.
        source: the captured stage.
        target: the other stage, with the same `structural_text`.

    Returns:
        The capture of the other stage: the same nodes, with its names and modules. None if modules do not correspond
        one to one.
    """
    paths = _module_paths(source, target)
    if paths is None:
        return None
    names = dict(zip(named_tensors(source.module).fakes, named_tensors(target.module).fakes, strict=True))
    # Received tensors come first among the arguments; the model's inputs behind them have equal names.
    arguments = [leaf for leaf in graph.call.leaves if isinstance(leaf, str)]
    names.update(zip(arguments, (value.name for value in target.received), strict=False))
    copy, _ = copy_graph(graph)
    for node in copy.graph.nodes:
        path = node.meta.get("module_path", "")
        if path not in paths:
            return None
        node.meta["module_path"] = paths[path]
    inputs = tuple(replace(item, name=names.get(item.name, item.name)) for item in copy.inputs)
    outputs = tuple(replace(item, name=names.get(item.name, item.name)) for item in copy.outputs)
    dynamic = graph.dynamic
    if dynamic is not None:
        dynamic = replace(dynamic, dims={names.get(name, name): dims for name, dims in dynamic.dims.items()})
    leaves = tuple(names.get(leaf, leaf) if isinstance(leaf, str) else leaf for leaf in graph.call.leaves)
    return replace(
        copy,
        inputs=inputs,
        outputs=outputs,
        aliases=dict(named_tensors(target.module).aliases),
        call=replace(graph.call, leaves=leaves),
        dynamic=dynamic,
        fingerprint=fingerprint(inputs, outputs, copy.graph),
    )


def _module_paths(source: StageModule, target: StageModule) -> dict[str, str] | None:
    """Return the path of every module of a stage, with that in the other; None where one would have two."""
    paths = {"": ""}
    for node, like in zip(source.module.graph.nodes, target.module.graph.nodes, strict=True):
        if paths.setdefault(_module_path(node), _module_path(like)) != _module_path(like):
            return None
    return paths


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def structural_fingerprint(graph: JointGraph) -> str:
    """Return a hash that is equal for graphs which differ only in the names of parameters, buffers and inputs."""
    # Names of inputs become their places: what is tied stays tied.
    number = {item.name: str(place) for place, item in enumerate(graph.inputs)}
    inputs = [replace(item, name=number[item.name]) for item in graph.inputs]
    outputs = [replace(item, name=number.get(item.name, item.name), tangent=None) for item in graph.outputs]
    return fingerprint(inputs, outputs, graph.graph)


def task_graph_marks(graph: JointGraph) -> tuple[tuple[str, int] | None, ...]:
    """Return the primitive of every operator, and the number of its task graph in the order in which they occur."""
    task_graphs = [graph.task_graph(node) for node in graph.graph.nodes]
    number = {task_graph: place for place, task_graph in enumerate(dict.fromkeys(task_graphs))}
    return tuple(None if mark is None else (", ".join(map(str, mark.primitives)), number[mark]) for mark in task_graphs)


def rename_decisions(decisions: Decisions, source: JointGraph, target: JointGraph) -> Decisions:
    """Rename the decisions for one graph to those for another of the same `structural_fingerprint`."""
    # Equal fingerprints: the nodes of both are equal one by one.
    nodes = {node.name: like.name for node, like in zip(source.graph.nodes, target.graph.nodes, strict=True)}
    outputs = {output.name: like.name for output, like in zip(source.outputs, target.outputs, strict=True)}
    return Decisions(
        choices={nodes[name]: choices for name, choices in decisions.choices.items()},
        rest={nodes[name]: spec for name, spec in decisions.rest.items()},
        outputs={outputs[name]: spec for name, spec in decisions.outputs.items()},
        hubs={_rename_hub(key, nodes): spec for key, spec in decisions.hubs.items()},
    )


def _rename_hub(key: str, nodes: Mapping[str, str]) -> str:
    # A hub's key is "node@phase" or, for one of several results, "node:index@phase".
    value, at, phase = key.partition("@")
    node, colon, index = value.partition(":")
    return f"{nodes[node]}{colon}{index}{at}{phase}"


class StageCaptures:
    """The captured steps of stages of one model; of stages that are equal but for names, one is captured.

    Args:
        mp_policy: the precisions of the stages.
    """

    def __init__(self, mp_policy: MixedPrecisionPolicy | None = None) -> None:
        self._mp_policy = mp_policy
        self._captured: dict[tuple[str, bool], list[tuple[StageModule, JointGraph]]] = {}
        self._steps: dict[JointGraph, JointGraph] = {}  # with what regions say, by the captured steps

    def joint_graph(self, stage: StageModule, dynamic: bool = False) -> JointGraph:
        """Return the step of a stage with one microbatch, with the stage's dynamic sizes if `dynamic`.

        What hints and the model's code say is run again or kept is in the graph.
        """
        captured = self._capture(stage, dynamic)
        if captured not in self._steps:
            self._steps[captured] = with_regions(captured, None, ())
        return self._steps[captured]

    def _capture(self, stage: StageModule, dynamic: bool) -> JointGraph:
        known = self._captured.setdefault((structural_text(stage), dynamic), [])
        # The same stage, of a shape that was planned before: its graph needs no copy.
        for like, graph in known:
            if has_same_names(like, stage):
                return graph
        captured = rename_capture(known[0][1], known[0][0], stage) if known else None
        if captured is None:
            sizes = stage.dynamic if dynamic else None
            captured = capture(stage.module, *stage.example, dynamic=sizes, mp_policy=self._mp_policy)
        known.append((stage, captured))
        return captured


def export_microbatch(
    call: BatchCall, number: int, target: Target, *, dynamic: bool, grad: bool = True
) -> ExportedModule:
    """Export the forward graph of one of `number` microbatches of a call.

    Args:
        call: of the whole model.
        number: of microbatches.
        target: as the user gave it.
        dynamic: True if the number of samples in a microbatch is a dynamic size.
        grad: True if gradients will be wanted.

    Raises:
        InputError: the batch does not divide.
        HintError: a hint of task graphs or regions is not valid.
        PlanError: the model's code moves tensors to the host.
        CaptureError: as for `export_forward`.
    """
    part = call.split(number)[0]
    # Hints name modules of the whole model: stages have no modules.
    modules = [name for name, _ in part.module.named_modules()]
    exported = export_forward(
        part.module,
        part.args,
        part.kwargs,
        grad=grad,
        task_graphs=hint_rules.task_graphs(target.hints, modules),
        mp_policy=target.options.mp_policy,
        dynamic=part.dynamic_sizes if dynamic else None,
    )
    mark_regions(exported.graph, target.hints, modules)
    for node in exported.graph.nodes:
        for region in marked_regions(node):
            if region.kind == "offload":
                raise PlanError(
                    f"a pipeline can not have {region.origin} around {node_line(node)}: its stages keep their tensors "
                    "on the device. Leave it out, or use a mesh without a pipeline axis."
                )
    return exported


class PipelineCaptures:
    """The forward graphs of one call, for all meshes, and the captured steps of the stages that they are cut into.

    Args:
        call: the call that is planned.
        target: as the user gave it.
        dynamic: True if the number of samples in a microbatch is a dynamic size of the graphs.

    Attributes:
        call: as given.
        stage_captures: the captured steps.
    """

    def __init__(self, call: BatchCall, target: Target, dynamic: bool = False) -> None:
        self.call = call
        self._dynamic = dynamic
        self.stage_captures = StageCaptures(target.options.mp_policy)
        self._target = target
        self._exported: dict[int, ExportedModule] = {}
        self._graphs: dict[tuple[int, Cluster], StageGraph] = {}
        self._with_dynamic_batch: PipelineCaptures | None = None

    @property
    def with_dynamic_batch(self) -> PipelineCaptures:
        """The captures of the same call with dynamic samples of a microbatch, which ranks can take shares of."""
        if self._with_dynamic_batch is None:
            self._with_dynamic_batch = PipelineCaptures(self.call, self._target, dynamic=True)
        return self._with_dynamic_batch

    def export(self, number: int) -> ExportedModule:
        """Return the forward graph of one of `number` microbatches."""
        if number not in self._exported:
            grad = torch.is_grad_enabled()
            self._exported[number] = export_microbatch(
                self.call, number, self._target, dynamic=self._dynamic, grad=grad
            )
        return self._exported[number]

    def stage_graph(self, number: int, cluster: Cluster) -> StageGraph:
        """Return the graph to assign to stages, by the prices of a cluster of equal devices."""
        key = number, cluster
        if key not in self._graphs:
            cost = CostModel(cluster, MeshShape.of({"device": 1}))
            self._graphs[key] = read_stage_graph(self.export(number), cost, optimizer=self._target.settings.optimizer)
        return self._graphs[key]

    def nearest_number(self, number: int) -> int:
        """Return the number of microbatches nearest to `number` whose graph has been exported."""
        # By `log`: half and twice as many are equally far.
        return min(self._exported, key=lambda known: (abs(math.log(known / number)), known))
