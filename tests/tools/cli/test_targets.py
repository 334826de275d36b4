from __future__ import annotations

import argparse
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.errors import InputError
from autoshard.tools.cli.arguments import UsageError
from autoshard.tools.cli.targets import Example, add_target, load_example, load_target

SOURCE = """
import torch
from torch import nn

def triple(): return nn.Linear(2, 2), (torch.ones(1, 2),), {}
def keywords(): return nn.Linear(2, 2), {"input": torch.ones(1, 2)}
def positional(): return nn.Linear(2, 2), (torch.ones(1, 2),)
def alone(): return nn.Linear(2, 2)
def wrong():
    raise ValueError("the width\\nis 0")
def deep():
    return nn.Linear(2, "wide"), ()
def needy(width): return nn.Linear(width, 2)
def leaving(): raise SystemExit(3)
number = 3
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module of factories in the current directory, beside modules that cannot be imported."""
    file = tmp_path / "example_factories.py"
    file.write_text(SOURCE)
    (tmp_path / "lacks_a_package.py").write_text("import no_such_package\n")
    (tmp_path / "fails_at_import.py").write_text("\n\n1 / 0\n")
    (tmp_path / "is_no_python.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    # Tests of other files in folders of their own may have imported a module of this name.
    monkeypatch.delitem(sys.modules, "example_factories", raising=False)
    return file


def load(*arguments: str) -> Example:
    parser = argparse.ArgumentParser()
    add_target(parser)
    return load_target(parser.parse_args(arguments))


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("name", ["triple", "keywords", "positional"])
def test_a_factory_of_every_form(name: str) -> None:
    module, args, kwargs = load(f"example_factories:{name}")
    assert isinstance(module, nn.Linear)
    assert module(*args, **kwargs).shape == torch.Size([1, 2])


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("example_factories", "names no factory"),
        (
            "no_such_module:make",
            "no_such_module cannot be imported: there is no module named 'no_such_module'. Is it below",
        ),
        ("lacks_a_package:make", "lacks_a_package cannot be imported: there is no module named 'no_such_package'."),
        (".example_factories:triple", "is a relative name"),
        ("example_factories:tripel", "has no function tripel. Close ones are triple"),
        ("example_factories:number", "has no function number"),
        ("example_factories:alone", "returned a Linear: return (model, args, kwargs)"),
        ("example_factories:leaving", "leaving of example_factories raised SystemExit: 3"),
        ("example_factories:needy", "raised TypeError: needy() missing 1 required positional argument: 'width'"),
    ],
)
def test_what_is_no_factory(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load_example(text)
    assert "\n" not in str(caught.value)


def test_the_error_of_a_factory_has_its_line(factories: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_example("example_factories:wrong")
    message = "wrong of example_factories raised ValueError: the width is 0"
    line = 1 + SOURCE.splitlines().index('    raise ValueError("the width\\nis 0")')
    assert str(caught.value) == f"{message} ({factories}:{line}, in wrong)"


def test_an_error_inside_a_library_has_the_line_of_the_factory_too(factories: Path) -> None:
    with pytest.raises(UsageError, match=r"raised TypeError: .*linear\.py:\d+, in __init__") as caught:
        load_example("example_factories:deep")
    line = 1 + SOURCE.splitlines().index('    return nn.Linear(2, "wide"), ()')
    assert str(caught.value).endswith(f"; called at {factories}:{line}, in deep)")


def test_a_module_that_raises_an_error_when_it_is_imported(factories: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_example("fails_at_import:make")
    place = f"({factories.parent / 'fails_at_import.py'}:3, in <module>)"
    assert str(caught.value) == f"the import of fails_at_import raised ZeroDivisionError: division by zero {place}"
    with pytest.raises(UsageError, match=r"raised SyntaxError: .*is_no_python\.py:1\)$"):
        load_example("is_no_python:make")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The folder of a `config.json`."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.parametrize("name", ["", "config.json"])
@pytest.mark.parametrize("model_class", [[], ["--class", "LlamaForCausalLM"]])
def test_a_config_of_transformers(config: Path, name: str, model_class: list[str]) -> None:
    pytest.importorskip("transformers")
    model, args, kwargs = load(f"hf:{config / name}", "--batch", "4", "--seq", "16", *model_class)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.training
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert args == ()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in kwargs.items()} == {
        "input_ids": ((4, 16), torch.long),
        "labels": ((4, 16), torch.long),
    }
    assert not model.config.use_cache


SIZES = ("--batch", "4", "--seq", "16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf:FOLDER/nowhere", *SIZES), "there is no file FOLDER/nowhere. Name a config.json"),
        (("hf:FOLDER/empty", *SIZES), "there is no file FOLDER/empty/config.json"),
        (("hf:FOLDER/damaged.json", *SIZES), "the config FOLDER/damaged.json raised"),
        (
            ("hf:FOLDER", *SIZES, "--class", "LlamaForCausalLn"),
            "LlamaForCausalLn. Close ones are LlamaForCausalLM",
        ),
        (("hf:FOLDER", *SIZES, "--class", "LlamaConfig"), "transformers can build no model by LlamaConfig"),
        (("hf:FOLDER", *SIZES, "--class", "ViTModel"), "ViTModel of transformers with FOLDER/config.json raised"),
        (("hf:FOLDER", "--batch", "4"), "a target hf: needs --seq, such as --seq 4096"),
        (("hf:FOLDER", "--batch", "0", "--seq", "16"), "--batch 0: pass a whole number from 1 to 536,870,912"),
        (("hf:FOLDER", "--batch", "4", "--seq", "4000000000"), "--seq 4000000000: pass a whole number from 1 to"),
        (("timm:resnet18", *SIZES), "--seq 16 is not an option of a target timm:"),
        (("example_factories:triple", "--batch", "4"), "--batch 4 is not an option of a Python function"),
    ],
)
def test_what_is_no_target(arguments: tuple[str, ...], message: str, config: Path) -> None:
    pytest.importorskip("transformers")
    (config / "empty").mkdir()
    (config / "damaged.json").write_text("{")
    with pytest.raises(UsageError, match=re.escape(message.replace("FOLDER", str(config)))) as caught:
        load(*(argument.replace("FOLDER", str(config)) for argument in arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "of_its_own"])
