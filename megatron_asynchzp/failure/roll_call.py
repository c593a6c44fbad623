# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns who still answers when a collective has failed: each rank tells it through the store at
which the ranks met.

    rank 0   a collective fails | calls ........... | reads: 1 answers, 2 and 3 do not
                                                      and writes a verdict, which others read
    rank 1                          hears it | answers, and ends too
    rank 2   (stopped)
    rank 3   (its node is cut off)

While nothing fails a rank asks once a second whether anybody has called, as torch's own monitor of
NCCL does, and less often among so many that the store would do nothing else. Then, too, a rank
whose tasks stand still looks whether others went another way, [Note: apart].
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megatron_asynchzp.errors import name_ranks
from megatron_asynchzp.failure.descriptors import refuse_few_descriptors
from megatron_asynchzp.failure.standstill import Progress, Standstill, why_apart
from megatron_asynchzp.failure.verdict import HAS_FAILED, IS_HERE, Verdict

_LOOKS_EVERY_S = 1.0
_MOST_LOOKS_PER_S = 20_000  # of all ranks: each takes the one store 10 to 15 microseconds
ANSWERS_WITHIN_S = 3.0
"""For the answers of the others, from the call on, in a small world."""
_ANSWERS_PER_S = 10_000  # that one store takes in
_STORE_S = 1.0  # that much longer a store may take before it counts as lost
_VERDICT_S = 1.0  # for the one that reads all answers
OTHERS_FIRST_S = 0.5
"""How long a rank that hears of another's failure waits for its own."""
STANDS_STILL_S = 3.0
"""From then on a rank looks at others."""
_MOST_LOOKED_AT = 8  # of them, each time: all ranks of a large world may stand still
_POLL_S = 0.1
_CLOSE_POLL_S = 0.01  # of one rank
_THREAD = "asynchzp-roll-call"
# Keys. The second has entries, each with a rank before it; the others count ranks.
_CALLED, _ANSWERS, _NUM_ANSWERED, _NUM_READ = "called", "answers", "answered", "read"
_NUM_CLOSED = "closed"
_WONDERS, _PROGRESS = "wonders", "progress/"  # whether a rank stands still; how far each is
_ALL_ANSWERED = "all answered"
# What the answers say, its readers, and its number: rank 0 begins with another one.
_VERDICT, _VERDICTS = "verdict/", "verdicts"
_calls = itertools.count()


