# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Within building() no rank holds the whole model, whose values are those of one built whole."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.door.core_loop import Loop
from tests.door.test_core_loop import BF16, EXPERTS, Sizes, install
from tests.door.test_misuse import assert_each_has, refusal
from tests.door.test_whole import new_values, values_of, write
from tests.support.live_memory import counted_allocations
from tests.support.world import on_ranks

# So deep that the whole model is far more than a rank may hold.
DEEP: dict[str, Any] = {"hidden": 128, "num_layers": 12, "num_micro_batches": 1}


def build(loop: Loop, within: bool = True) -> Loop:
    from megatron_asynchzp import building

    loop.initialize()
    with building():
        loop.build_modules()
        if within:
            loop.wrap()
    if not within:
        loop.wrap()
    return loop


def built_in_shards(sizes: Sizes, options: dict) -> dict[str, Any]:
    from megatron_asynchzp import cpu_platform
    from megatron_asynchzp.mcore.run.settings import Run

    cpu_platform.install()
    install(sizes)
    results: dict[str, Any] = {"whole model": Loop(**options).build().train(0, 3)}
    loop = Loop(**options)
    loop.build_model()
    values = new_values(loop)
    write(loop, values)
    loop.make_optimizer()
    results["whole model from values"] = loop.train(0, 3)
    loop.__dict__.clear()
    with counted_allocations() as count:
        before = count.live_nbytes
        loop = build(Loop(**options), within=False)
        results["built"] = count.peak_nbytes - before
        count.reset_peak()
        write(loop, values)  # one after the other, as a bridge does
        results["written"] = count.peak_nbytes - before
        results["at once"] = max(model.peak_whole_nbytes for model in Run.current().constructions())
        read = values_of(loop)
        results["read"] = all(torch.equal(read[name], value) for name, value in values.items())
        del read
    install(sizes)  # again, as a second file of a script does it: the model is not forgotten
    loop.make_optimizer()
    units = [unit for chunk in loop.model for unit in chunk.units]
    results["shards"] = sum(unit.model_param.nbytes for unit in units)
    results["unit"] = max(unit.layout.padded_numel * unit.dtype.itemsize for unit in units)
    results["whole"] = sum(unit.layout.numel * unit.dtype.itemsize for unit in units)
    results["in shards from values"] = loop.train(0, 3)
    loop = build(Loop(**options))
    loop.make_optimizer()
    results["in shards"] = loop.train(0, 3)
    return results


def check(world: int, sizes: Sizes, options: dict) -> None:
    for results in on_ranks(built_in_shards, world, sizes, DEEP | options):
        print({name: value for name, value in results.items() if isinstance(value, int)})
        limit = results["shards"] + 2 * results["unit"]
        assert results["built"] <= limit < results["whole"], results
        # gloo's threads free their copies of what was gathered later.
        assert results["at once"] <= 2 * results["unit"]
        assert results["written"] < results["whole"], results
        assert results["read"]
        for end in ("", " from values"):
            assert results[f"in shards{end}"] == results[f"whole model{end}"]


def test_a_rank_holds_its_shards_and_two_units_while_a_model_is_built_and_written():
    check(2, (2, 2, 2), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((2, 2, 4), BF16, id="bf16"),
        pytest.param((4, 4, 4), BF16 | EXPERTS, id="ep-bf16"),
        pytest.param((2, 2, 2), {"pipeline": 2, "num_layers": 24}, id="pp"),
        pytest.param((2, 2, 2), {"tensor": 2}, id="tp"),
    ],
)
def test_a_rank_of_four_holds_its_shards_and_two_units(sizes: Sizes, options: dict):
    check(4, sizes, options)


def build_as_bridge(folder: Path) -> str:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    install((2, 2, 2))
    sys.path.append(str(folder))
    setup = import_module("megatron.bridge.training.setup")
    loop = Loop()
    loop.initialize()
    setup._build_distributed_model(loop, pg_collection=None)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    return refusal(lambda: loop.model[0](tokens, tokens, None))


def test_a_framework_that_is_imported_after_install_builds_in_shards(tmp_path: Path):
    source = tmp_path / "megatron" / "bridge" / "training" / "setup.py"
    source.parent.mkdir(parents=True)
    source.write_text("""
def _build_distributed_model(cfg, pg_collection):
    cfg.build_modules()
    cfg.wrap()
""")
    for line in on_ranks(build_as_bridge, 2, tmp_path):
        assert "was built within building()" in line


def refusals() -> dict[str, str]:
    from megatron_asynchzp import building, cpu_platform

    cpu_platform.install()
    lines = {"without install": refusal(lambda: build(Loop()))}
    install((None, None, None))
    loop = build(Loop(ddp_options={"num_distributed_optimizer_instances": 2}))
    lines["other sizes"] = refusal(loop.make_optimizer)
    loop = build(Loop())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    lines["called"] = refusal(lambda: loop.model[0](tokens, tokens, None))
    first, second = build(Loop()), None
    with building():
        second = Loop()
        second.build_modules()
    loop.modules = [*first.modules, *second.modules]
    loop.wrap()
    lines["two contexts"] = refusal(loop.make_optimizer)
    return lines


EXPECTED = {
    "without install": "building() without install(): call install() first",
    "other sizes": "a model was built in shards of P, G, O 2, 2, 2, and its Distributed",
    "called": "a model that was built within building() is called without an optimizer",
    "two contexts": "were built within 2 building() contexts; build them within one",
}


def test_each_misuse_of_building_is_one_line():
    for lines in on_ranks(refusals, 2):
        assert_each_has(EXPECTED, lines)
