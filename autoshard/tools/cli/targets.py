"""The TARGET of a command: a model and its example call, from a Python function, a config.json, timm or torchvision."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoshard.names import suggestion
from autoshard.tools.cli.arguments import UsageError, usage_errors
from autoshard.tools.examples import check_factory_result
from autoshard.units import format_bytes

Example = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]

TARGETS = """\
TARGET is the model with an example call:
  package.module:function  a Python function without arguments, found from the
                           current directory; it returns (model, args, kwargs)
  hf:PATH                  a config.json of transformers, or a folder with one;
                           needs --batch and --seq
  timm:NAME                a model of timm by its name; needs --batch
  torchvision:NAME         a classifier of torchvision by its name; needs --batch"""

_AUTO_CLASS = "AutoModelForCausalLM"
_LARGEST_SIZE = 2**40  # a matrix of two such sizes has more bytes than 64 bits can count
_MOST_ROWS = 2**29  # batch times sequence, in 8 bytes each, can be counted in 64 bits


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add TARGET and its options to the parser of a verb."""
    parser.add_argument(
        "target", metavar="TARGET", help="package.module:function, hf:PATH, timm:NAME or torchvision:NAME"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="samples of the global batch; not of a function")
    parser.add_argument("--seq", type=int, metavar="N", help="of hf:, tokens of a sequence")
    parser.add_argument(
        "--class",
        dest="model_class",
        metavar="NAME",
        help=f"of hf:, the class of transformers; default: {_AUTO_CLASS}",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        metavar="KEY=VALUE",
        help="of hf:, an entry of the config in place of the file's, such as num_hidden_layers=2; may occur often",
    )


def load_target(options: argparse.Namespace, device: str = "meta") -> Example:
    """Load the model and the example call that the options of `add_target` name.

    Models of libraries are in training mode; those of transformers in the dtype of their config, and
    without a cache.

    Args:
        options: those of `add_target`.
        device: of models of libraries. On another device than meta, parameters have their initial values,
            and inputs random ones.

    Returns:
        The model, positional arguments, keyword arguments.

    Raises:
        UsageError: there is no such target, it needs a package that is not installed, it raises an error itself, or an
            option does not belong to it.
    """
    scheme, _, name = options.target.partition(":")
    needs = ("batch", "seq") if scheme == "hf" else ("batch",) if scheme in _IMAGE_MODELS else ()
    takes = (*needs, "model_class", "settings") if scheme == "hf" else needs
    for option in ("batch", "seq", "model_class", "settings"):
        _check_option(scheme, option, getattr(options, option), needed=option in needs, taken=option in takes)
    if scheme == "hf":
        settings = _parse_settings(options.settings or ())
        return _load_config(
            Path(name), options.model_class or _AUTO_CLASS, options.batch, options.seq, settings, device
        )
    if scheme in _IMAGE_MODELS:
        return _load_image_model(scheme, name, options.batch, device)
    return load_example(options.target)


def _check_option(scheme: str, option: str, value: int | str | list[str] | None, *, needed: bool, taken: bool) -> None:
    flag = {"model_class": "--class", "settings": "--set"}.get(option, f"--{option}")
    if value is None and needed:
        raise UsageError(f"a target {scheme}: needs {flag}, such as {flag} {'16' if option == 'batch' else '4096'}.")
    if value is not None and not taken:
        kind = f"a target {scheme}:" if scheme in ("hf", *_IMAGE_MODELS) else "a Python function"
        text = " ".join(value) if isinstance(value, list) else value
        raise UsageError(f"{flag} {text} is not an option of {kind}, which has its sizes itself. Leave {flag} out.")
    if isinstance(value, int) and not 1 <= value <= _MOST_ROWS:
        raise UsageError(f"{flag} {value}: pass a whole number from 1 to {_MOST_ROWS:,}.")


