# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A failure says which ranks do not answer, a store that is gone holds nobody, and all hear it."""

import random
import resource
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_asynchzp.engine.failure import descriptors, roll_call
from megatron_asynchzp.engine.failure.roll_call import RollCall
from megatron_asynchzp.engine.failure.roll_call_result import RollCallResult
from megatron_asynchzp.engine.failure.standstill import Progress
from megatron_asynchzp.errors import ConfigurationError, name_ranks
from scripts.testbed.ranks import run_ranks

WORLD_SIZE = 4
SOON_S = 20.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(roll_call, "_LOOKS_EVERY_S", 0.02)
    monkeypatch.setattr(roll_call, "_POLL_S", 0.02)
    monkeypatch.setattr(roll_call, "ANSWERS_WITHIN_S", 0.4)
    monkeypatch.setattr(roll_call, "_STORE_S", 0.2)
    monkeypatch.setattr(roll_call, "_RESULT_S", 0.4)


class Standing:
    """In place of a driver: how long its tasks have stood still, and how often it was asked."""

    def __init__(self, *names: str, counts: Counter | None = None, compared: int = 0):
        self.standing, self.num_asked = 0.0, 0
        self.compared = dict.fromkeys(range(compared), True)
        self.counts = Counter(gather=5) if counts is None else counts
        self.called = threading.Event()
        self.writes = False
        self._tasks = list(enumerate(names, 1))

    def stalled_s(self) -> float:
        return self.standing

    def progress(self, is_closed: bool = False) -> Progress:
        self.num_asked += 1
        return Progress(self._tasks, self._tasks, {}, is_closed, "is in its model")

    def fail_with_others(self, _why: str = "") -> None:
        self.called.set()

    def is_writing(self) -> bool:
        return self.writes


class World:
    """Ranks of one process, each with its own connection to one store."""

    def __init__(self, *there: int, num_closed_before: int = 0):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.add(roll_call._NUM_CLOSED, num_closed_before)
        self.drivers: dict[int, Standing] = {}
        self.ranks: dict[int, RollCall] = {}
        for rank in there:
            self.add(rank)

    def add(self, rank: int, num_submitted: int = 5) -> RollCall:
        driver = self.drivers[rank] = Standing(counts=Counter(gather=num_submitted))
        own = self.ranks[rank] = RollCall(self.store.clone(), rank, WORLD_SIZE, driver)
        return own

    def close(self) -> None:
        for one in self.ranks.values():
            one.close()


@pytest.fixture
def without_2():
    world = World(0, 1, 3)
    yield world
    world.close()


def test_the_ranks_that_do_not_answer_are_named_and_all_others_hear_of_the_failure(without_2):
    assert without_2.ranks[1].find_missing("gather", 5, (0, 1)) == "no answer from rank 2"
    called = {rank: driver.called for rank, driver in without_2.drivers.items()}
    assert called[0].wait(SOON_S) and called[3].wait(SOON_S)
    assert not called[1].is_set()  # its own
    # Who fails later hears of those before, and calls nobody again.
    assert without_2.ranks[3].find_missing() == "no answer from rank 2; failed before: rank 1"


def test_a_rank_that_answers_and_has_not_come_to_the_collective_is_named():
    world = World(*range(WORLD_SIZE))
    world.drivers[3].counts["gather"] = 4
    assert world.ranks[0].find_missing("gather", 5, (0, 3)) == "not come to it: rank 3"
    # Of the ranks of this collective alone.
    assert world.ranks[1].find_missing("gather", 5, (0, 1)) == "failed before: rank 0"
    world.close()


def test_who_writes_a_checkpoint_is_named_where_a_collective_is_not_the_engines():
    world = World(*range(WORLD_SIZE))
    world.drivers[0].writes = world.drivers[3].writes = True
    # The first has failed itself, and writes no more.
    assert world.ranks[0].find_missing() == "still writing: rank 3"
    assert world.ranks[1].find_missing("gather", 5, (0, 1)) == "failed before: rank 0"
    world.close()


def test_nothing_is_waited_for_where_every_rank_answers():
    world = World(*range(WORLD_SIZE))
    assert world.ranks[2].find_missing() == "every rank answers"
    world.close()


