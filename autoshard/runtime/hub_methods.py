"""Methods of Hugging Face models that a parallelised module refuses, or runs so that ranks remain equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from autoshard.errors import InputError
from autoshard.runtime.part_calls import uncheck_method

_RESIZE = "resize_token_embeddings"
_SAVE = "save_pretrained"


def replace_hub_methods(module: nn.Module) -> None:
    """Replace the methods of a module and its submodules that change the size of a vocabulary, or save files."""
    for name, part in module.named_modules():
        if callable(getattr(part, _RESIZE, None)):
            part.__dict__[_RESIZE] = partial(_refuse_resize, name)
        uncheck_method(part, _SAVE)
        # A method that the user replaced is not replaced again.
        if callable(getattr(type(part), _SAVE, None)) and _SAVE not in part.__dict__:
            part.__dict__[_SAVE] = MethodType(_save, part)


def _refuse_resize(name: str, *args: Any, **kwargs: Any) -> None:
    path = f"{name}.{_RESIZE}" if name else _RESIZE
    raise InputError(
        f"{path}: the embeddings of a parallelised module lie on its mesh, and its programs are made for their sizes. "
        f"Call {_RESIZE} before autoshard.parallelize."
    )


def _save(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Save whole tensors that the caller gathered; raise an `InputError` without them."""
    # `distributed_checkpoint=True` writes shards by `torch.distributed.checkpoint`.
    if kwargs.get("state_dict") is None and not kwargs.get("distributed_checkpoint"):
        raise InputError(
            f"{_SAVE}: this rank has shards of the parameters of {type(self).__name__}, and files hold whole tensors. "
            "On all ranks, call autoshard.integrations.transformers.save_pretrained(model, folder); or gather by "
            f"state = autoshard.full_state_dict(model), and call model.{_SAVE}(folder, state_dict=state) on the first."
        )
    save: Callable[..., Any] = getattr(type(self), _SAVE)
    with _unchanged_configs(self):
        return save(self, *args, **kwargs)


@contextlib.contextmanager
def _unchanged_configs(module: nn.Module) -> Iterator[None]:
    """Undo changes of configurations by saving: `forward` reads them, and ranks that do not save would differ."""
    configs = []
    for part in module.modules():
        adapters = getattr(part, "peft_config", None)
        configs += [getattr(part, "config", None), *(adapters.values() if isinstance(adapters, dict) else ())]
    before = {id(config): (config, dict(vars(config))) for config in configs if hasattr(config, "__dict__")}
    try:
        yield
    finally:
        for config, values in before.values():
            vars(config).clear()
            vars(config).update(values)
