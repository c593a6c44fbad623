# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks there are, in the order in which they run."""

from dataclasses import dataclass, replace
from importlib.util import find_spec

from scripts.gpu_check.outcome import CheckSkipped, Target

_MEGATRON_ON_NPUS = "it starts Megatron without what scripts/train/on_ascend.py brings"


@dataclass(frozen=True)
class Check:
    """One check: `run(target)` of a module, in a process of its own.

    The function returns the figures of a check that passed, and raises CheckFailed or CheckSkipped.

    shows: what it proves, for tables; limit_s: seconds that it takes at most on a GPU; gpus: how
    many it needs; on_cpu: whether it runs on a machine without any; options: further arguments of
    `run`; trains_megatron: whether it needs megatron.training; not_on_npus: why NPUs have no such
    check.
    """

    name: str
    shows: str
    module: str
    limit_s: float
    gpus: int = 1
    on_cpu: bool = False
    options: tuple[int, ...] = ()
    trains_megatron: bool = False
    not_on_npus: str = ""

    def need(self, target: Target) -> None:
        """Raise CheckSkipped, with the reason, where it cannot run."""
        if target.device == "npu" and self.not_on_npus:
            raise CheckSkipped(f"not for NPUs: {self.not_on_npus}")
        if self.trains_megatron and not _has_megatron():
            raise CheckSkipped("needs megatron.training: pip install megatron_asynchzp[megatron]")
        if target.device != "cpu":
            target.need_gpus(self.gpus)
        elif not self.on_cpu:
            what = "a GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
            raise CheckSkipped(f"needs {what}, this machine has none")


def _has_megatron() -> bool:
    try:
        return find_spec("megatron.training") is not None
    except ModuleNotFoundError:  # there is no megatron either
        return False


def _check(
    name: str,
    shows: str,
    limit_s: float,
    gpus: int = 1,
    on_cpu: bool = False,
    trains_megatron: bool = False,
    not_on_npus: str = "",
) -> Check:
    not_on_npus = _MEGATRON_ON_NPUS if trains_megatron else not_on_npus
    module = f"scripts.gpu_check.{name}"
    return Check(name, shows, module, limit_s, gpus, on_cpu, (), trains_megatron, not_on_npus)


def _parity(ranks: int) -> Check:
    shows = f"{ranks} ranks print the losses and gradient norms of stock DDP"
    one = _check("parity", shows, 400.0, ranks, on_cpu=ranks == 2, trains_megatron=True)
    return replace(one, name=f"parity_{ranks}", options=(ranks,))


def _recipe(name: str, number: int) -> Check:
    """number: of low_precision.RECIPES, which this table does not import: it needs no torch."""
    shows = f"the {name} recipe of Transformer Engine trains over shards as over stock's weights"
    one = _check("low_precision", shows, 60.0, trains_megatron=True)
    return replace(one, name=name, options=(number,))


# The limits of what one GPU can run add up to ten minutes at most, and five more for the recipes,
# which need Transformer Engine: a test holds them to it.
RECIPE_NAMES = ("tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4")
# fmt: off
CHECKS = (
    _check("loopback", "losses and gradients are bit for bit those of a plain process, whatever is "
           "late", 110.0, on_cpu=True),
    _check("side_stream", "the same where gradients appear on a second stream", 40.0),
    _check("pretrain", "pretrain_gpt on one rank in bf16: losses, step time, save, load, exit, "
           "synchronisations", 180.0, on_cpu=True, trains_megatron=True),
    _check("synchronisations", "the engine holds the host no more often than its budget", 30.0,
           not_on_npus="torch_npu writes implicit waits to stderr alone, and Python counts none"),
    _check("host_time", "host time per unit and micro-batch, idle time of the GPU, a trace", 50.0,
           on_cpu=True),
    _check("memory", "nothing grows in 200 steps and 100 evaluations", 50.0, on_cpu=True,
           not_on_npus="events that torch_npu keeps for a while are not told from a leak"),
    _check("endless", "a collective that never ends is one line and status 1", 60.0, on_cpu=True),
    _check("attention", "the PASA kernels are right, and how fast beside the others", 80.0,
           on_cpu=True, not_on_npus="Triton compiles its kernels for none"),
    *(_recipe(name, number) for number, name in enumerate(RECIPE_NAMES)),
    _parity(2), _parity(4), _parity(8),
    _check("registered", "memory registered with NCCL: symmetric kernels, losses, ten sleeps",
           160.0, gpus=2, not_on_npus="HCCL registers no memory for torch_npu's groups"),
    _check("model_parallel", "TP2 x DP2 and PP2 x DP2 with random launch delays and 1, 8 and 32 "
           "connections", 900.0, gpus=4, trains_megatron=True),
    _check("node_row", "the 9B row of one node against stock, with channel limits and priorities",
           1800.0, gpus=8, trains_megatron=True),
)
# fmt: on