class RollCall:
    """The part of one rank; all ranks of the world have theirs, made in the same order. No rank may
    call or close before rank 0 has made its own, which clears the store.

    store: for this alone, with a connection of its own. From then on a thread of this object alone
        uses it: a store whose host is gone can hold whoever asks it for minutes.
    counts: tasks that this rank has submitted so far, by lane; read when somebody calls. All ranks
        have the same lanes, in one order.
    on_call: called once, in a thread of its own, when another rank has called; with why, where it
        has said so.
    is_writing: whether this rank writes a checkpoint, for which others may wait; asked when another
        rank has called.
    driver: None where nobody looks whether it stands still.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        counts: Mapping[str, int],
        on_call: Callable[[str], object],
        is_writing: Callable[[], bool] = lambda: False,
        driver: Standstill | None = None,
    ):
        self._rank, self._world_size, self._counts = rank, world_size, counts
        self._looks_every_s = _looks_every_s(world_size)
        self._on_call, self._is_writing = on_call, is_writing
        self._driver, self._looks_after_s = driver, STANDS_STILL_S
        self._why_apart = ""
        self._where = _address(store)
        self._store = store
        self._is_closed = threading.Event()
        self._is_asked = threading.Event()
        self._is_over = threading.Event()
        self._has_answered = False
        self._verdict: Verdict | None = None
        self._num_answered = self._num_read = 0  # on rank 0, for `leave`
        if rank == 0:  # torchrun's store may be that of the start before
            answers = _ANSWERS, _ALL_ANSWERED, _NUM_ANSWERED, _NUM_READ
            for key in (_CALLED, *answers, _NUM_CLOSED, _WONDERS):
                store.delete_key(key)
            store.add(_VERDICTS, 1)
        if driver is not None:
            store.delete_key(f"{_PROGRESS}{rank}")
        self._thread = threading.Thread(target=self._serve, name=_THREAD, daemon=True)
        self._thread.start()

    @classmethod
    def of_world(
        cls,
        counts: Mapping[str, int],
        on_call: Callable[[str], object],
        is_writing: Callable[[], bool],
        driver: Standstill | None = None,
    ) -> "RollCall | None":
        """Make one for the default process group; None where its ranks did not meet at a TCP store.

        Raises ConfigurationError where the process that holds the store cannot have so many
        connections."""
        if not dist.is_initialized():
            return None
        store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        if dist.get_world_size() < 2 or _address(store) is None or not hasattr(store, "clone"):
            return None
        own = PrefixStore(f"asynchzp-roll-call-{next(_calls)}", store.clone())
        rank, world_size = dist.get_rank(), dist.get_world_size()
        refuse_few_descriptors(rank, world_size)
        return cls(own, rank, world_size, counts, on_call, is_writing, driver)

    # ---- for the thread in which something failed

    def find_missing(self, lane: str = "", number: int = 0, ranks: Sequence[int] = ()) -> str:
        """Call all ranks, for a few seconds at most: who does not answer, which of `ranks` have
        submitted fewer than `number` tasks of `lane`; without a lane, who writes a checkpoint."""
        if self._is_closed.is_set():
            return "nobody was asked, as the communication was closed"
        self._is_asked.set()
        reads_s = self._world_size / _ANSWERS_PER_S  # what all need to read the verdict
        self._is_over.wait(self._answers_within_s + 2 * _VERDICT_S + _STORE_S + reads_s)
        if self._why_apart:
            return self._why_apart
        verdict = self._verdict
        if verdict is None:
            return f"the store at {self._where}, where the ranks met, does not answer"
        late = set[int]()
        if lane:
            place = tuple(self._counts).index(lane)
            late = {r for those, counts in verdict.behind if counts[place] < number for r in those}
        behind = [rank for rank in ranks if rank in late]
        failed = [*verdict.failed, self._rank]
        before = sorted(failed[: failed.index(self._rank)])
        writing = [] if lane else verdict.writing
        more = verdict.num_silent - len(verdict.silent)
        silent = name_ranks(verdict.silent) + (f" and {more} more" if more else "")
        texts = (
            f"no answer from {silent}" if verdict.num_silent else "",
            f"not come to it: {name_ranks(behind)}" if behind else "",
            f"still writing: {name_ranks(writing)}" if writing else "",
            f"failed before: {name_ranks(before)}" if before else "",
        )
        return "; ".join(filter(None, texts)) or "every rank answers"

    @property
    def _answers_within_s(self) -> float:
        return ANSWERS_WITHIN_S + self._world_size / _ANSWERS_PER_S

    @property
    def is_heard(self) -> bool:
        """Whether this rank has called, or heard another."""
        return self._is_asked.is_set() or self._has_answered

    def await_readers(self) -> None:
        """Let the others read the answers before this process ends, which may be the one that holds
        the store."""
        if self._rank != 0 or not self._is_over.is_set():
            return
        deadline = time.monotonic() + self._answers_within_s
        while self._num_read < self._num_answered and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the thread, unless the store holds it. Rank 0, whose process may be the one that
        holds the store, waits for the others to close, at most for as long as they need to find
        out that it has: torch prints a stack for each look at a store that is gone."""
        self._is_closed.set()
        self._is_asked.set()
        self._thread.join(_STORE_S + (_parts_within_s() if self._rank == 0 else 0.0))

    # ---- the thread

    def _serve(self) -> None:
        try:
            self._await_failure()
            if self._is_closed.is_set():
                self._close_after_others()
            else:
                self._call()
                self._store.add(_NUM_CLOSED, 1)  # it needs the store no more
        except RuntimeError:  # torch's errors of a store are of this kind
            pass
        finally:
            self._is_over.set()

    def _await_failure(self) -> None:
        """Answer a call of another rank. Returns when this rank has failed or is closed."""
        while not self._is_asked.wait(self._looks_every_s):
            if self._has_answered:
                continue
            self._look_at_others()
            if self._why_apart:
                self._in_thread(self._tell_all_and_end)
                self._has_answered = True
            elif self._store.check([_CALLED]):
                self._answer(self._is_found_writing())
                self._in_thread(self._on_call, self._store.get(_CALLED).decode())
            elif self._driver is not None and self._store.check([_WONDERS]):
                self._tell_progress(self._driver.progress())

    def _in_thread(self, call: Callable[..., object], *args: object) -> None:
        threading.Thread(target=call, args=args, name=_THREAD, daemon=True).start()

    def _look_at_others(self) -> None:
        """[Note: apart], later and later, for as long as this rank stands still."""
        if self._driver is None:
            return
        standing_s = self._driver.standing_s()
        if standing_s >= self._looks_after_s:
            self._looks_after_s = 1.5 * standing_s
            self._store.set(_WONDERS, "")
            self._find_apart(self._driver)
        elif standing_s == 0 and self._looks_after_s > STANDS_STILL_S:
            self._looks_after_s = STANDS_STILL_S
            self._store.delete_key(_WONDERS)  # who stands still yet sets it again

    def _find_apart(self, driver: Standstill) -> None:
        own = driver.progress()
        self._tell_progress(own)
        others = [rank for rank in sorted(driver.compared) if rank != self._rank]
        start = sum(rank < self._rank for rank in others)
        for rank in [*others[start:], *others[:start]][:_MOST_LOOKED_AT]:
            if not self._why_apart and self._store.check([f"{_PROGRESS}{rank}"]):
                other = Progress.of_text(self._store.get(f"{_PROGRESS}{rank}").decode())
                in_step = driver.compared[rank]
                self._why_apart = why_apart(self._rank, own, rank, other, in_step)

    def _tell_all_and_end(self) -> None:
        # This rank may hold the store: the others hear of it first.
        told = self._store.compare_set(_CALLED, "", self._why_apart).decode()
        if not self._is_closed.wait(2 * self._looks_every_s):
            self._on_call(told)

    def _tell_progress(self, progress: Progress) -> None:
        self._store.set(f"{_PROGRESS}{self._rank}", progress.to_text())

    def _is_found_writing(self) -> bool:
        try:
            return self._is_writing()
        except Exception:  # it looks at another thread; the answer matters more
            return False

    def _answer(self, is_writing: bool, *more: str) -> None:
        counts = " ".join(map(str, self._counts.values()))
        self._tell(f"{IS_HERE} {int(is_writing)} {counts}", *more)
        if self._store.add(_NUM_ANSWERED, 1) == self._world_size:
            self._store.set(_ALL_ANSWERED, "")
        self._has_answered = True

    def _call(self) -> None:
        if self._driver is not None and not self._why_apart:
            self._find_apart(self._driver)
        self._store.compare_set(_CALLED, "", self._why_apart)
        if self._why_apart:
            self._has_answered = True
            return
        if self._has_answered:
            self._tell(HAS_FAILED)
        else:
            self._answer(False, HAS_FAILED)
        self._verdict = self._await_verdict()
        self._store.add(_NUM_READ, 1)
        if self._rank == 0:
            self._num_answered = self._store.add(_NUM_ANSWERED, 0)
        self._is_over.set()
        while self._rank == 0 and not self._is_closed.wait(_POLL_S):
            self._num_answered = self._store.add(_NUM_ANSWERED, 0)
            self._num_read = self._store.add(_NUM_READ, 0)

    def _close_after_others(self) -> None:
        """This rank is closed; rank 0 awaits the others, unless it has heard of a failure, after
        which they may be gone."""
        if self._driver is not None:
            self._tell_progress(self._driver.progress(is_closed=True))
        num_closed = self._store.add(_NUM_CLOSED, 1)
        if self._rank != 0 or self._has_answered:
            return
        deadline = time.monotonic() + _parts_within_s()
        while num_closed < self._world_size and time.monotonic() < deadline:
            if not self._has_answered and self._store.check([_CALLED]):
                self._answer(False)  # another one has failed, and asks
            time.sleep(_CLOSE_POLL_S)
            num_closed = self._store.add(_NUM_CLOSED, 0)

    def _tell(self, *entries: str) -> None:
        self._store.append(_ANSWERS, "".join(f"{self._rank} {entry};" for entry in entries))

    def _await_verdict(self) -> Verdict | None:
        """Return the verdict. The first to ask awaits and reads all answers, the second where that
        one has ended meanwhile, and the others what it makes of them: all answers, read by every
        rank of a large world, are more than a store can send. Who asks later reads a later one."""
        key = f"{_VERDICT}{self._store.add(_VERDICTS, 0)}"
        turn = self._store.add(f"{key}/readers", 1)
        if turn == 1:
            self._await_answers()
        elif text := self._comes(key, self._answers_within_s + min(2, turn - 1) * _VERDICT_S):
            return Verdict.of_text(text)
        elif turn > 2:
            return None
        self._store.add(_VERDICTS, 1)  # whoever read the former number has told its answer
        verdict = Verdict.of_answers(self._store.get(_ANSWERS).decode(), self._world_size)
        self._store.set(key, verdict.to_text())
        return verdict

    def _await_answers(self) -> None:
        deadline = time.monotonic() + self._answers_within_s
        while not self._store.check([_ALL_ANSWERED]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _comes(self, key: str, within_s: float) -> str:
        """Return what the store has by then, "" where it has not; torch then prints a warning."""
        self._store.set_timeout(timedelta(seconds=within_s))
        try:
            return self._store.get(key).decode()
        except dist.DistStoreError:
            return ""


def lasts_s(world_size: int) -> float:
    """Return seconds, at most, from a call until every rank has heard it and read who answers."""
    takes_s = ANSWERS_WITHIN_S + world_size / _ANSWERS_PER_S + _STORE_S
    return _looks_every_s(world_size) + OTHERS_FIRST_S + takes_s


def _looks_every_s(world_size: int) -> float:
    return max(_LOOKS_EVERY_S, world_size / _MOST_LOOKS_PER_S)


def _parts_within_s() -> float:
    return ANSWERS_WITHIN_S + STANDS_STILL_S


def _address(store: Any) -> str | None:
    """Host and port of a TCP store; None for another kind."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else None