def _parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a config in texts such as `"num_hidden_layers=2"`; values are JSON, or text."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise UsageError(f"--set {text}: write the name of an entry and its value, as in num_hidden_layers=2.")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def load_example(text: str) -> Example:
    """Call a factory such as `"package.module:factory"`, found from the current directory as Python finds modules.

    The factory takes no arguments and returns the model and its example call: `(model, args, kwargs)`, or
    `(model, args)` with a tuple, or `(model, kwargs)` with a mapping.

    Returns:
        The model, positional arguments, keyword arguments.

    Raises:
        UsageError: there is no such factory, it raises an error, or it returns something else.
    """
    name, _, attribute = text.partition(":")
    if not name or not attribute:
        raise UsageError(
            f'"{text}" names no factory: write "package.module:factory", hf:PATH, timm:NAME or torchvision:NAME.'
        )
    module = _import_module(name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"{name} has no function {attribute}. {suggestion(attribute, functions)}")
    with _failures_of(f"{attribute} of {name}", getattr(module, "__file__", None)):
        result = factory()
    with usage_errors():
        return check_factory_result(result, text)


def _import_module(name: str) -> ModuleType:
    # A console script, unlike `python -m`, does not look in the current directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _failures_of(f"the import of {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Another module may be missing: one that this one imports.
            missing = error.name or ""
            below = "" if name != missing and not name.startswith(f"{missing}.") else " Is it below this directory?"
            raise UsageError(
                f"the Python module {name} cannot be imported: there is no module named {missing!r}.{below}"
            ) from error
        except (TypeError, ValueError) as error:
            # Names such as ".models", which Python takes to be relative.
            if name.startswith("."):
                raise UsageError(f"{name} is a relative name of a module: write the whole one.") from error
            raise


