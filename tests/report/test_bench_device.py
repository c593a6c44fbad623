# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The end of the measurement of schedules on the emulated device."""

from math import nan
from typing import Any
from unittest import mock

import pytest

from scripts.bench import bench_device
from scripts.bench.device_steps import MEGATRON_FSDP_2

RIGHT, WRONG, LOST = [2.5, 2.25], [2.5, 2.2501], [2.5, nan]


class Worlds:
    """In place of DeviceWorlds: every world has the stated losses of contenders."""

    def __init__(self, losses: dict[str, list[float]]):
        times = {"step_ms": 11.0, "floor_ms": 10.0}
        self._seen = {(name, False): times | {"losses": each} for name, each in losses.items()}

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, *_: Any, **__: Any) -> list[dict]:
        return [self._seen]


@pytest.mark.parametrize("label", ["", " before"])
@pytest.mark.parametrize("wrong", [WRONG, LOST], ids=["other", "nan"])
@pytest.mark.parametrize(
    ("names", "status"),
    [
        pytest.param({}, 0, id="none"),
        pytest.param({MEGATRON_FSDP_2}, 0, id="a result, which the table says"),
        pytest.param({"hsdp"}, 1, id="a peer"),
        pytest.param({"hsdp", MEGATRON_FSDP_2}, 1, id="a peer beside a result"),
    ],
)
def test_only_losses_of_megatron_fsdp_v2_may_be_others_than_the_first_contenders(
    wrong: list[float], names: set[str], status: int, label: str, capsys: pytest.CaptureFixture
):
    losses = {name: wrong if name in names else RIGHT for name in bench_device.SHARDED}
    argv = ["--clusters", "2x2", "--queues", "1", "--label", label]
    ended = 0
    with mock.patch.object(bench_device, "DeviceWorlds", lambda _: Worlds(losses)):
        try:
            bench_device.main(argv)
        except SystemExit as end:
            ended = end.code
    assert ended == status
    printed = capsys.readouterr().out
    for name in names:
        assert f"{name}{label}" in printed.splitlines()[-1]
    assert ("other losses than" in printed) == bool(names)
