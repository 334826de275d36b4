"""Filling a parallelised module from safetensors files: every rank reads its own slices alone."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.errors import InputError
from autoshard.runtime import _torch
from autoshard.runtime.blocks import blocks_of
from autoshard.runtime.materialize import allocate
from autoshard.runtime.shards import coordinate_of, local_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import true_local_shape
from autoshard.specs.spec import Spec

Paths = str | Path | Sequence[str | Path]


class IncompatibleKeys(NamedTuple):
    """What a file and a module do not have in common, as `load_state_dict` reports it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_module(
    model: nn.Module, paths: Paths, *, strict: bool, device: torch.device | str | None, elsewhere: Container[str] = ()
) -> IncompatibleKeys:
    """Fill a module, as `autoshard.load_safetensors` says; names `elsewhere` are of what other ranks hold."""
    files = {name: stored for name, stored in _stored_tensors(_files(paths)).items() if name not in elsewhere}
    targets = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    keys = _compare(targets, files)
    problems = _mismatches(targets, files)
    if strict:
        problems += [f"Missing key(s): {', '.join(keys.missing_keys)}."] if keys.missing_keys else []
        problems += [f"Unexpected key(s): {', '.join(keys.unexpected_keys)}."] if keys.unexpected_keys else []
        problems += _unstored_buffers(model, targets)
    if problems:
        raise InputError("the safetensors files do not fit the model:\n" + "\n".join(f"  {line}" for line in problems))
    allocate(model, torch.device(device or _device_type(model)), files)
    loaded = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in targets:
            if name in files:
                _fill(loaded[name], files[name], name)
    return keys


def _files(paths: Paths) -> list[Path]:
    """The files behind what the user named."""
    if not isinstance(paths, (str, Path)):
        return [file for path in paths for file in _files(path)]
    path = Path(paths)
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        files = _files(indices[0]) if indices else sorted(path.glob("*.safetensors"))
    elif path.suffix == ".json" and path.is_file():
        files = [path.parent / name for name in sorted(set(_weight_map(path).values()))]
    else:
        files = [path]
    absent = [str(file) for file in files if not file.is_file()]
    if absent or not files:
        raise InputError(
            f"no safetensors file {absent[0]}." if absent else f"the folder {path} holds no .safetensors file."
        )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        table = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f'{index} is no index of safetensors files: a JSON object with a "weight_map" from names to files is '
            f"expected ({error})."
        ) from error


class _StoredTensor(NamedTuple):
    """One tensor in a file."""

    file: Path
    shape: tuple[int, ...]


def _stored_tensors(files: Sequence[Path]) -> dict[str, _StoredTensor]:
    stored: dict[str, _StoredTensor] = {}
    for file in files:
        with _open_file(file) as reader:
            for name in reader.keys():  # noqa: SIM118 (a reader is no mapping)
                stored[name] = _StoredTensor(file, tuple(reader.get_slice(name).get_shape()))
    return stored


def _open_file(file: Path) -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise InputError("load_safetensors needs the package safetensors: `pip install safetensors`.") from error
    try:
        return safetensors.safe_open(str(file), framework="pt")
    except safetensors.SafetensorError as error:
        raise InputError(f"{file} is no safetensors file: {error}.") from error


def _compare(targets: Mapping[str, Tensor], files: Mapping[str, _StoredTensor]) -> IncompatibleKeys:
    """Names on one side alone; a tied tensor is there if any of its names is."""
    found = {id(value) for name, value in targets.items() if name in files}
    missing = [name for name, value in targets.items() if id(value) not in found]
    return IncompatibleKeys(missing, [name for name in files if name not in targets])


def _mismatches(targets: Mapping[str, Tensor], files: Mapping[str, _StoredTensor]) -> list[str]:
    return [
        f"size mismatch for {name}: the shape is {list(files[name].shape)} in {files[name].file.name}, and "
        f"{list(value.shape)} in the model."
        for name, value in targets.items()
        if name in files and files[name].shape != tuple(value.shape)
    ]


def _unstored_buffers(model: nn.Module, targets: Mapping[str, Tensor]) -> list[str]:
    return [
        f"Buffer {name} is on the meta device and not persistent, so that no file holds it: call "
        f"autoshard.materialize(model, device) first, which computes it."
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name not in targets
    ]


def _device_type(model: nn.Module) -> str:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh.device_type
    raise InputError("the model has no DTensor parameters: call autoshard.parallelize(model, mesh) first.")


def _fill(target: Tensor, stored: _StoredTensor, name: str) -> None:
    if isinstance(target, DTensor):
        mesh, spec = MeshShape.of(target.device_mesh), Spec(tuple(target.placements))
        local_of(target).copy_(_read(stored, name, spec, mesh, tuple(coordinate_of(target.device_mesh))))
    else:
        with _open_file(stored.file) as reader:
            target.copy_(reader.get_tensor(name))


@_torch.per_rank
def _read(stored: _StoredTensor, name: str, spec: Spec, mesh: MeshShape, coordinate: tuple[int, ...]) -> Tensor:
    """One rank's part of a stored tensor."""
    with _open_file(stored.file) as reader:
        if not stored.shape:
            whole: Tensor = reader.get_tensor(name)
            return whole
        source = reader.get_slice(name)
        parts = [(block, source[block.whole]) for block in blocks_of(stored.shape, spec, mesh, coordinate)]
        if len(parts) == 1:
            part: Tensor = parts[0][1]
            return part
        local = source[tuple(slice(0, 0) for _ in stored.shape)].new_empty(
            true_local_shape(stored.shape, spec, mesh, coordinate)
        )
        for block, part in parts:
            local[block.local] = part
        return local
