"""`autoshard.doctor` and its report."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch import Tensor, nn

import autoshard
from autoshard.capture.joint import capture
from autoshard.tools.doctor.doctor import CaptureProblem, DoctorReport, Operator
from tests import models
from tests.notebooks import check_repr, shown
from tests.releases import skip_without


@torch.library.custom_op("autoshard_tests::strange", mutates_args=())
def strange(x: Tensor) -> Tensor:
    """An operator that no rule is for."""
    return x.exp()


@strange.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


strange.register_autograd(lambda ctx, gradient: gradient)


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return strange(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else -y


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Inverting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.lu_factor(x.mT @ x)[0]


X = torch.randn(8, 16)


def test_a_model_that_is_well() -> None:
    module, inputs = models.gpt(layers=1)
    report = autoshard.doctor(module, (), inputs)
    assert report.captured
    assert report.healthy
    assert (report.problems, report.notes, report.replicated, report.parts) == ((), (), (), ("",))
    assert report.replicated_share == 0
    linear = next(one for one in report.operators if one.name == "aten.mm.default")
    captured = capture(module, (), inputs).graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert (linear.source, linear.count) == ("rule", len(captured))
    assert "layers.0.attention.qkv" in linear.modules
    assert 0 < linear.seconds < report.step_seconds
    assert "captured as one graph" in str(report)
    assert "What stops" not in str(report)


def test_evaluation_without_gradients_has_no_backward() -> None:
    module, inputs = models.mlp()
    training = autoshard.doctor(module, (), inputs)
    with torch.no_grad():
        inference = autoshard.doctor(module, (), inputs)
    assert inference.step_seconds < training.step_seconds


def test_an_operator_without_a_rule_is_priced_and_placed() -> None:
    module = nn.Sequential(nn.Linear(16, 16), Strange(), Strange(), nn.Linear(16, 16))
    report = autoshard.doctor(module, (X,), cluster="cpu")
    assert report.captured
    assert not report.healthy
    (operator,) = report.replicated
    assert operator == report.operators[0]
    assert (operator.name, operator.count) == ("autoshard_tests.strange.default", 2)
    assert operator.modules == ("1", "2")
    assert report.replicated_seconds == operator.seconds > 0
    assert report.replicated_share == pytest.approx(operator.seconds / report.step_seconds)
    text = " ".join(str(report).split())
    assert "autoshard_tests.strange.default replicated * 2" in text
    assert f"{100 * report.replicated_share:.2g} %" in text


def test_several_lines_are_named_at_once_and_the_rest_is_examined() -> None:
    module = nn.Sequential(nn.Linear(16, 16), Branching(), nn.Sequential(Strange(), nn.Tanh()), Selecting())
    report = autoshard.doctor(module, (X,))
    assert not report.captured
    assert [problem.module for problem in report.problems] == ["1", "3"]
    branch, select = report.problems
    assert "test_doctor.py:" in branch.where
    assert "(return y if y.sum() > 0 else -y)" in branch.where
    assert "torch.where" in branch.advice
    assert "(return x[x > 0])" in select.where
    assert set(report.parts) == {"0", "1.linear", "2"}
    assert [one.modules for one in report.replicated] == [("2.0",)]
    text = str(report)
    assert "What stops the capture (2)" in text
    assert branch.where in text.replace("\n    ", "")


def test_effects_are_found_in_the_part_that_has_them() -> None:
    skip_without("effects of operators in graphs")
    report = autoshard.doctor(nn.Sequential(nn.Linear(16, 16), Branching(), Inverting()), (X,))
    assert [problem.module for problem in report.problems] == ["1", "2"]
    assert "inv_ex" in report.problems[1].what


def test_parameters_without_shape_and_on_several_devices() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4, device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that lazy modules are new
        report = autoshard.doctor(module, (X,))
    message = [problem.what for problem in report.problems]
    assert len(message) == 3
    assert "0.weight has no shape yet" in message[0]
    assert "0.weight on cpu, 1.weight on meta" in message[2]


def test_parts_on_several_devices_are_examined_on_their_own() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, device="meta"), Branching())
    report = autoshard.doctor(module, (X,))
    assert [problem.module for problem in report.problems] == ["", "2"]
    assert set(report.parts) == {"0", "1", "2.linear"}


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    module[1].stream = (number for number in range(3))
    (problem,) = autoshard.doctor(module, (X,)).problems
    assert problem.module == "1"
    assert "attribute stream (generator) cannot be copied" in problem.what


def test_an_input_that_no_graph_takes_is_named_by_its_path() -> None:
    module, inputs = models.hf_qwen3()
    report = autoshard.doctor(module, (), {**inputs, "past_key_values": transformers.DynamicCache()})
    (problem,) = report.problems
    assert "example_kwargs['past_key_values'] is a DynamicCache" in problem.what
    assert "model.layers.0.mlp" in report.parts


def test_what_is_left_out_is_a_note() -> None:
    module, inputs = models.hf_qwen3()
    module.config.use_cache = True
    report = autoshard.doctor(module, (), inputs)
    assert report.captured
    (note,) = report.notes
    assert "past_key_values (DynamicCache)" in note
    assert "What will differ" in str(report)


def test_a_wrong_call_is_a_problem() -> None:
    (problem,) = autoshard.doctor(nn.Linear(4, 4), (X,)).problems
    assert "[8, 16] X [4, 4]" in problem.what


def test_the_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.BatchNorm1d(16), Branching())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    autoshard.doctor(module, (X,))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert "forward" not in vars(module)


@pytest.mark.parametrize(("module", "args"), [("model", ()), (nn.Linear(4, 4), X)])
def test_wrong_arguments_of_doctor_itself(module: object, args: object) -> None:
    with pytest.raises(autoshard.InputError):
        autoshard.doctor(module, args)


def test_long_lists_are_cut_in_the_text_alone() -> None:
    operators = tuple(Operator(f"aten.op{index}.default", "rule", 1, ("m",), 1e-6) for index in range(50))
    report = DoctorReport(
        "Model", "h100", (CaptureProblem("a.b", "", "is wrong", "Mend it."),), (), operators, ("a.c", "a.d")
    )
    text = str(report)
    assert "aten.op19.default" in text
    assert "aten.op20.default" not in text
    assert "30 more with a rule" in text
    assert "a.b: is wrong\n    Mend it." in text
    assert "on their own, a.c, a.d were" in text


def test_a_notebook_and_a_prompt_show_a_report() -> None:
    problem = CaptureProblem("a.b", "model.py:3", "x < y is wrong", "Mend it.")
    operators = (Operator("aten.op.default", "replicated", 2, ("m",), 1e-6, "Write a rule."),)
    report = DoctorReport("Model", "h100", (problem,), ("a & b",), operators, ("a.c",))
    page = shown(report)
    assert page.rows[1] == ["aten.op.default", "replicated", "m", "2", "1 µs"]
    assert "a.b: x < y is wrong\n    at model.py:3\n    Mend it." in page.text
    assert repr(report) == "DoctorReport(Model: operators 1, replicated 1, problems 1; print it to see more)"
    check_repr(report)


def test_nothing_captured_at_all() -> None:
    report = DoctorReport("Model", "h100", (CaptureProblem("", "", "is wrong"),), (), (), ())
    assert "not captured, nor any part of it" in str(report)
    assert report.replicated_share == 0


class Asking(nn.Module):
    """Goes another way on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (3.0 if x.is_cuda else 2.0)


def test_says_where_code_asks_for_a_gpu() -> None:
    (note,) = autoshard.doctor(Asking(), (torch.ones(3, 4),)).notes
    assert "test_doctor.py" in note
    assert "whether a tensor is on a GPU" in note
