"""The package as it is installed: a wheel has all files that the library needs, and no others."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import autoshard
from tests.pages import project
from tests.programs import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built offline from a copy of the sources, in which nothing is left of earlier builds."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "autoshard", folder / "autoshard", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_the_files_of_the_tree(wheel: zipfile.ZipFile) -> None:
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "autoshard").rglob("*") if path.is_file()}
    tree = {path for path in tree if "__pycache__" not in path}
    assert {"autoshard/py.typed", "autoshard/cluster/presets/h100.json"} <= tree
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == tree


def test_the_wheel_brings_the_command_the_backend_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "autoshard = autoshard.tools.cli:main" in info["entry_points.txt"]
    assert "[torch_dynamo_backends]" in info["entry_points.txt"]
    assert info["LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")
    provided = {line.partition(": ")[2] for line in info["METADATA"].splitlines() if line.startswith("Provides-Extra")}
    assert provided == set(project()["optional-dependencies"])


def test_the_library_starts_with_what_it_requires() -> None:
    """Other packages are imported where they are used, with an error that names the extra; not at the top of a file."""
    files = (ROOT / "autoshard").rglob("*.py")
    imported = set().union(*(_imports(path) for path in files if "integrations" not in path.parts))
    required = {re.split(r"\W", text)[0] for text in project()["dependencies"]}
    assert imported - sys.stdlib_module_names - {"autoshard"} <= required


def _imports(path: Path) -> set[str]:
    """The packages that a module imports when it is imported."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


HEAVY = ("numba", "sympy", "ortools", "networkx", "pandas", "scipy", "matplotlib", "torch._dynamo")


def test_the_import_loads_no_heavy_package() -> None:
    code = f"import sys, torch, autoshard; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert _output(code) == "[]"


def test_the_names_of_a_planner_load_no_compiler_or_solver() -> None:
    code = f"import sys, autoshard; autoshard.parallelize; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert not {"numba", "ortools", "pandas", "matplotlib"} & set(ast.literal_eval(_output(code)))


@pytest.mark.parametrize(
    "mode",
    ["torch.distributed._local_tensor.LocalTensorMode(4)", "torch._subclasses.fake_tensor.FakeTensorMode()"],
)
def test_modules_that_a_first_call_imports_are_the_same_in_a_mode(mode: str) -> None:
    code = f"""
import pkgutil, torch, autoshard, torch.distributed._local_tensor
with {mode}:
    for module in pkgutil.walk_packages(autoshard.__path__, "autoshard."):
        if ".integrations" not in module.name and not module.name.endswith("__main__"):
            __import__(module.name)
from autoshard.runtime._torch import shows_operators_to_subclasses as shows
print(shows() == shows.__wrapped__())
"""
    assert _output(code) == "True"


def test_the_core_loads_no_tool() -> None:
    code = (
        "import sys, autoshard; autoshard.parallelize, autoshard.search, autoshard.load_plan, autoshard.check_options"
    )
    assert _output(f"{code}; print([name for name in sys.modules if name.startswith('autoshard.tools')])") == "[]"


def test_the_names_of_functions_win_over_rooms() -> None:
    code = "import autoshard.tools.compare.flags, autoshard, inspect; print(inspect.isfunction(autoshard.compare))"
    assert _output(code) == "True"


def test_type_checkers_and_python_see_the_same_names() -> None:
    """The imports that type checkers read, those at run time, and `__all__` name the same."""
    (block,) = [
        node for node in ast.parse((ROOT / "autoshard/__init__.py").read_text()).body if isinstance(node, ast.If)
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == autoshard._HOMES
    assert {*seen, "__version__"} == set(autoshard.__all__) <= set(dir(autoshard))
    for name in autoshard.__all__:
        assert getattr(autoshard, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'paralelize'"):
        autoshard.paralelize  # noqa: B018


def _output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
