"""The shim of `guard.cpp`, compiled once for the installed torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("guard.cpp")


def compiler() -> str | None:
    """A C++ compiler of this machine: that of the environment variable `CXX`, or one of the usual names."""
    names = (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++")
    words = [name.split()[0] for name in names if name and name.split()]
    return next((found for word in words if (found := shutil.which(word))), None)


def compile_shim(compiler: str, folder: Path) -> Path:
    """The shim as a shared library in `folder`, made by that compiler.

    Raises:
        RuntimeError: the compiler refuses it; the message is the compiler's.
    """
    root, made = Path(torch.__file__).parent, folder / "guard.so"
    include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    link = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    interface = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", interface, *include, str(SOURCE), *link]
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return made