def test_a_store_that_has_gone_is_named_and_nobody_waits_for_it(without_2):
    address = f"127.0.0.1:{without_2.store.port}"
    del without_2.store
    start_s = time.monotonic()
    assert (
        without_2.ranks[1].find_missing()
        == f"the store at {address}, where the ranks met, does not answer"
    )
    assert time.monotonic() - start_s < SOON_S


class HeldStore(dist.Store):
    """Nothing comes back from it, as from a host without power."""

    def __init__(self):
        super().__init__()
        self.is_released = threading.Event()

    def delete_key(self, key) -> bool:
        return False

    def check(self, keys) -> bool:
        return self.is_released.wait() and False

    def set(self, key, value) -> None:
        self.is_released.wait()


def test_a_store_that_never_answers_holds_no_rank():
    store, said = HeldStore(), []
    one = RollCall(store, 1, WORLD_SIZE, Standing())
    thread = threading.Thread(target=lambda: said.append(one.find_missing()), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert said == ["the store at None, where the ranks met, does not answer"]
    store.is_released.set()
    one.close()


def test_the_rank_that_may_hold_the_store_leaves_when_the_others_have_read(monkeypatch, without_2):
    monkeypatch.setattr(roll_call, "ANSWERS_WITHIN_S", 1.0)
    first, second = without_2.ranks[0], without_2.ranks[1]
    monkeypatch.setattr(first, "_world_size", 3)  # for it the answers are complete at once
    without_2.ranks.pop(3).close()
    asking = threading.Thread(target=second.find_missing)
    first.find_missing()
    asking.start()
    start_s = time.monotonic()
    first.await_readers()
    left_s = time.monotonic()
    asking.join()
    # The other asked for all its time; without `leave` the store could have been gone at once.
    assert left_s - start_s > 0.5
    assert second._is_over.is_set()


def test_the_rank_that_may_hold_the_store_closes_when_the_others_have(monkeypatch):
    monkeypatch.setattr(roll_call, "ANSWERS_WITHIN_S", SOON_S)
    # torchrun's store may be that of a start before, whose ranks have closed.
    world = World(*range(WORLD_SIZE), num_closed_before=WORLD_SIZE)
    closing = threading.Thread(target=world.ranks[0].close)
    closing.start()
    for rank in range(1, WORLD_SIZE):
        closing.join(0.1)
        assert closing.is_alive()
        start_s = time.monotonic()
        world.ranks[rank].close()
        assert time.monotonic() - start_s < SOON_S / 4  # it waits for nobody
    closing.join(SOON_S / 4)
    assert not closing.is_alive()


def test_it_waits_for_nobody_once_it_has_heard_of_a_failure(monkeypatch):
    world = World(*range(WORLD_SIZE))
    world.ranks[1].find_missing()
    assert world.drivers[0].called.wait(SOON_S)
    monkeypatch.setattr(roll_call, "ANSWERS_WITHIN_S", SOON_S)
    start_s = time.monotonic()
    world.ranks[0].close()
    assert time.monotonic() - start_s < SOON_S / 4
    world.close()


def test_it_does_not_wait_for_ever_for_a_rank_that_never_closes(without_2):
    start_s = time.monotonic()
    without_2.close()
    assert time.monotonic() - start_s < SOON_S


class CountedStore:
    """A connection to a store, and the bytes that came over it."""

    def __init__(self, store: dist.Store):
        self._store, self.nbytes, self.num_asked = store, 0, 0

    def __getattr__(self, name: str):
        self.num_asked += name in ("add", "append", "check", "compare_set", "get", "wait")
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self.nbytes += len(value)
        return value


def ask_all(ranks: list[RollCall], suspects: int = 64) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda one: one.find_missing("gather", 5, range(suspects)), ranks))


