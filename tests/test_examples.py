"""Every example runs as its first line says, and shows what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import autoshard
from tests.programs import ROOT, run_by_command, run_by_fork

EXAMPLES = ROOT / "examples"
COMMAND = re.compile(
    r"^\"\"\".*: (?:torchrun --nproc-per-node (?P<processes>\d+)|python) examples/(?P<file>[\w/]+\.py)"
)


def launched(name: str) -> int | None:
    """On how many processes torchrun starts an example, by the command in its first line; None for `python`."""
    command = COMMAND.match((EXAMPLES / name).read_text(encoding="utf-8"))
    assert command is not None, f"the first line of {name} does not say how to run it"
    assert command["file"] == name
    return int(command["processes"]) if command["processes"] else None


def run(name: str, folder: Path, *arguments: str, command: bool = False) -> str:
    """What an example prints in as many processes as the command in its first line starts; temporary files go to
    `folder`. By the command itself where that is asked for: for one of torchrun's, whose processes are started as
    `python` starts one.
    """
    return (run_by_command if command else run_by_fork)(EXAMPLES / name, launched(name), folder, *arguments)


def losses(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r"\"([\w/]+\.py)\"", Path(__file__).read_text(encoding="utf-8")))
    paths = [path for path in EXAMPLES.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    assert tested == {str(path.relative_to(EXAMPLES)) for path in paths}


@pytest.mark.slow
def test_train_gpt(tmp_path: Path) -> None:
    text = run("train_gpt.py", tmp_path, "--steps", "5", "--layers", "2")
    assert re.search(r"blocks\.\*\.qkv\.weight .*S\(0,f=3\)", text)
    difference = re.search(r"difference in loss between four processes and one: (\S+)", text)
    assert difference is not None
    assert float(difference[1]) < 1e-5


@pytest.mark.slow
def test_train_gpt_pipeline(tmp_path: Path) -> None:
    text = run("train_gpt_pipeline.py", tmp_path, "--steps", "3", "--layers", "2", "--trace", "step.json")
    assert re.search(r"schedule +\w+, \d+ microbatches", text)
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    difference = re.search(r"difference in loss between the pipeline and one process: (\S+)", text)
    assert difference is not None
    assert float(difference[1]) < 1e-5


@pytest.mark.slow
def test_fused_qkv(tmp_path: Path) -> None:
    text = run("fused_qkv.py", tmp_path)
    assert text.count("_StridedShard(0, split_factor=3)") == 3
    assert text.count("rows of it on this rank: 384 of 1536") == 3
    assert text.count("collectives between the projection and the output of the attention: 0\n") == 3
    assert text.count("checkpoint equal bit for bit: True") == 3
    assert len(set(re.findall(r"loss (\S+), on one device \1;", text))) == 1


@pytest.mark.slow
def test_huggingface_llama(tmp_path: Path) -> None:
    text = run("huggingface_llama.py", tmp_path, "--layers", "1")
    before, going_on, resumed = (losses(line.split(":")[1]) for line in text.splitlines() if line.startswith("loss on"))
    assert len(before) == 10
    assert len(going_on) == len(resumed) == 5
    assert going_on == pytest.approx(resumed, rel=1e-4)
    assert resumed[0] < before[0]


@pytest.mark.slow
def test_plan_llama_8b(tmp_path: Path) -> None:
    text = run("plan_llama_8b.py", tmp_path, "--layers", "2", "--dp", "2", "--tp", "2", "--output", "plan.json")
    plan = autoshard.ShardingPlan.load(tmp_path / "plan.json")
    assert str(plan) in text
    assert plan.mesh.size == 4
    assert plan.memory.peak <= 60 * 2**30
    assert plan.shapes["lm_head.weight"] == (128256, 4096)
    assert not all(placement.is_replicate() for row in plan.placements.values() for placement in row)


@pytest.mark.slow
def test_will_it_fit(tmp_path: Path) -> None:
    text = run("will_it_fit.py", tmp_path, "--layers", "1", "--devices", "2", "--memory", "4GiB", "40GiB")
    small, large = text.split("2 devices of ")[1:]
    assert re.search(r"No: no plan fits in 4\.0 GiB per device .* the smallest peak found is .* add devices", small)
    assert re.search(r"Yes: \S+ GiB at the peak", large)
    assert re.search(r"parameter +\d", large)


@pytest.mark.slow
def test_frontier(tmp_path: Path) -> None:
    text = run("frontier.py", tmp_path, "--layers", "1", "--batch", "8", "--gaps", "0", "--output", "curve.svg")
    steps = [float(row[1]) for row in re.finditer(r"^ +\d+ .* (\S+) ms .*%", text, re.MULTILINE)]
    assert len(steps) > 1
    assert steps == sorted(steps, reverse=True)
    picked = dict(re.findall(r"^(fastest|leanest) +(\S+) GiB", text, re.MULTILINE))
    assert float(picked["leanest"]) < float(picked["fastest"])
    assert (tmp_path / "curve.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_hints(tmp_path: Path) -> None:
    sections = dict(section.split("\n", 1) for section in run("hints.py", tmp_path).strip().split("\n\n"))
    pinned = sections["The head by classes over tp; both blocks as an expert would"]
    assert pinned.count("up.weight    dp: Replicate(), tp: Shard(dim=0)") == 2
    assert pinned.count("down.weight  dp: Replicate(), tp: Shard(dim=1)") == 2
    assert re.search(r"head\.weight .*tp: Shard\(dim=0\)", pinned)
    assert sum("HintError: " in section for section in sections.values()) == 4


def test_custom_operator(tmp_path: Path) -> None:
    text = run("custom_operator.py", tmp_path)
    assert re.search(r"findings, forward: +0\nfindings, backward: +0\n", text)
    assert "said to be linear in the gate too: example.gated.default with partial sum passes on x" in text
    assert "strategies: {'example.gated': 'h on tp', 'example.gated_backward': 'h on tp'}" in text
    difference = re.search(r"loss (\S+), on one device \1; gradients differ by (\S+)", text)
    assert difference is not None
    assert float(difference[2]) < 1e-9


@pytest.mark.slow
def test_compile_backend(tmp_path: Path) -> None:
    lines = dict(line.split(":", 1) for line in run("compile_backend.py", tmp_path).splitlines() if "[" in line[:24])
    one_device, *others = (losses(line) for line in lines.values())
    assert len(others) == 2
    for other in others:
        assert other == pytest.approx(one_device, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("whale/data_parallel.py", ["replicate(2): devices"]),
        ("whale/replicate_and_split.py", ["replicate(2): devices", "split(2): devices"]),
        ("whale/mixture_of_experts.py", ["replicate(2): devices", "split(2): devices"]),
        ("whale/pipeline.py", ["8 microbatches, 1 stage per rank", "first.0 to first.2", "second"]),
        ("whale/auto_pipeline.py", ["4 microbatches"]),
    ],
)
def test_whale(name: str, shown: list[str], tmp_path: Path) -> None:
    text = run(name, tmp_path, command=name == "whale/data_parallel.py")
    difference = re.search(r"largest relative difference: (\S+)", text)
    assert difference is not None
    assert float(difference[1]) < 1e-9
    for part in shown:
        assert part in text


@pytest.mark.slow
def test_laptop_to_cluster(tmp_path: Path) -> None:
    """The plan that one command makes is taken by the other."""
    plan = str(tmp_path / "gpt.plan.json")
    assert f"saved as {plan}" in run("laptop_to_cluster.py", tmp_path, "--plan", plan)
    text = run_by_fork(EXAMPLES / "laptop_to_cluster.py", 4, tmp_path, "--plan", plan)
    first, last = losses(next(line for line in text.splitlines() if line.startswith("loss on 4 cpu devices")))
    assert last < first / 2
