"""Loading of a parallelised module from safetensors files: every rank reads only its own slices."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.errors import InputError
from autoshard.runtime import _torch
from autoshard.runtime.materialize import allocate
from autoshard.runtime.shards import blocks_of, coordinate_of, local_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import true_local_shape
from autoshard.specs.spec import Spec

Paths = str | Path | Sequence[str | Path]


class IncompatibleKeys(NamedTuple):
    """Names that exist only in the module, or only in the files, as `load_state_dict` reports them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_module(
    model: nn.Module, paths: Paths, *, strict: bool, device: torch.device | str | None, elsewhere: Container[str] = ()
) -> IncompatibleKeys:
    """Load a module, as documented in `autoshard.load_safetensors`; names in `elsewhere` are tensors of other ranks."""
    files = {name: stored for name, stored in _stored_tensors(_files(paths)).items() if name not in elsewhere}
    targets = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    # A tied tensor is not missing if any of its names is stored.
    stored = {id(value) for name, value in targets.items() if name in files}
    missing = [name for name, value in targets.items() if id(value) not in stored]
    keys = IncompatibleKeys(missing, [name for name in files if name not in targets])
    problems = [
        f"size mismatch for {name}: the shape is {list(files[name].shape)} in {files[name].file.name}, and "
        f"{list(value.shape)} in the model."
        for name, value in targets.items()
        if name in files and files[name].shape != tuple(value.shape)
    ]
    if strict:
        problems += [f"Missing key(s): {', '.join(keys.missing_keys)}."] if keys.missing_keys else []
        problems += [f"Unexpected key(s): {', '.join(keys.unexpected_keys)}."] if keys.unexpected_keys else []
        problems += [
            f"Buffer {name} is on the meta device and not persistent, so that no file holds it: call "
            f"autoshard.materialize(model, device) first, which computes it."
            for name, buffer in model.named_buffers()
            if buffer.is_meta and name not in targets
        ]
    if problems:
        raise InputError("the safetensors files do not fit the model:\n" + "\n".join(f"  {line}" for line in problems))
    # Allocate only after all files have been checked.
    allocate(model, torch.device(device or _device_type(model)), files)
    loaded = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in targets:
            if name in files:
                target = loaded[name]
                if isinstance(target, DTensor):
                    spec, coordinate = Spec(tuple(target.placements)), tuple(coordinate_of(target.device_mesh))
                    value = _read(files[name], name, spec, MeshShape.of(target.device_mesh), coordinate)
                else:
                    value = _read_whole(files[name], name)
                local_of(target).copy_(value)
    return keys


def _files(paths: Paths) -> list[Path]:
    """Return the paths of files, given a file, a folder, an index, or several of these."""
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
            f"expected."
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
    # An optional dependency.
    try:
        import safetensors
    except ImportError as error:
        raise InputError("load_safetensors needs the package safetensors: `pip install safetensors`.") from error
    try:
        return safetensors.safe_open(str(file), framework="pt")
    except safetensors.SafetensorError as error:
        raise InputError(f"{file} is no safetensors file, or was cut short.") from error


def _device_type(model: nn.Module) -> str:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh.device_type
    raise InputError("the model has no DTensor parameters: call autoshard.parallelize(model, mesh) first.")


@_torch.per_rank
def _read(stored: _StoredTensor, name: str, spec: Spec, mesh: MeshShape, coordinate: tuple[int, ...]) -> Tensor:
    """Return one rank's part of a stored tensor."""
    if not stored.shape:
        return _read_whole(stored, name)
    with _open_file(stored.file) as reader:
        source = reader.get_slice(name)
        # Slices of the file, so that a rank reads only its own bytes.
        parts = [(block, source[block.whole]) for block in blocks_of(stored.shape, spec, mesh, coordinate)]
        if len(parts) == 1:
            part: Tensor = parts[0][1]
            return part
        # An empty slice has the dtype of the file.
        empty = source[tuple(slice(0, 0) for _ in stored.shape)]
        local = empty.new_empty(true_local_shape(stored.shape, spec, mesh, coordinate))
        for block, part in parts:
            local[block.local] = part
        return local


def _read_whole(stored: _StoredTensor, name: str) -> Tensor:
    with _open_file(stored.file) as reader:
        whole: Tensor = reader.get_tensor(name)
        return whole
