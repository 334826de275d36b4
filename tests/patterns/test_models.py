"""Every operator call in the joint graphs of the test models has a rule, and the rule is sound on its real operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

from autoshard.capture.joint import JointGraph, capture
from autoshard.patterns.registry import op_call, rule_for
from autoshard.patterns.rule import OpCall
from autoshard.patterns.soundness import check
from tests import models

VARIANTS: dict[str, tuple[Callable[..., models.Model], dict[str, Any]]] = {
    "mlp": (models.mlp, {}),
    "wide_resnet": (models.ZOO["wide_resnet"], {}),
    **{name: (models.ALL[name], {"layers": 1}) for name in ("gpt", "hf_gpt2", "hf_llama", "hf_bert", "hf_vit")},
    "gpt by chunk": (models.gpt, {"layers": 1, "split": "chunk", "dropout": 0.1}),
    "gpt by split": (models.gpt, {"layers": 1, "split": "split", "tied": True}),
    "masked hf_bert": (models.hf_bert, {"layers": 1, "task": "masked", "dropout": 0.1}),
}
OPERANDS = [name for name, (_, options) in VARIANTS.items() if options in ({}, {"layers": 1})]


@cache
def _captured(variant: str, grad: bool = True) -> tuple[JointGraph, nn.Module, dict[str, Any]]:
    make, options = VARIANTS[variant]
    module, inputs = make(dtype=torch.float64, **options)
    return capture(module, (), inputs, grad=grad), module, inputs


def _has_rules(graph: JointGraph) -> None:
    for node in graph.graph_module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            assert rule_for(op_call(node)) is not None, node.format_node()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_operator_of_a_training_step_has_a_rule(variant: str) -> None:
    _has_rules(_captured(variant)[0])


@pytest.mark.parametrize("variant", ["gpt", "hf_bert", "wide_resnet"])
def test_every_operator_of_inference_has_a_rule(variant: str) -> None:
    _has_rules(_captured(variant, grad=False)[0])


class _Checking(fx.Interpreter):
    """Checks every call that it has not seen, in this model or another, on the operands that it meets."""

    sound: ClassVar[set[OpCall]] = set()

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: set[OpCall] = set()
        self.findings: list[str] = []

    def run_node(self, node: fx.Node) -> Any:
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in node.target.tags:
            call = op_call(node)
            if call not in self.seen and call not in self.sound:
                found = check(node.target, *self.fetch_args_kwargs_from_env(node), sizes=(2,))
                self.findings += map(str, found)
                if not found:
                    self.sound.add(call)
            self.seen.add(call)
        return super().run_node(node)


def _values(graph: JointGraph, module: nn.Module, inputs: dict[str, Any]) -> Iterator[torch.Tensor | None]:
    leaves = iter(graph.call.flatten((), inputs))
    for source in graph.inputs:
        if source.kind == "parameter":
            yield module.get_parameter(source.name).detach()
        elif source.kind == "buffer":
            yield module.get_buffer(source.name)
        elif source.kind == "tangent":
            tangent = source.node.meta["val"]
            yield torch.ones(tangent.shape, dtype=tangent.dtype)
        else:
            yield next(leaves) if source.kind == "input" else source.value


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERANDS)
def test_every_rule_is_sound_on_the_operands_of_the_model(name: str) -> None:
    graph, module, inputs = _captured(name)
    checking = _Checking(graph.graph_module)
    checking.run(*_values(graph, module, inputs))
    assert checking.seen
    assert checking.findings == []
