"""What some releases of torch lack, found by trying: tests of it are skipped there, with a line that says so."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from tests.programs import ROOT


class _Scale(Function):
    @staticmethod
    def forward(x: Tensor, by: float) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.by, None


class _Tangent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(torch.tanh, (x,), (x * 2,))[1]


class _RepeatedHeads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = x.view(batch, length, 2, 4).transpose(1, 2) * 2
        return heads[:, :, None].expand(batch, 2, 2, length, 4).reshape(batch, 4, length, 4) * 2


def _export_any_length() -> None:
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    torch.export.export(_RepeatedHeads(), (torch.randn(3, 8, 8),), dynamic_shapes=(sizes,), strict=False)


def _find_effect() -> None:
    check = fx.Graph().call_function(torch.ops.aten._linalg_check_errors.default)
    if not check.is_impure():
        raise LookupError("it removes _linalg_check_errors, by which lu_factor looks for a matrix without inverse")


_TRIALS: dict[str, Callable[[], Any]] = {
    "keyword arguments of autograd functions": lambda: _Scale.apply(torch.ones(2, requires_grad=True), by=2.0),
    "effects of operators in graphs": _find_effect,
    "export of torch.func.jvp": lambda: torch.export.export(_Tangent(), (torch.ones(2),), strict=False),
    "export of repeated key heads of any length": _export_any_length,
}


@functools.cache
def _fault_of(feature: str) -> str:
    try:
        _TRIALS[feature]()
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def has(feature: str) -> bool:
    """Return True if this release of torch has a feature, one of the keys of `_TRIALS`."""
    return not _fault_of(feature)


def skip_without(feature: str) -> None:
    """Skip the running test where this release of torch lacks a feature, one of the keys of `_TRIALS`."""
    if not has(feature):
        skip(f"{feature}: {_fault_of(feature)}")


def skip_unless_torchtitan_runs() -> None:
    """Skip the running test where torchtitan cannot be imported with this release of torch."""
    try:
        importlib.import_module("torchtitan.models.llama3.config_registry")
    except ImportError as error:
        skip(f"what torchtitan imports: {error}")


def skip(what: str, *, whole_file: bool = False) -> NoReturn:
    """Skip the running test, or its file, for what this release of torch lacks; that of the constraints lacks nothing.

    A test that is skipped there would be run nowhere: it fails.
    """
    text = f"torch {torch.__version__} lacks {what}"
    if f"torch=={torch.__version__.partition('+')[0]}" in (ROOT / "constraints.txt").read_text().splitlines():
        pytest.fail(f"{text}. It is the release that constraints.txt names, with which every test runs.")
    pytest.skip(text, allow_module_level=whole_file)
