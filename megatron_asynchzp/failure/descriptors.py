# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how many files and connections a process of a run needs. Importing it loads no torch."""

import resource

from megatron_asynchzp.errors import ConfigurationError

_OF_ANY_RANK = 256  # libraries, data, gloo's groups


def refuse_few_descriptors(rank: int, world_size: int) -> None:
    """Raise ConfigurationError where a process may not have as many: rank 0, beside which the store
    is, needs two for each of `world_size` ranks, which would wait for each other there."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OF_ANY_RANK + (0 if rank else 2 * world_size)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    what = "a rank takes"
    if not rank and world_size:
        what = f"the store at which {world_size} ranks meet takes"
    raise ConfigurationError(
        f"ulimit -n is {limit} on this host: {what} {needed} files and connections; start with "
        f"ulimit -n {needed} or more"
    )
