"""What type checkers know of the library, in the program of a user."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard


class Net(nn.Module):
    width: int = 8


net = Net()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
stages = autoshard.Pipeline(axis="pp")

plan = autoshard.plan(net, {"dp": 8}, (torch.ones(2),), memory_limit="24GiB", recompute="full")
reveal_type(plan)  # ShardingPlan
print(plan.memory.peak)
staged = autoshard.plan(net, {"pp": 2, "dp": 4}, pipeline=stages)
reveal_type(staged)  # PipelinePlan

model = autoshard.parallelize(net, mesh, plan=plan, inputs="local", outputs="local")
reveal_type(model)  # Net
print(model.width)
reveal_type(autoshard.plan_of(model))  # ShardingPlan
pipeline = autoshard.parallelize(net, mesh, pipeline=stages)
reveal_type(pipeline)  # PipelineModule
reveal_type(pipeline.train_step(torch.ones(2)))  # Tensor
reveal_type(autoshard.plan_of(pipeline))  # PipelinePlan
reveal_type(autoshard.parallelize(net, mesh, plan=staged))  # PipelineModule
reveal_type(autoshard.parallelize(net, "auto"))  # Net | PipelineModule
reveal_type(autoshard.materialize(model))  # Net

autoshard.plan(net, {"dp": 8}, recompute="some")  # error
autoshard.plan(net, {"dp": 8}, inputs="mine")  # error
autoshard.parallelize(net, mesh, outputs="locals")  # error
autoshard.plan(net, {"dp": 8}, memory_limits="24GiB")  # error
autoshard.Search(effort="most")  # error
autoshard.search(net, 8, option="mini")  # error
"""


def test_types_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    # The cache of the project's own run has torch and the library.
    options = [
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--no-color-output",
        "--no-error-summary",
        "--show-absolute-path",
    ]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    output, errors, _ = api.run([*options, *cache, "--python-executable", sys.executable, str(file)])
    assert not errors
    shown: dict[int, list[str]] = {}
    for line in output.splitlines():
        # From the cache, the messages of a file have the path of an earlier run.
        match = re.match(r".*program\.py:(\d+): (\w+): (.*)", line)
        if match and not (match[2] == "note" and "Revealed" not in match[3]):
            shown.setdefault(int(match[1]), []).append(match[3] if match[2] == "note" else "error")
    for number, line in enumerate(PROGRAM.splitlines(), 1):
        expected = line.split("  # ")[1:]
        said = [re.sub(r"Revealed type is |\"|[a-z_]\w*\.", "", text) for text in shown.get(number, [])]
        assert said[:1] == expected, f"{line}: {said}"