def test_code_that_a_config_names_is_never_run(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": kind, "auto_map": code}))
    for name in ("configuration_own.py", "modeling_own.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    said = "names code of its own (auto_map), which is never run here"
    if kind == "llama":
        model, *_ = load(f"hf:{tmp_path}", *SIZES)
        assert type(model).__module__.startswith("transformers.models.llama")
        assert said in capsys.readouterr().err
    else:
        with pytest.raises(UsageError, match=f"of_its_own is no model of transformers, .*{re.escape(said)}"):
            load(f"hf:{tmp_path}", *SIZES)
    assert not (tmp_path / "ran").exists()


def test_a_package_that_is_not_installed_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python refuses to import a module whose entry is None.
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"timm:resnet18 needs timm, .*: pip install timm$"):
        load("timm:resnet18", "--batch", "4")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"needs transformers, .*: pip install 'autoshard\[transformers\]'$"):
        load(f"hf:{config}", *SIZES)


def test_a_model_of_timm() -> None:
    pytest.importorskip("timm")
    model, args, kwargs = load("timm:resnet18", "--batch", "4")
    assert [tensor.shape for tensor in args] == [(4, 3, 224, 224)]
    assert kwargs == {}
    assert model(*args).shape == (4, 1000)
    with pytest.raises(UsageError, match=r"create_model\('resnet'\) raised RuntimeError: Unknown model"):
        load("timm:resnet", "--batch", "4")


def test_the_calls_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of timm, which need not be installed: its function, and the attribute of its models.
    def create_model(name: str) -> nn.Module:
        if name != "small":
            raise RuntimeError(f"Unknown model ({name})")
        model = nn.Conv2d(1, 2, 3).eval()
        model.pretrained_cfg = {"input_size": (1, 8, 6)}
        return model

    package = types.ModuleType("timm")
    package.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", package)
    model, args, kwargs = load("timm:small", "--batch", "4")
    assert model.training
    assert model.weight.is_meta
    assert [(tensor.shape, tensor.device.type) for tensor in args] == [((4, 1, 8, 6), "meta")]
    assert kwargs == {}
    with pytest.raises(UsageError, match=r"timm.create_model\('large'\) raised RuntimeError: Unknown model \(large\)"):
        load("timm:large", "--batch", "4")


def test_the_calls_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of torchvision, whose builds are each for one torch: the functions of its registry of models.
    def get_model(name: str, weights: object) -> nn.Module:
        assert weights is None
        return nn.Conv2d(3, 2, 3).eval()

    def get_model_weights(name: str) -> types.SimpleNamespace:
        if name != "small":
            raise ValueError(f"Unknown model {name}")
        return types.SimpleNamespace(
            DEFAULT=types.SimpleNamespace(transforms=lambda: types.SimpleNamespace(crop_size=[8]))
        )

    package = types.ModuleType("torchvision")
    package.models = types.SimpleNamespace(get_model=get_model, get_model_weights=get_model_weights)
    monkeypatch.setitem(sys.modules, "torchvision", package)
    model, args, kwargs = load("torchvision:small", "--batch", "4")
    assert model.training
    assert model.weight.is_meta
    assert [(tensor.shape, tensor.device.type) for tensor in args] == [((4, 3, 8, 8), "meta")]
    assert kwargs == {}
    with pytest.raises(UsageError, match=r"get_model\('large'\) raised ValueError: Unknown model large"):
        load("torchvision:large", "--batch", "4")
    with pytest.raises(UsageError, match="a target torchvision: needs --batch"):
        load("torchvision:small")