def _load_config(
    path: Path, class_name: str, batch: int, seq: int, settings: Mapping[str, Any], device: str
) -> Example:
    """Return a model of transformers, with token ids and labels of shape (batch, seq)."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"hf:{path}: there is no file {file}. Name a config.json, or a folder that has one; nothing is downloaded."
        )
    transformers = _import_package("transformers", f"hf:{path}", "pip install 'autoshard[transformers]'")
    model_class = getattr(transformers, class_name, None)
    build = _builder(model_class)
    if build is None:
        fault = "has no class" if model_class is None else "can build no model by"
        models = [name for name in dir(transformers) if "For" in name or name.endswith("Model")]
        raise UsageError(f"--class {class_name}: transformers {fault} {class_name}. {suggestion(class_name, models)}")
    with _failures_of(f"the config {file}"):
        entries = json.loads(file.read_text("utf-8"))
        kind = entries.get("model_type")
        if entries.get("auto_map"):
            # A model of other code needs a function of the user's, who knows what it runs.
            if kind not in transformers.CONFIG_MAPPING:
                raise UsageError(
                    f"hf:{path}: {kind} is no model of transformers, and {file} names code of its own (auto_map), "
                    "which is never run here. Write a function that makes the model and its inputs, and pass "
                    "package.module:function."
                )
            sys.stderr.write(f"autoshard: {file} names code of its own (auto_map), which is never run here\n")
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    text_config = config.get_text_config()
    for key, value in settings.items():
        owner = config if hasattr(config, key) else text_config
        if not hasattr(owner, key):
            known = [*(config.to_dict() | text_config.to_dict())]
            raise UsageError(f"--set {key}: the config {file} has no such entry. {suggestion(key, known)}")
        _check_setting(file, key, getattr(owner, key), value)
        setattr(owner, key, value)
    # A step of training keeps no keys and values for later tokens.
    text_config.use_cache = False
    with _failures_of(f"{class_name} of transformers with {file}"):
        with torch.device("meta"):
            model = build(config).train()
        if device != "meta":
            _check_memory(model, file)
            with torch.device(device):
                model = build(config).train()
    inputs = inspect.signature(model.forward).parameters
    if "input_ids" not in inputs:
        raise UsageError(
            f"--class {class_name}: the model takes {', '.join(inputs)}, and a target hf: gives it input_ids and "
            "labels. Write a function that returns the model and its inputs, and pass package.module:function."
        )
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    if device != "meta":
        tokens = torch.randint(text_config.vocab_size, (batch, seq), device=device)
    return model, (), {name: tokens.clone() for name in ("input_ids", "labels") if name in inputs}


def _check_setting(file: Path, key: str, present: object, value: object) -> None:
    """Raise a `UsageError` if a value cannot stand for the one that a config has: of another kind, or far too large."""
    number = (int, float)
    kinds = next((kind for kind in (bool, number, str, list, dict) if isinstance(present, kind)), None)
    # JSON's true is an int to Python, and null stands for a default in many entries.
    fits = kinds is None or value is None or (isinstance(value, kinds) and isinstance(value, bool) == (kinds is bool))
    if isinstance(present, int) and not isinstance(present, bool) and isinstance(value, float):
        fits = False
    if not fits:
        raise UsageError(
            f"--set {key}={value}: {file} has {key}={present!r} ({type(present).__name__}), and {value!r} is "
            f"a {type(value).__name__}. Write a value of that kind."
        )
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST_SIZE:
        raise UsageError(
            f"--set {key}={value}: no entry of a config is above {_LARGEST_SIZE:,}: sizes of tensors would overflow."
        )


def _check_memory(model: nn.Module, file: Path) -> None:
    """Raise a `UsageError` if this machine cannot hold the model, its gradients and two copies in float64."""
    needed = 4 * 8 * sum(parameter.numel() for parameter in model.parameters())
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present:
        raise UsageError(
            f"hf:{file}: real numbers of this model need about {format_bytes(needed)} in float64, and this machine has "
            f"{format_bytes(present)}. Make it smaller: --set num_hidden_layers=2 --set hidden_size=256, for example."
        )


def _builder(kind: object) -> Callable[[Any], nn.Module] | None:
    """Return the function that makes a model of a config, in its dtype; None if `kind` is no class of models."""
    if not isinstance(kind, type):
        return None
    # Classes such as AutoModel find the class of a config. Classes of models read the dtype only in `_from_config`,
    # which those call too.
    build = getattr(kind, "from_config", None)
    return build or (getattr(kind, "_from_config", None) if issubclass(kind, nn.Module) else None)


def _load_image_model(package: str, name: str, batch: int, device: str) -> Example:
    """Return a model of timm or torchvision, with images of shape (batch, channels, height, width)."""
    library = _import_package(package, f"{package}:{name}", f"pip install {package}")
    function, build = _IMAGE_MODELS[package]
    with _failures_of(f"{function}({name!r})"), torch.device(device):
        model, size = build(library, name)
        images = torch.randn(batch, *size)
    return model.train(), (images,), {}


def _build_timm(timm: Any, name: str) -> tuple[nn.Module, tuple[int, ...]]:
    model = timm.create_model(name)
    return model, tuple(model.pretrained_cfg["input_size"])


def _build_torchvision(torchvision: Any, name: str) -> tuple[nn.Module, tuple[int, ...]]:
    # The description of the weights has the size of images; the weights themselves are not fetched.
    transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    size = transforms.crop_size[0]
    return torchvision.models.get_model(name, weights=None), (3, size, size)


_IMAGE_MODELS: dict[str, tuple[str, Callable[[Any, str], tuple[nn.Module, tuple[int, ...]]]]] = {
    "timm": ("timm.create_model", _build_timm),
    "torchvision": ("torchvision.models.get_model", _build_torchvision),
}
"""Package of image models -> the name of its function, for errors, and what builds a model and its image size."""


def _import_package(name: str, target: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        lacks = f"there is no module {error.name!r}" if isinstance(error, ModuleNotFoundError) else "it is broken"
        raise UsageError(f"{target} needs {name}, which cannot be imported ({lacks}): {remedy}") from error


@contextmanager
def _failures_of(what: str, home: str | None = None) -> Iterator[None]:
    """Context in which an exception is a `UsageError` of one line: what raised it, its own text, and where.

    Args:
        what: the function or the file, for the message.
        home: the file of the function: its line is named too, where the exception comes from deeper.
    """
    try:
        yield
    except UsageError:
        raise
    # A module that is a script may end the process.
    except (Exception, SystemExit) as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        # Some texts have several lines.
        message = " ".join(f"{type(error).__name__}: {text}".split())
        place = _place_of(error, home)
        raise UsageError(f"{what} raised {message}{f' ({place})' if place else ''}") from error


def _place_of(error: BaseException, home: str | None) -> str:
    """Return the line that raised an exception, and that of `home` which led there; empty where neither is known."""
    # The file did not run, so that no frame is in it.
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    # An import goes through importlib itself.
    frames = [frame for frame in frames if frame.filename != importlib.__file__]
    if not frames:
        return ""
    place = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"
    callers = [frame for frame in frames if frame.filename == home]
    if not callers or frames[-1].filename == home:
        return place
    return f"{place}; called at {callers[-1].filename}:{callers[-1].lineno}, in {callers[-1].name}"
