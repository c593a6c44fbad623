# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Finds out through the store which ranks still answer when a collective has failed.

    rank 0   a collective fails | calls ........... | reads: 1 answers, 2 and 3 do not
                                                      and writes the result, which others read
    rank 1                          sees it | answers, and ends too
    rank 2   (stopped)
    rank 3   (its node is cut off)

Without a failure a rank looks for a call once a second, like torch's monitor of NCCL, and less
often in a large world, to spare the store. A rank whose tasks stand still also looks whether others
run another program, [Note: apart].
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megatron_asynchzp.engine.failure.descriptors import check_descriptors
from megatron_asynchzp.engine.failure.roll_call_result import HAS_FAILED, IS_HERE, RollCallResult
from megatron_asynchzp.engine.failure.standstill import ObservedDriver, Progress, why_apart
from megatron_asynchzp.errors import name_ranks

_LOOKS_EVERY_S = 1.0
_MOST_LOOKS_PER_S = 20_000  # of all ranks: each takes the store 10 to 15 microseconds
ANSWERS_WITHIN_S = 3.0
"""Time for the answers after a call, in a small world."""
_ANSWERS_PER_S = 10_000  # that the store accepts
_STORE_S = 1.0  # more time before the store counts as lost
_RESULT_S = 1.0  # for the rank that reads all answers
OWN_FAILURE_FIRST_S = 0.5
"""Time in which a rank may fail itself after another rank's failure."""
STANDS_STILL_S = 3.0
"""Time without progress after which a rank looks at others."""
_MOST_LOOKED_AT = 8  # other ranks, each time: all ranks of a large world may stand still
_POLL_S = 0.1
_CLOSE_POLL_S = 0.01  # of rank 0
_THREAD = "asynchzp-roll-call"
# Keys of the store. _ANSWERS has entries that begin with a rank; the others here count ranks.
_CALLED, _ANSWERS, _NUM_ANSWERED, _NUM_READ = "called", "answers", "answered", "read"
_NUM_CLOSED = "closed"
_SUSPECTS_STALL, _PROGRESS = "suspects-stall", "progress/"  # of any rank; of each rank
_ALL_ANSWERED = "all answered"
# Results by number, and the present number, which rank 0 increases when it starts.
_RESULT, _NUM_RESULTS = "result/", "results"
_calls = itertools.count()


