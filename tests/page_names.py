"""Code of a page that cannot run here: the names of autoshard that it uses exist, and take these arguments."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from autoshard.options import OptionKeywords
from autoshard.tools.cli.command_line import parse_arguments
from tests.programs import ROOT


def check_names(where: str, code: str, names: Mapping[str, Any]) -> None:
    """Check Python that is not run.

    Args:
        where: page and line, for the error.
        code: what is not run.
        names: those that earlier blocks of the page defined.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise AssertionError(f"{where}: not Python: {error.text}") from error
    known = {**names, **dict(_imported(where, tree))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _resolve(where, node, known)
        elif isinstance(node, ast.Call) and callable(function := _resolve(where, node.func, known)):
            _check_call(where, node, function)


def _imported(where: str, tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names that imports bind, with what they name in autoshard."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if module := _module(name.name):
                    yield name.asname or "autoshard", module if name.asname else import_module("autoshard")
        elif isinstance(node, ast.ImportFrom) and (module := _module(node.module or "")):
            for name in node.names:
                yield name.asname or name.name, _member(where, module, name.name, f"{node.module}.{name.name}")


def _module(name: str) -> ModuleType | None:
    return import_module(name) if name.split(".")[0] == "autoshard" else None


def _member(where: str, owner: Any, name: str, written: str) -> Any:
    assert hasattr(owner, name), f"{where}: there is no {written}"
    return getattr(owner, name)


def _resolve(where: str, node: ast.expr, known: Mapping[str, Any]) -> Any:
    """What an expression names in autoshard; None where it is of somebody else."""
    value = None
    if isinstance(node, ast.Name):
        value = known.get(node.id)
    elif isinstance(node, ast.Attribute) and (owner := _resolve(where, node.value, known)) is not None:
        value = _member(where, owner, node.attr, ast.unparse(node))
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return value if str(module).split(".")[0] == "autoshard" else None


def _check_call(where: str, node: ast.Call, function: Any) -> None:
    signature = inspect.signature(function)
    keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
    if "Unpack[OptionKeywords]" in {str(parameter.annotation) for parameter in signature.parameters.values()}:
        unknown = keywords - signature.parameters.keys() - typing.get_type_hints(OptionKeywords).keys()
        assert not unknown, f"{where}: {ast.unparse(node.func)} has no option {', '.join(sorted(unknown))}"
    arguments = [value for value in node.args if not isinstance(value, ast.Starred)]
    try:
        signature.bind_partial(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        raise AssertionError(f"{where}: {ast.unparse(node)}: {error}") from error


def check_command(where: str, words: list[str]) -> None:
    """Check a command that is not run: its verb and options, or its program, exist."""
    match words:
        case ["torchrun", "--nproc-per-node", _, *rest]:
            check_command(where, ["python", *rest])
        case ["python", "-m", "autoshard", "selfcheck", *arguments]:
            check_command(where, ["autoshard", "selfcheck", *arguments])
        case ["autoshard", *arguments] | ["python", "-m", "autoshard", *arguments]:
            try:
                parse_arguments(arguments)
            except SystemExit as error:
                raise AssertionError(f"{where}: not a command: {' '.join(words)}") from error
        case ["python", "-m", "torchtitan.train", *_]:
            pass
        case ["python", file, *arguments]:
            program = (ROOT / file).read_text(encoding="utf-8")
            unknown = [word for word in arguments if word.startswith("--") and f'"{word}"' not in program]
            assert not unknown, f"{where}: {file} has no option {', '.join(unknown)}"
        case _:
            raise AssertionError(f"{where}: nobody knows the command {' '.join(words)}")
