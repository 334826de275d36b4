"""Pages of the documentation, followed as a reader does: what they tell to run runs, and prints what they show.

    ```python                     runs here, in one namespace for the page
    ```python title="train.py"    is a file
    ```bash                       commands: `python`, `torchrun`, `autoshard`, on these files
    ```text                       what was printed since the last such block: these lines, in this order, besides others

A block of another language, or a command that is not known here, is an error: no code of these pages is left untried.
Comments of a page, which readers do not see, say what cannot be as readers have it:

    <!-- not run: WHY -->         before a block: its Python is compiled, and its names of autoshard and arguments of
                                  its commands are checked (`tests/page_names.py`)
    <!-- python: rank 0 of 64 --> the Python of the page runs as one rank of such a job; the others do not exist
    <!-- python: 2 processes -->  the Python of the page is one program, which such a job runs

"use `model.py` of [A page](page.md)" is for the reader and for the test: the file is there.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.page_names import check_command, check_names
from tests.programs import ROOT, run_by_fork

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_INFO = re.compile(r"(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?")
_USED = re.compile(r"uses?\s+`(?P<file>[\w.]+)`\s+of\s+\[[^\]]+\]\((?P<page>[\w/]+\.md)")
_RANK = re.compile(r"^<!-- python: rank 0 of (\d+) -->$", re.MULTILINE)
_PROCESSES = re.compile(r"^<!-- python: (\d+) processes -->$", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a page; `line` is the number of the line of its fence, `runs` whether it can run here."""

    language: str
    title: str | None
    text: str
    line: int
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1 + (fence["reason"] is not None)
        info = _INFO.fullmatch(fence["info"])
        assert info is not None, f"{page.name}:{line}: a block of no kind that is known: {fence['info']}"
        yield Block(info["language"], info["title"], fence["text"], line, fence["reason"] is None)


def run_python(page: Path, block: Block, names: dict[str, Any]) -> None:
    """Run a block in a namespace."""
    exec(compile(_at_its_line(block), str(page), "exec"), names)


def _at_its_line(block: Block) -> str:
    """Line numbers are those of the page, so that errors and captures show its lines."""
    return "\n" * block.line + block.text


@dataclass(slots=True)
class Reader:
    """Follows a page, with a folder to work in, which is the current one."""

    page: Path
    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: str = ""

    def follow(self) -> None:
        text = self.page.read_text(encoding="utf-8")
        for used in _USED.finditer(text):
            self._copy(self.page.parent / used["page"], used["file"])
        if rank := _RANK.search(text):
            dist.init_process_group("fake", rank=0, world_size=int(rank[1]), store=FakeStore())
        if processes := _PROCESSES.search(text):
            self._run_program(int(processes[1]))
        for block in blocks(self.page):
            kind = "file" if block.title else block.language
            step = getattr(self, f"_{kind}", None) if kind else None
            assert step is not None, f"{self.page.name}:{block.line}: nobody tries a block of {block.language!r}"
            if block.runs:
                if kind != "python" or not processes:
                    step(block)
            else:
                self._check(block)

    def _copy(self, page: Path, file: str) -> None:
        """Write a file that another page shows."""
        (shown,) = (block for block in blocks(page) if block.title == file)
        self._file(shown)

    def _run_program(self, processes: int) -> None:
        program = ""
        for block in blocks(self.page):
            if block.language == "python" and block.title is None and block.runs:
                program += _at_its_line(block)[program.count("\n") :]
        file = self.folder / "page.py"
        file.write_text(program, encoding="utf-8")
        self.printed += self._fork(file, processes, [])

    def _check(self, block: Block) -> None:
        """Look through a block that cannot run here."""
        where = f"{self.page.name}:{block.line}"
        if block.language == "python":
            check_names(where, block.text, self.names)
        elif block.language == "bash":
            for words in self._commands(block):
                check_command(where, words)

    def _python(self, block: Block) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run_python(self.page, block, self.names)
        self.printed += printed.getvalue()

    def _file(self, block: Block) -> None:
        assert block.title is not None
        (self.folder / block.title).write_text(block.text, encoding="utf-8")

    def _bash(self, block: Block) -> None:
        for words in self._commands(block):
            self.printed += self._run(words)

    def _commands(self, block: Block) -> list[list[str]]:
        lines = block.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    def _run(self, words: list[str]) -> str:
        match words:
            case ["torchrun", "--nproc-per-node", processes, "-m", "autoshard", *arguments]:
                return self._fork(ROOT / "autoshard/__main__.py", int(processes), arguments)
            case ["torchrun", "--nproc-per-node", processes, file, *arguments]:
                return self._fork(self.folder / file, int(processes), arguments)
            case ["python", file, *arguments]:
                return self._fork(self.folder / file, None, arguments)
            case ["autoshard", *arguments]:
                return self._fork(ROOT / "autoshard/__main__.py", None, arguments)
            case ["make", target]:
                rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
                assert target in rules, f"{self.page.name}: the Makefile has no {target}"
            case ["pip", "install", *_]:
                unknown = extras(" ".join(words)) - set(project()["optional-dependencies"])
                assert not unknown, f"{self.page.name}: the package has no extra {', '.join(unknown)}"
            case _:
                raise AssertionError(f"{self.page.name}: nobody tries the command {shlex.join(words)}")
        return ""

    def _fork(self, file: Path, processes: int | None, arguments: list[str]) -> str:
        return run_by_fork(file, processes, self.folder, *arguments)

    def _text(self, block: Block) -> None:
        printed = [_comparable(line) for line in self.printed.splitlines()]
        start = 0
        for line in block.text.splitlines():
            if (words := _comparable(line)) in ("", "..."):
                continue
            assert words in printed[start:], f"{self.page.name}:{block.line}: not printed: {line}\n{self.printed}"
            start = printed.index(words, start) + 1
        self.printed = ""


def _comparable(line: str) -> str:
    """A line without its numbers, which prices decide, and the widths of its columns."""
    return " ".join(_NUMBER.sub("0", line).split())


def extras(text: str) -> set[str]:
    """Return the extras that a text names, as in `autoshard[plot]` or `.[test]`."""
    named = re.findall(r"(?:autoshard|\.)\[([\w,-]+)\]", text)
    return {extra for group in named for extra in group.split(",")}


def project() -> dict[str, Any]:
    """Return what pyproject.toml says of the package."""
    described: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return described
