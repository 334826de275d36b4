"""The order of a module's calls: raises an error, instead of a hang, if a call is new only on some ranks.

A new call begins with a comparison over all ranks, a known one with the collectives of its program, so ranks of one
kind would wait for ranks of the other. A rank with a new call therefore first waits, in the store of the process group,
until the call is new on all ranks. A rank that runs a known program waits for the others, too; a background thread of
it answers them. The thread reads the store only while the rank begins no call, so steady progress sends nothing.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import InputError
from autoshard.runtime.rank_agreement import check_texts_agree, from_first_rank, is_alone, ranks_text

_log = logging.getLogger("autoshard")

# Seconds without a call after which a rank reads the store, doubled up to the longest at each further look, because one
# process serves the store to all ranks. Not tuned.
_LOOK_SECONDS = 2.0
_LONGEST_LOOK = 8.0
# The same interval for a rank that waits for others.
_POLL_SECONDS = 0.001
_LONGEST_POLL = 0.5
# The store's entry for a new call that all ranks began; any other entry is the text of an error.
_BEGUN = "begun"
# The subject of the error if all else is equal.
_PROGRAM = "the program of the call"


class _Position(NamedTuple):
    """A rank's position in the order of calls.

    Attributes:
        begun: the number of calls that the rank has begun.
        last_new: the index of the last new call; -1 if there was none.
        texts: the texts of the last call, as for `CallOrder.begin_known`.
    """

    begun: int
    last_new: int
    texts: Mapping[str, str]


class _Failure(NamedTuple):
    """The error of other ranks, whose call was new while this rank's was known.

    Attributes:
        position: the position of this rank when it answered them.
        call: the index of the call.
        text: the text of the error.
    """

    position: _Position
    call: int
    text: str


class CallOrder:
    """The order of the calls of a module, its copies and its other methods, which must be the same on all ranks.

    Args:
        advice: the end of the error text: what to change.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._position = _Position(0, -1, {})
        self._entries: _Entries | None = None
        self._failure: _Failure | None = None

    def open(self, device_mesh: DeviceMesh) -> None:
        """Begin to count calls, and to let new calls wait; all ranks of the mesh call this together."""
        # An MPI process group has no store.
        if is_alone(device_mesh) or _store() is None:
            return
        key = from_first_rank(device_mesh, lambda: uuid.uuid4().hex)
        self._entries = _Entries(f"autoshard/{key}", tuple(device_mesh.mesh.flatten().tolist()), self._advice)
        ended = queue.SimpleQueue[None]()
        # A daemon thread does not keep the process alive.
        thread = threading.Thread(target=_watch, args=(weakref.ref(self), ended), name="autoshard calls", daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, ended)

    def begin_known(self, texts: Mapping[str, str]) -> None:
        """Count a call whose program exists.

        Args:
            texts: for every subject in which ranks must agree in such calls, a text to compare and to show.
        """
        begun, last_new, _ = self._position
        self._position = _Position(begun + 1, last_new, texts)

    def begin_new(self, texts: Mapping[str, str], changes: Mapping[str, str]) -> None:
        """Wait until all ranks begin a call that is new on each.

        Args:
            texts: as for `begin_known`.
            changes: texts by subject that say why existing programs do not fit the call, unless its inputs tell.

        Raises:
            InputError: a rank runs an existing program instead, or does not arrive within the timeout of the process
                group. A known call may follow instead of this one.
        """
        if self._entries is None:
            return
        call = self._position.begun
        reasons = "; ".join(f"{subject}: {text}" for subject, text in changes.items())
        self._entries.await_ranks(call, {**texts, _PROGRAM: f"a new one ({reasons})" if reasons else "a new one"})
        self._position = _Position(call + 1, call, texts)

    def answer(self, before: _Position | None) -> _Position:
        """Return this rank's position; if it did not move since an earlier look, answer waiting ranks first."""
        position = self._position
        if position is before and self._entries is not None:
            answered = -1 if self._failure is None else self._failure.call
            failure = self._entries.refuse(position, answered)
            if failure is not None:
                self._failure = failure
                _log.error("rank %d is in a call that other ranks do not make: %s", dist.get_rank(), failure.text)
        return position

    def raise_failure(self, error: Exception) -> None:
        """Raise the error of other ranks if that is why the program of this rank's call failed."""
        if self._failure is not None and self._failure.position is self._position:
            raise InputError(self._failure.text) from error


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries about calls in the store of the process group.

    Attributes:
        prefix: the prefix of the store's keys.
        ranks: the ranks of the mesh.
        advice: as for `CallOrder`.
    """

    prefix: str
    ranks: tuple[int, ...]
    advice: str

    def await_ranks(self, call: int, texts: Mapping[str, str]) -> None:
        """Wait until all ranks reach a call that is new here; raise an `InputError` if one does not.

        Args:
            call: the index of the call.
            texts: this rank's texts, to compare and to show.
        """
        store, end, own = _store(), self._end(call), self._texts(call, dist.get_rank())
        # After an error, the rank may come again with another call.
        has_come = store.check([own])
        store.set(own, json.dumps(dict(texts)))
        store.set(self._latest, str(call))
        if not has_come and store.add(f"{self.prefix}/{call}/ranks", 1) == len(self.ranks):
            store.compare_set(end, "", _BEGUN)
        # A timeout of zero means no limit.
        limit, seconds = store.timeout.total_seconds() or math.inf, _POLL_SECONDS
        deadline = time.monotonic() + limit
        # `store.wait` writes warnings to standard error if it times out.
        while not store.check([end]):
            if time.monotonic() > deadline:
                store.compare_set(end, "", self._late_text(call, limit))
            time.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST_POLL)
        text = store.get(end).decode()
        if text != _BEGUN:
            raise InputError(text)

    def refuse(self, position: _Position, answered: int) -> _Failure | None:
        """Set the error of ranks that wait for a call if this rank began another call instead, and return the error.

        Args:
            position: the position of this rank.
            answered: the index of the last call that was refused; -1 if there is none.
        """
        store = _store()
        if not store.check([self._latest]):
            return None
        call = int(store.get(self._latest))
        if not max(position.last_new, answered) < call < position.begun:
            return None
        texts_by_rank = {**self._read(call), dist.get_rank(): {**position.texts, _PROGRAM: "one that is there"}}
        # A rank shows no sizes if one program serves several.
        common = set.intersection(*map(set, texts_by_rank.values()))
        compared = {
            rank: {subject: text for subject, text in texts.items() if subject in common}
            for rank, texts in sorted(texts_by_rank.items())
        }
        try:
            check_texts_agree(compared, self.advice)
        except InputError as error:
            return _Failure(position, call, store.compare_set(self._end(call), "", str(error)).decode())
        return None

    def _late_text(self, call: int, limit: float) -> str:
        texts_by_rank = self._read(call)
        missing = [rank for rank in self.ranks if rank not in texts_by_rank]
        shown = "; ".join(f"{subject}: {text}" for subject, text in texts_by_rank[dist.get_rank()].items())
        return (
            f"{ranks_text(missing)} began no new call within {limit:g} s, the timeout of the process group, and "
            f"{ranks_text(sorted(texts_by_rank))} did ({shown}). {self.advice} If ranks have other work for so long, "
            "pass a larger timeout to torch.distributed.init_process_group."
        )

    def _read(self, call: int) -> dict[int, dict[str, str]]:
        """Return the texts of the ranks that have reached a call."""
        store, keys = _store(), {rank: self._texts(call, rank) for rank in self.ranks}
        return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

    @property
    def _latest(self) -> str:
        return f"{self.prefix}/latest"

    def _end(self, call: int) -> str:
        return f"{self.prefix}/{call}/end"

    def _texts(self, call: int, rank: int) -> str:
        return f"{self.prefix}/{call}/texts/{rank}"


def _store() -> Any:
    """Return the store of the default process group; do not keep it, or its process goes on serving it."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the process group was destroyed")
    return group.get_group_store()


def _watch(reference: weakref.ref[CallOrder], ended: queue.SimpleQueue[None]) -> None:
    """Answer other ranks until the order is dropped, the process ends, or the store is gone."""
    position, seconds = None, _LOOK_SECONDS
    while _is_empty(ended, seconds):
        order = reference()
        if order is None:
            return
        before = position
        try:
            position = order.answer(before)
        except RuntimeError:
            return
        del order
        seconds = min(2 * seconds, _LONGEST_LOOK) if position is before else _LOOK_SECONDS


def _is_empty(ended: queue.SimpleQueue[None], seconds: float) -> bool:
    """Return True if nothing is put into a queue within some seconds."""
    try:
        ended.get(timeout=seconds)
    except queue.Empty:
        return True
    return False


def _end(thread: threading.Thread, ended: queue.SimpleQueue[None]) -> None:
    """End a thread: torch may crash if the interpreter exits while a thread uses the store."""
    # A forked child process does not have the thread.
    if thread.is_alive() and thread is not threading.current_thread():
        ended.put(None)
        thread.join(timeout=1.0)
