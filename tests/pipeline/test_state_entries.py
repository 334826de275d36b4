"""Parameters and buffers of stages under the model's names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.errors import PipelineError
from autoshard.pipeline.run.state_entries import register_stage_state, relink_entries, state_entries


def stage(*names: str) -> nn.Module:
    """A module that holds a parameter under each of the names, and beside each a buffer that no state dict has."""
    module = nn.Module()
    for name in names:
        *path, key = name.split(".")
        owner = module
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(key, nn.Parameter(torch.randn(2)))
        owner.register_buffer(f"{key}_buffer", torch.zeros(1), persistent=False)
    return module


def test_stages_become_one_module() -> None:
    """One submodule is parted: its weight is on the one, its bias on the other."""
    stages = [stage("layers.0.weight", "scale"), stage("layers.0.bias", "layers.1.weight")]
    whole = nn.Module()
    register_stage_state(whole, stages, constants={"scale_buffer"})
    names = ["layers.0.weight", "scale", "layers.0.bias", "layers.1.weight"]
    assert set(whole.state_dict()) == set(names)
    assert {name for name, _ in whole.named_buffers()} == {f"{name}_buffer" for name in names if name != "scale"}
    for one in stages:
        for name, parameter in one.named_parameters():
            assert whole.get_parameter(name) is parameter


def test_what_is_replaced_in_the_whole_is_replaced_in_its_stage() -> None:
    one = stage("layers.0.weight", "scale")
    whole = nn.Module()
    register_stage_state(whole, [one], constants=())
    found = state_entries(one, whole, constants=())
    whole.load_state_dict({"layers.0.weight": torch.ones(2), "scale": torch.ones(2)}, assign=True)
    relink_entries(found)
    for name in ("layers.0.weight", "scale"):
        assert one.get_parameter(name) is whole.get_parameter(name)


def test_names_that_are_taken() -> None:
    class Standing(nn.Module):
        def train_step(self) -> None: ...

    with pytest.raises(PipelineError, match="the model has something called 'train_step', and so has Standing"):
        register_stage_state(Standing(), [stage("train_step.weight")], constants=())


def test_a_stage_that_reads_what_is_elsewhere() -> None:
    with pytest.raises(
        PipelineError, match=r"this call reads layers\.0\.weight on a stage whose rank does not hold it"
    ):
        state_entries(stage("layers.0.weight"), nn.Module(), constants=())
