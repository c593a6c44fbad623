# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Recorded steps with all their waits, in every order in which devices may start collectives."""

from itertools import islice, product

import pytest

from scripts.launch_order.commands import HOST, commands_of, num_waits
from scripts.launch_order.interleavings import Device, search
from scripts.launch_order.record import unmet_of
from scripts.testbed.device.worlds import DeviceWorlds
from tests.support.planted_circles import DEVICES, exchanges
from tests.support.recorded_steps import LAYOUTS, recorded


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_order_of_a_recorded_step_ends_in_a_circle_and_every_planted_one_is_found(
    worlds: DeviceWorlds, name: str
):
    """As we ship it, with NCCL's implicit order, on every device. Without it, where the device has
    room for all communicators. 4 of 20 planted circles are in each layout."""
    programs = [commands_of(lines) for lines in recorded(worlds, LAYOUTS[name])]
    assert len(programs) == LAYOUTS[name].ranks
    assert unmet_of([[met for one in each for met in one.meetings] for each in programs]) == []
    assert all(num_waits(program) > 100 for program in programs)
    has_host_waits = any(one.stream == HOST for program in programs for one in program)
    # Megatron's norm of the gradients, and its log.
    assert has_host_waits == (name not in ("library", "cut", "cut-twice"))
    for num_queues, num_places in product((1, 2, 4, 8, 32), (1, 2, 4, 8)):
        shipped = Device(num_queues, num_places, in_host_order=True)
        assert search(programs, shipped) == ((), 1, True), shipped
        if num_places == 1 and len(programs) == 4:  # of 8 ranks there are too many
            every = search(programs, shipped, is_reduced=False)
            assert every.is_all and every.num_states > 1000, shipped
        if num_places == 8:
            roomy = Device(num_queues, num_places)
            assert search(programs, roomy) == ((), 1, True), roomy
    for planted in islice(exchanges(programs, seed=1), 4):
        for device in DEVICES:
            assert search(planted, device).circle, device