class RollCall:
    """One rank's part of a roll call; all ranks create theirs in the same order.

    No rank may call or close before rank 0 has created its own, which clears the store. Then only
    the thread of this object uses the store, which may hold a caller for minutes.
    """

    def __init__(
        self,
        store: Any,  # used by this object alone, with its own connection
        rank: int,
        world_size: int,
        driver: ObservedDriver,
    ):
        self._rank, self._world_size, self._driver = rank, world_size, driver
        self._looks_every_s, self._looks_after_s = _looks_every_s(world_size), STANDS_STILL_S
        self._why_apart = ""
        self._address = _address(store)
        self._store = store
        self._is_closed = threading.Event()
        self._has_called = threading.Event()
        self._is_over = threading.Event()
        self._has_answered = False
        self._result: RollCallResult | None = None
        self._num_answered = self._num_read = 0  # on rank 0, for `await_readers`
        if rank == 0:  # torchrun's store may be the one of the last start
            answers = _ANSWERS, _ALL_ANSWERED, _NUM_ANSWERED, _NUM_READ
            for key in (_CALLED, *answers, _NUM_CLOSED, _SUSPECTS_STALL):
                store.delete_key(key)
            store.add(_NUM_RESULTS, 1)
        store.delete_key(f"{_PROGRESS}{rank}")
        self._thread = threading.Thread(target=self._serve, name=_THREAD, daemon=True)
        self._thread.start()

    @classmethod
    def of_world(cls, driver: ObservedDriver) -> "RollCall | None":
        """Create the roll call of the default process group; None without a TCP store."""
        if not dist.is_initialized():
            return None
        store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        if dist.get_world_size() < 2 or _address(store) is None or not hasattr(store, "clone"):
            return None
        own = PrefixStore(f"asynchzp-roll-call-{next(_calls)}", store.clone())
        rank, world_size = dist.get_rank(), dist.get_world_size()
        check_descriptors(rank, world_size)
        return cls(own, rank, world_size, driver)

    # ---- for the thread that saw the failure

    def find_missing(self, lane: str = "", number: int = 0, ranks: Sequence[int] = ()) -> str:
        """Call all ranks, for a few seconds at most, and describe their answers.

        They say which ranks are silent, and which of `ranks` have submitted fewer than `number`
        tasks of `lane`; without a lane, which ranks are writing a checkpoint.
        """
        if self._is_closed.is_set():
            return "no rank was asked, as the communication was closed"
        self._has_called.set()
        reads_s = self._world_size / _ANSWERS_PER_S  # for all ranks to read the result
        self._is_over.wait(self._answers_within_s + 2 * _RESULT_S + _STORE_S + reads_s)
        if self._why_apart:
            return self._why_apart
        result = self._result
        if result is None:
            return f"the store at {self._address}, where the ranks met, does not answer"
        late = set[int]()
        if lane:
            place = tuple(self._driver.counts).index(lane)
            late = {r for group, counts in result.behind if counts[place] < number for r in group}
        behind = [rank for rank in ranks if rank in late]
        failed = [*result.failed, self._rank]
        before = sorted(failed[: failed.index(self._rank)])
        writing = [] if lane else result.writing
        more = result.num_silent - len(result.silent)
        silent = name_ranks(result.silent) + (f" and {more} more" if more else "")
        texts = (
            f"no answer from {silent}" if result.num_silent else "",
            f"not come to it: {name_ranks(behind)}" if behind else "",
            f"still writing: {name_ranks(writing)}" if writing else "",
            f"failed before: {name_ranks(before)}" if before else "",
        )
        return "; ".join(filter(None, texts)) or "every rank answers"

    @property
    def _answers_within_s(self) -> float:
        return ANSWERS_WITHIN_S + self._world_size / _ANSWERS_PER_S

    @property
    def has_been_called(self) -> bool:
        return self._has_called.is_set() or self._has_answered

    def await_readers(self) -> None:
        """Let others read the answers before this process, which may hold the store, ends."""
        if self._rank != 0 or not self._is_over.is_set():
            return
        deadline = time.monotonic() + self._answers_within_s
        while self._num_read < self._num_answered and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the thread, unless the store holds it.

        Rank 0, whose process may hold the store, waits a while for the others to close: torch
        prints a stack for each access to a store that is gone.
        """
        self._is_closed.set()
        self._has_called.set()
        self._thread.join(_STORE_S + (_parts_within_s() if self._rank == 0 else 0.0))

    # ---- the thread

    def _serve(self) -> None:
        try:
            self._await_failure()
            if self._is_closed.is_set():
                self._close_after_others()
            else:
                self._call()
                self._store.add(_NUM_CLOSED, 1)  # this rank no longer needs the store
        except RuntimeError:  # torch's errors of a store are of this kind
            pass
        finally:
            self._is_over.set()

    def _await_failure(self) -> None:
        """Answer the calls of others until this rank has failed or is closed."""
        while not self._has_called.wait(self._looks_every_s):
            if self._has_answered:
                continue
            self._look_at_others()
            if self._why_apart:
                self._in_thread(self._tell_all_and_end)
                self._has_answered = True
            elif self._store.check([_CALLED]):
                self._answer(self._try_is_writing())
                self._in_thread(self._driver.fail_with_others, self._store.get(_CALLED).decode())
            elif self._store.check([_SUSPECTS_STALL]):
                self._tell_progress(self._driver.progress())

    def _in_thread(self, call: Callable[..., object], *args: object) -> None:
        threading.Thread(target=call, args=args, name=_THREAD, daemon=True).start()

    def _look_at_others(self) -> None:
        stalled_s = self._driver.stalled_s()
        if stalled_s >= self._looks_after_s:
            self._looks_after_s = 1.5 * stalled_s
            self._store.set(_SUSPECTS_STALL, "")
            self._find_apart()
        elif stalled_s == 0 and self._looks_after_s > STANDS_STILL_S:
            self._looks_after_s = STANDS_STILL_S
            self._store.delete_key(_SUSPECTS_STALL)  # a rank that still stands still sets it again

    def _find_apart(self) -> None:
        own, compared = self._driver.progress(), self._driver.compared
        self._tell_progress(own)
        peers = [rank for rank in sorted(compared) if rank != self._rank]
        start = sum(rank < self._rank for rank in peers)
        for peer in [*peers[start:], *peers[:start]][:_MOST_LOOKED_AT]:
            if not self._why_apart and self._store.check([f"{_PROGRESS}{peer}"]):
                progress = Progress.of_text(self._store.get(f"{_PROGRESS}{peer}").decode())
                self._why_apart = why_apart(self._rank, own, peer, progress, compared[peer])

    def _tell_all_and_end(self) -> None:
        # The others must read the reason before this rank ends, as it may hold the store.
        reason = self._store.compare_set(_CALLED, "", self._why_apart).decode()
        if not self._is_closed.wait(2 * self._looks_every_s):
            self._driver.fail_with_others(reason)

    def _tell_progress(self, progress: Progress) -> None:
        self._store.set(f"{_PROGRESS}{self._rank}", progress.to_text())

    def _try_is_writing(self) -> bool:
        try:
            return self._driver.is_writing()
        except Exception:  # it reads another thread's stack; the answer matters more
            return False

    def _answer(self, is_writing: bool, *more: str) -> None:
        counts = " ".join(map(str, self._driver.counts.values()))
        self._tell(f"{IS_HERE} {int(is_writing)} {counts}", *more)
        if self._store.add(_NUM_ANSWERED, 1) == self._world_size:
            self._store.set(_ALL_ANSWERED, "")
        self._has_answered = True

    def _call(self) -> None:
        if not self._why_apart:
            self._find_apart()
        self._store.compare_set(_CALLED, "", self._why_apart)
        if self._why_apart:
            self._has_answered = True
            return
        if self._has_answered:
            self._tell(HAS_FAILED)
        else:
            self._answer(False, HAS_FAILED)
        self._result = self._await_result()
        self._store.add(_NUM_READ, 1)
        if self._rank == 0:
            self._num_answered = self._store.add(_NUM_ANSWERED, 0)
        self._is_over.set()
        while self._rank == 0 and not self._is_closed.wait(_POLL_S):
            self._num_answered = self._store.add(_NUM_ANSWERED, 0)
            self._num_read = self._store.add(_NUM_READ, 0)

    def _close_after_others(self) -> None:
        """Report that this rank is closed; rank 0 awaits the others, unless a rank has failed."""
        self._tell_progress(self._driver.progress(is_closed=True))
        num_closed = self._store.add(_NUM_CLOSED, 1)
        if self._rank != 0 or self._has_answered:
            return
        deadline = time.monotonic() + _parts_within_s()
        while num_closed < self._world_size and time.monotonic() < deadline:
            if not self._has_answered and self._store.check([_CALLED]):
                self._answer(False)  # another rank has failed, and asks
            time.sleep(_CLOSE_POLL_S)
            num_closed = self._store.add(_NUM_CLOSED, 0)

    def _tell(self, *entries: str) -> None:
        self._store.append(_ANSWERS, "".join(f"{self._rank} {entry};" for entry in entries))

    def _await_result(self) -> RollCallResult | None:
        """Return the result of the roll call.

        The first rank to ask awaits and reads all answers; the second does so if the first has
        ended. The others read the result, because the store cannot send all answers to every rank
        of a large world. Ranks that ask later read a later result.
        """
        key = f"{_RESULT}{self._store.add(_NUM_RESULTS, 0)}"
        turn = self._store.add(f"{key}/readers", 1)
        if turn == 1:
            self._await_answers()
        elif text := self._get(key, self._answers_within_s + min(2, turn - 1) * _RESULT_S):
            return RollCallResult.of_text(text)
        elif turn > 2:
            return None
        self._store.add(_NUM_RESULTS, 1)  # ranks that read the former number have answered
        result = RollCallResult.of_answers(self._store.get(_ANSWERS).decode(), self._world_size)
        self._store.set(key, result.to_text())
        return result

    def _await_answers(self) -> None:
        deadline = time.monotonic() + self._answers_within_s
        while not self._store.check([_ALL_ANSWERED]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _get(self, key: str, within_s: float) -> str:
        """Return the store's value; "" after `within_s`, when torch prints a warning."""
        self._store.set_timeout(timedelta(seconds=within_s))
        try:
            return self._store.get(key).decode()
        except dist.DistStoreError:
            return ""


def lasts_s(world_size: int) -> float:
    """Return the most seconds from a call until every rank has seen it and read the result."""
    takes_s = ANSWERS_WITHIN_S + world_size / _ANSWERS_PER_S + _STORE_S
    return _looks_every_s(world_size) + OWN_FAILURE_FIRST_S + takes_s


def _looks_every_s(world_size: int) -> float:
    return max(_LOOKS_EVERY_S, world_size / _MOST_LOOKS_PER_S)


def _parts_within_s() -> float:
    return ANSWERS_WITHIN_S + STANDS_STILL_S


def _address(store: Any) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else None
