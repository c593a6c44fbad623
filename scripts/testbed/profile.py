# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the description of a modelled network: named profiles, and variables that change them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite

_PREFIX = "ASYNCHZP_FABRIC_"


class ProfileError(ValueError):
    """A profile that does not exist or a value that is no speed, time or number of ranks."""


@dataclass(frozen=True)
class NetworkProfile:
    """Speeds of a cluster, as one node sees it.

    inter_gbit: Gbit/s of a node's link to the others, each way; intra_gbit: of the traffic among
    the ranks of one node, all together; inf is not modelled. *_latency_us: from the end of
    sending to arrival, per message. ranks_per_node: global ranks [k x n, (k + 1) x n) are node k.
    """

    name: str = "unlimited"
    inter_gbit: float = inf
    intra_gbit: float = inf
    inter_latency_us: float = 0.0
    intra_latency_us: float = 0.0
    ranks_per_node: int = 1

    def __post_init__(self):
        for field in ("inter_gbit", "intra_gbit"):
            if not getattr(self, field) > 0:
                raise ProfileError(f"{field} must be above 0 (inf: not modelled)")
        for field in ("inter_latency_us", "intra_latency_us"):
            if not (getattr(self, field) >= 0 and isfinite(getattr(self, field))):
                raise ProfileError(f"{field} must be a finite number of microseconds, 0 or more")
        if self.ranks_per_node < 1:
            raise ProfileError("ranks_per_node must be at least 1")

    @property
    def is_modelled(self) -> bool:
        """Whether anything is slower than the machine itself."""
        latency_us = self.inter_latency_us + self.intra_latency_us
        return latency_us > 0 or min(self.inter_gbit, self.intra_gbit) < inf

    def node_of(self, global_rank: int) -> int:
        return global_rank // self.ranks_per_node

    def gbit(self, is_inter: bool) -> float:
        return self.inter_gbit if is_inter else self.intra_gbit

    def latency_s(self, is_inter: bool) -> float:
        return 1e-6 * (self.inter_latency_us if is_inter else self.intra_latency_us)


# A machine moves about 8 Gbit/s over its loopback: real clusters are scaled to 1 Gbit/s between
# nodes, keeping the ratio of the two links. 0.953 is what TCP leaves of a line of 1 Gbit/s.
PROFILES = {
    profile.name: profile
    for profile in (
        NetworkProfile("unlimited"),
        NetworkProfile("ethernet-1g", inter_gbit=0.953),
        NetworkProfile("ethernet-500m", inter_gbit=0.4765),
        NetworkProfile("nvlink-over-infiniband", inter_gbit=1.0, intra_gbit=9.0),
        NetworkProfile("pcie-over-roce", inter_gbit=1.0, intra_gbit=2.5),
        NetworkProfile("uniform-1g", inter_gbit=1.0, intra_gbit=1.0),
        # For models of a few million parameters. Nine to one is eight links of 400 Gbit/s against
        # NVLink; half of that between nodes; and so fast that a step has little to hide.
        NetworkProfile("slow-between-nodes", 0.125, 1.125, 100.0, 20.0),
        NetworkProfile("slower-between-nodes", 0.0625, 1.125, 100.0, 20.0),
        NetworkProfile("fast", 1.25, 4.5, 20.0, 10.0),
    )
}

_FIELDS = {
    "INTER_GBIT": ("inter_gbit", float),
    "INTRA_GBIT": ("intra_gbit", float),
    "INTER_LATENCY_US": ("inter_latency_us", float),
    "INTRA_LATENCY_US": ("intra_latency_us", float),
    "RANKS_PER_NODE": ("ranks_per_node", int),
}


def named_profile(name: str, **changes: float) -> NetworkProfile:
    """A profile of PROFILES with some fields changed."""
    if name not in PROFILES:
        raise ProfileError(f"network profile {name!r} is not one of {', '.join(PROFILES)}")
    return replace(PROFILES[name], **changes)


def profile_from_env(env: Mapping[str, str] = os.environ) -> NetworkProfile:
    """Return the profile that ASYNCHZP_FABRIC_PROFILE names, unlimited if it is not set.

    ASYNCHZP_FABRIC_{INTER_GBIT, INTRA_GBIT, INTER_LATENCY_US, INTRA_LATENCY_US, RANKS_PER_NODE}
    change it. Without the last, the ranks that torchrun started together (LOCAL_WORLD_SIZE) are a
    node.
    """
    changes = {}
    if env.get("LOCAL_WORLD_SIZE", "").isdigit():
        changes["ranks_per_node"] = int(env["LOCAL_WORLD_SIZE"])
    for suffix, (field, number) in _FIELDS.items():
        text = env.get(_PREFIX + suffix)
        if not text:
            continue
        try:
            changes[field] = number(text)
        except ValueError:
            raise ProfileError(f"{_PREFIX}{suffix}={text}: not a number") from None
    try:
        return named_profile(env.get(_PREFIX + "PROFILE") or "unlimited", **changes)
    except ProfileError as error:
        raise ProfileError(f"{_PREFIX}*: {error}") from None


def profile_to_env(profile: NetworkProfile) -> dict[str, str]:
    """The environment that makes profile_from_env return `profile`, for ranks to be started."""
    env = {_PREFIX + suffix: str(getattr(profile, field)) for suffix, (field, _) in _FIELDS.items()}
    return env | {_PREFIX + "PROFILE": profile.name if profile.name in PROFILES else "unlimited"}
