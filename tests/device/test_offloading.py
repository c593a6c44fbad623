# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Activations that Megatron offloads, by its own hooks and by Transformer Engine's, on the emulated
device under the watch: the bits of the run without that."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import Steps
from tests.device.test_transformer_engine import (
    BASE,
    FUSED,
    FUSES_EXPERTS,
    GROUPED_EXPERTS,
    OURS,
    train,
)

pytestmark = pytest.mark.slow

# fmt: off
FINE = ["--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "0",
        "--offload-modules"]
OFFLOADED = {
    "modules": ([], [*FINE, "core_attn", "attn_proj", "qkv_linear", "attn_norm", "mlp_norm"]),
    "experts": (GROUPED_EXPERTS, [*FINE, "expert_fc1", "moe_act"]),
    "fused experts": ([*GROUPED_EXPERTS, *FUSED], [*FINE, "fused_group_mlp"]),
    "layers": (["--num-layers", "4"], ["--cpu-offloading-num-layers", "2"]),
}
# fmt: on


def train_both(line: Sequence[str], offloaded: Sequence[str]) -> list[list[tuple[Steps, int]]]:
    """Without offloading and with it, by law and sizes, with the number of copies to the host."""
    from megatron.core.pipeline_parallel import utils
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        ChunkOffloadHandler as Modules,
    )
    from transformer_engine.pytorch import cpu_offload
    from transformer_engine.pytorch.cpu_offload import OffloadableLayerState as State

    from scripts.testbed.device import inside

    pop, copied, found = Modules.tensor_pop, [], []
    # Tensors of a small model are below its bound.
    code = State._check_if_offload.__code__
    consts = tuple(0 if one == 256 * 1024 else one for one in code.co_consts)
    is_taken = FunctionType(code.replace(co_consts=consts), vars(cpu_offload))

    def noted_pop(self: Any, tag: Any) -> Any:
        """The watch takes memory for free that Megatron's next copy orders before it takes it."""
        tensor = pop(self, tag)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def noted(self: Any, tensor: torch.Tensor) -> bool:
        if is_copied := is_taken(self, tensor):
            copied.append(tensor.nbytes)
        return is_copied

    with (
        # There is no such library without a driver.
        mock.patch.object(utils, "set_ideal_affinity_for_current_gpu", lambda: None),
        mock.patch.object(Modules, "tensor_pop", noted_pop),
        mock.patch.object(
            Modules, "offload", autospec=True, side_effect=Modules.offload
        ) as offload,
        mock.patch.object(State, "_check_if_offload", noted),
    ):
        for law, sizes in OURS[:3]:
            inside.set_delays(law, dist.get_rank(), dist.get_world_size())
            runs = []
            for flags in ([], offloaded):
                steps = train([*line, *size_flags(sizes), *flags]).steps
                runs.append((steps, offload.call_count + len(copied)))
            found.append(runs)
    return found


@pytest.mark.parametrize("name", OFFLOADED)
def test_activations_that_megatron_offloads_change_no_bit(te_worlds: DeviceWorlds, name: str):
    more, offloaded = OFFLOADED[name]
    env = FUSES_EXPERTS | {"NVTE_CPU_OFFLOAD_V1": "1"}
    line = [*BASE, "--bf16", *more]
    found = te_worlds.run(train_both, 2, line, offloaded, timeout_s=590, env=env)[0]
    copies = 0
    for (without, few), (with_it, many) in found:
        assert with_it == without and len(without) == 4
        assert few == copies < many
        copies = many
