# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`install`, which a script calls before its framework builds a model."""

import os

from megatron_asynchzp.engine.failure.descriptors import check_descriptors
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.door.frameworks import patch_frameworks
from megatron_asynchzp.mcore.door.seams import SEAM, door_patches
from megatron_asynchzp.mcore.door.settings import check_choices_have_effect
from megatron_asynchzp.mcore.flags.config import OPTIONS, AsyncHZPConfig, flag_of
from megatron_asynchzp.mcore.process.platform import choose_platform
from megatron_asynchzp.mcore.process.refusal import world_size
from megatron_asynchzp.mcore.run.settings import Run
from megatron_asynchzp.mcore.start.startup import patch_megatron
from megatron_asynchzp.mcore.step.ending import report_own_errors


def install(config: AsyncHZPConfig | None = None) -> None:
    """Let megatron.core's DistributedDataParallel and get_megatron_optimizer be AsyncHZP's.

    Call it before a model is built; frameworks may have been imported. A model is whole until its
    optimizer is made, and stays whole without one.

    Args:
        config: The choices of the run; without it those of `AsyncHZPConfig.of_environment()`.

    Raises:
        ConfigurationError: The process has other choices already, a choice has no effect here, or
        megatron-core is not a tested one.
    """
    config = AsyncHZPConfig.of_environment() if config is None else config
    check_descriptors(int(os.environ.get("RANK", "0")), world_size() or 0)
    check_choices_have_effect(config)
    raise_first(config.faults_of_run(world_size()))
    if (run := Run.current()) is not None:
        _check_same_choices(run, config)
        return
    choose_platform(["--asynchzp-device", config.device])
    patch_megatron(door_patches())
    patch_frameworks()
    report_own_errors()
    Run.begin_installed(config, SEAM)


def _check_same_choices(run: Run, config: AsyncHZPConfig) -> None:
    if run.config is None:
        raise ConfigurationError(
            "install() within a Megatron-LM run, whose flags were read already; give it "
            "--use-asynchzp instead"
        )
    for name in OPTIONS:
        was, now = getattr(run.config, name), getattr(config, name)
        if was != now:
            raise ConfigurationError(
                f"install() with {flag_of(name)} {now} after one with {was}; call it once"
            )