def test_ranks_that_all_fail_at_once_read_what_one_of_them_made_of_the_answers(monkeypatch):
    """However many there are, each reads a few hundred bytes."""
    monkeypatch.setattr(roll_call, "ANSWERS_WITHIN_S", 1.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = [rank for rank in range(24) if rank not in (7, 12)]
    stores = [CountedStore(store.clone()) for _ in there]
    ranks = [
        RollCall(one, rank, 24, Standing(counts=Counter(gather=4 if rank == 9 else 5)))
        for one, rank in zip(stores, there, strict=True)
    ]
    answers_nbytes = len("".join(f"{rank} here 0 5;" for rank in there))
    said = "no answer from ranks 7, 12; not come to it: rank 9"
    assert all(text.startswith(said) for text in ask_all(ranks, 24))
    large = [one for one in stores if one.nbytes >= answers_nbytes]
    assert len(large) == 1 and all(one.nbytes < 120 for one in stores if one not in large)
    for one in ranks[1:]:
        one.close()


def test_who_fails_after_a_verdict_is_read_with_the_next(without_2):
    assert without_2.ranks[0].find_missing() == "no answer from rank 2"
    late = without_2.add(2, num_submitted=4)  # it was held up, and answers now
    assert late.find_missing("gather", 5, (0, 2)) == "not come to it: rank 2; failed before: rank 0"
    assert without_2.ranks[0].find_missing() == "no answer from rank 2"  # as it was then


def test_a_rank_of_a_large_world_asks_the_store_a_few_times_and_waits_for_the_verdict():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [CountedStore(store.clone()) for _ in range(8)]
    ranks = [RollCall(one, rank, 2000, Standing()) for rank, one in enumerate(stores)]
    texts = ask_all(ranks)
    assert all(text.startswith("no answer from ranks 8 to 1999") for text in texts)
    few = sorted(one.num_asked for one in stores[1:])[:-1]  # one of them may read for all
    assert max(few) < 20, few
    for one in ranks[1:]:
        one.close()


def test_the_times_of_a_roll_call_grow_with_what_the_store_has_to_take_in():
    small, large = roll_call.lasts_s(64), roll_call.lasts_s(98_304)
    assert small < 5.0 and 10.0 < large - small < 20.0


def test_another_one_reads_the_answers_where_the_first_reader_has_ended():
    world = World(*range(WORLD_SIZE))
    world.store.add(f"{roll_call._RESULT}1/readers", 1)
    assert world.ranks[2].find_missing() == "every rank answers"
    assert world.ranks[3].find_missing() == "failed before: rank 2"
    assert world.store.check([f"{roll_call._RESULT}1"])
    world.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_verdict_in_a_text_says_what_the_answers_say(seed):
    chance = random.Random(seed)
    world = chance.choice((3, 40, 5000))
    counts = {rank: chance.choice(((5, 2), (5, 2), (5, 1), (3, 2))) for rank in range(world)}
    silent = set(chance.sample(range(world), chance.choice((0, 1, world // 3))))
    writing = [rank for rank in counts if chance.random() < 0.01 and rank not in silent]
    failed = chance.sample(range(world), 2)
    answers = [
        f"{rank} here {int(rank in writing)} {a} {b};"
        for rank, (a, b) in counts.items()
        if rank not in silent
    ]
    chance.shuffle(answers)
    text = RollCallResult.of_answers(
        "".join(answers) + "".join(f"{r} failed;" for r in failed), world
    )
    heard = RollCallResult.of_text(text.to_text())
    assert len(text.to_text()) < 4000 and heard.num_silent == len(silent)
    assert heard.failed == failed and heard.writing == writing
    assert set(heard.silent) <= silent and heard.silent == sorted(silent)[: len(heard.silent)]
    late = {rank: tuple(of_them) for ranks, of_them in heard.behind for rank in ranks}
    assert all(counts[rank] == of_them for rank, of_them in late.items())
    if world < 100:
        assert heard.silent == sorted(silent)
        there = [counts[rank] for rank in counts if rank not in silent]
        front = tuple(map(max, zip(*there, strict=True)))
        assert late.keys() == {r for r in counts.keys() - silent if counts[r] != front}


def test_a_verdict_on_thousands_of_ranks_that_each_stand_elsewhere_is_short_and_has_the_latest():
    chance, world = random.Random(0), 5000
    places = list(range(world))
    chance.shuffle(places)  # of each rank: how many tasks it has submitted
    answers = "".join(f"{rank} here 0 {place} 7;" for rank, place in enumerate(places))
    text = RollCallResult.of_answers(answers, world).to_text()
    assert len(text) < 4000  # whatever the counts are: each of these ranks reads it
    behind = RollCallResult.of_text(text).behind
    assert len(behind) >= 50
    assert behind == [([places.index(place)], [place, 7]) for place in range(len(behind))]


def await_that(is_so) -> bool:
    deadline = time.monotonic() + SOON_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def test_ranks_say_how_far_they_are_only_while_one_of_them_stands_still():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    drivers = [Standing("gather a", compared=2), Standing("gather a", compared=2)]

    def two_ranks() -> list[RollCall]:
        return [RollCall(store.clone(), rank, 2, driver) for rank, driver in enumerate(drivers)]

    def is_quiet() -> bool:
        before = [driver.num_asked for driver in drivers]
        time.sleep(0.3)  # some ten looks
        return before == [driver.num_asked for driver in drivers]

    ranks = two_ranks()
    drivers[0].standing = roll_call.STANDS_STILL_S
    assert await_that(lambda: drivers[1].num_asked > 3)
    drivers[0].standing = 0.0
    assert await_that(is_quiet)
    drivers[0].standing = roll_call.STANDS_STILL_S  # and the run ends while it stands
    assert await_that(lambda: drivers[1].num_asked > 8)
    for rank in ranks:
        rank.close()
    drivers[0].standing = 0.0
    ranks = two_ranks()  # after a restart at the same store
    assert await_that(is_quiet)
    for rank in ranks:
        rank.close()


def test_a_rank_that_stands_still_beside_one_that_says_nothing_still_finds_who_is_missing():
    """It waits for no record: that rank may have ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    driver = Standing("gather a", counts=Counter(gather=1), compared=2)
    driver.standing = roll_call.STANDS_STILL_S
    rank = RollCall(store.clone(), 0, 2, driver)
    assert await_that(lambda: driver.num_asked > 0)
    time.sleep(0.1)
    assert rank.find_missing("gather", 1, (0, 1)) == "no answer from rank 1"
    rank.close()


def ask_in_the_default_group() -> str:
    rank, driver = dist.get_rank(), Standing()
    driver.writes = rank == 0
    own = RollCall.of_world(driver)
    assert own is not None  # gloo ranks meet at a TCP store
    dist.barrier()  # rank 0 clears the store when it creates its part
    said = own.find_missing() if rank == 1 else ""
    is_heard = rank == 1 or driver.called.wait(SOON_S)
    dist.barrier()
    own.close()
    return said if is_heard else "nobody has called"


def test_the_ranks_of_a_run_have_a_roll_call_of_their_own():
    assert run_ranks(ask_in_the_default_group, 2) == ["", "still writing: rank 0"]


@pytest.mark.parametrize(
    "limit, rank, world, needed",
    [
        (1024, 0, 256, 0), (1024, 1, 16384, 0), (1024, 0, 16384, 33024), (40, 1, 2, 256),
        (255, 0, 0, 256), (256, 5, 8, 0), (resource.RLIM_INFINITY, 0, 98304, 0),
    ],
)  # fmt: skip
def test_a_low_limit_of_descriptors_is_refused_with_the_one_that_is_needed(
    monkeypatch, limit, rank, world, needed
):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (limit, limit))
    if not needed:
        descriptors.check_descriptors(rank, world)
        return
    with pytest.raises(
        ConfigurationError, match=rf"is {limit} .*\. Start with ulimit -n {needed} "
    ):
        descriptors.check_descriptors(rank, world)


def test_ranks_have_short_names():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 4, 5, 6, 9]) == "ranks 0, 1, 4 to 6, 9"
    assert name_ranks(range(0, 4096, 8)) == "ranks 0, 8, ..., 4088"
    assert name_ranks(range(4096)) == "ranks 0 to 4095"
    assert name_ranks([0, 8, 16]) == "ranks 0, 8, 16"
    assert name_ranks([]) == "no rank"
    pairs = [rank for rank in range(4096) if rank % 8 < 2]
    assert name_ranks(pairs[:4]) == "ranks 0, 1, 8, 9" and len(name_ranks(pairs)) < 100
    assert name_ranks(pairs).endswith(", 56, 57 and 1008 more")
