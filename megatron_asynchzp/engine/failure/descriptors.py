# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the files and connections of a process of a run. Importing it loads no torch."""

import resource

from megatron_asynchzp.errors import ConfigurationError

_OF_ANY_RANK = 256  # libraries, data, gloo's groups


def check_descriptors(rank: int, world_size: int) -> None:
    """Raise ConfigurationError if this process may not open the files and connections it needs.

    Rank 0, which is next to the store, needs two for each rank.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OF_ANY_RANK + (0 if rank else 2 * world_size)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    user = "a rank"
    if not rank and world_size:
        user = f"the store at which {world_size} ranks meet"
    raise ConfigurationError(
        f"ulimit -n is {limit} on this host, but {user} takes {needed} files and connections. "
        f"Start with ulimit -n {needed} or more."
    )
