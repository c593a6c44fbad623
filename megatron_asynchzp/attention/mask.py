# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which keys a query may attend.

Every structured mask is a range of keys per query, and kernels need only that.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class KeyRanges(NamedTuple):
    """Query i attends the keys start_S[i] <= j < stop_S[i]: int32, [S].

    Neither ever falls from one query to the next, so the queries of a key are a range as well.
    """

    start_S: torch.Tensor
    stop_S: torch.Tensor

    def transposed(self, num_keys: int) -> "KeyRanges":
        """Return per key the range that covers all queries that attend it: int32, [T]."""
        keys = torch.arange(num_keys, dtype=torch.int32, device=self.start_S.device)
        first = torch.searchsorted(self.stop_S, keys, right=True, out_int32=True)
        last = torch.searchsorted(self.start_S, keys, right=True, out_int32=True)
        return KeyRanges(first, torch.maximum(first, last))


@dataclass(frozen=True)
class PackedSequences:
    """Sequences that lie one after another along the queries and along the keys."""

    cu_seqlens_q: torch.Tensor  # [N + 1], where sequence n begins; the last entry is the end
    cu_seqlens_k: torch.Tensor
    # [N], real tokens of each; None if there is no padding, which lies between the last real token
    # and the next sequence and attends nothing
    lengths_q: torch.Tensor | None = None
    lengths_k: torch.Tensor | None = None

    @property
    def has_padding(self) -> bool:
        return self.lengths_q is not None or self.lengths_k is not None

    def of_queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _starts_and_lengths(self.cu_seqlens_q, self.lengths_q)

    def of_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _starts_and_lengths(self.cu_seqlens_k, self.lengths_k)


def _starts_and_lengths(cu_seqlens, lengths) -> tuple[torch.Tensor, torch.Tensor]:
    cu_seqlens = cu_seqlens.long()
    room = cu_seqlens.diff()
    return cu_seqlens[:-1], room if lengths is None else torch.minimum(lengths.long(), room)


@dataclass(frozen=True)
class AttentionMask:
    """Which of `num_keys` keys each of `num_queries` queries attends.

    A query that may attend nothing gives zeros, and an LSE of -inf.
    """

    num_queries: int
    num_keys: int
    # query i of a sequence with S queries and T keys attends keys up to i + T - S, so that the last
    # query sees the last key
    is_causal: bool = False
    # number of keys to the left and right of that diagonal; -1 is no limit
    window: tuple[int, int] | None = None
    packed: PackedSequences | None = None  # sequences that must not see each other; batch size 1
    # (queries, keys) of chunks of consecutive queries: the diagonal of each ends at that many keys,
    # and it sees no further. Keys may not become fewer from one chunk to the next. (Ranks of
    # context parallelism hold an early and a late chunk.)
    chunks: tuple[tuple[int, int], ...] = ()
    # [B or 1, 1, S, T] bool, any further rule; there are no key ranges then
    allowed: torch.Tensor | None = None

    def __post_init__(self):
        if self.chunks:
            queries, keys = zip(*self.chunks, strict=True)
            if sum(queries) != self.num_queries or sorted(keys) != list(keys):
                raise ValueError(f"chunks {self.chunks} do not make up {self.num_queries} queries")
            if self.packed is not None:
                raise ValueError("packed sequences cannot be cut into chunks")
        if self.window is not None and min(self.window) < -1:
            raise ValueError(f"window {self.window}: sizes are -1 (no limit) or more")

    @property
    def is_full(self) -> bool:
        return (
            not self.is_causal
            and self.left_and_right == (-1, -1)
            and not (self.packed or self.has_unused_keys or self.chunks)
            and self.allowed is None
        )

    @property
    def has_unused_keys(self) -> bool:
        """Whether no query may attend some keys, whose memory may hold anything then."""
        return self.allowed is not None or (self.packed is not None and self.packed.has_padding)

    @property
    def left_and_right(self) -> tuple[int, int]:
        """The window, with causality as its right side; -1 is no limit."""
        left, right = self.window or (-1, -1)
        return left, 0 if self.is_causal else right

    @property
    def may_leave_queries_out(self) -> bool:
        """Whether some queries may attend nothing; served_queries_BS says which.

        True for all packed sequences, to avoid a wait for lengths that lie on a device.
        """
        if self.packed is not None or self.has_unused_keys:
            return True
        right = self.left_and_right[1]
        chunks = self.chunks or ((self.num_queries, self.num_keys),)
        # The diagonal of query 0 ends at key (keys - queries), and it sees `right` further.
        return any(not keys or 0 <= right < queries - keys for queries, keys in chunks)

    def key_ranges(self, device: torch.device | str = "cpu") -> KeyRanges:
        """Return the mask as ranges. Raises ValueError if `allowed` is given."""
        if self.allowed is not None:
            raise ValueError("an arbitrary mask is not one range of keys per query")
        rows = torch.arange(self.num_queries, device=device)
        if self.packed is not None:
            (start_q, len_q), (start_k, len_k) = (
                [x.to(device) for x in pair]
                for pair in (self.packed.of_queries(), self.packed.of_keys())
            )
            owner = torch.searchsorted(start_q, rows, right=True) - 1
            row = rows - start_q[owner]
            first, keys = start_k[owner], len_k[owner]
            is_real = row < len_q[owner]
            diagonal = row + keys - len_q[owner]
        else:
            first, is_real = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
            diagonal, keys = self._chunk_diagonals(rows)
        left, right = self.left_and_right
        zero = torch.zeros_like(rows)
        start = zero if left < 0 else (diagonal - left).clamp(min=0)
        stop = keys if right < 0 else torch.minimum(keys, (diagonal + 1 + right).clamp(min=0))
        stop = torch.where(is_real, stop, keys)
        start = torch.where(is_real, torch.minimum(start, stop), stop)
        return KeyRanges((first + start).int(), (first + stop).int())

    def _chunk_diagonals(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return per query the last key its diagonal meets, and how many keys its chunk sees."""
        diagonal, keys = torch.empty_like(rows), torch.empty_like(rows)
        first = 0
        for queries, seen in self.chunks or ((self.num_queries, self.num_keys),):
            here = slice(first, first + queries)
            diagonal[here], keys[here] = rows[:queries] + seen - queries, seen
            first += queries
        return diagonal, keys

    def by_chunk(self) -> list[tuple[slice, "AttentionMask"]]:
        parts, first = [], 0
        for queries, keys in self.chunks or ((self.num_queries, self.num_keys),):
            here = slice(first, first + queries)
            allowed = None if self.allowed is None else self.allowed[:, :, here, :keys]
            parts.append(
                (
                    here,
                    replace(self, num_queries=queries, num_keys=keys, chunks=(), allowed=allowed),
                )
            )
            first += queries
        return parts

    def allowed_BHST(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the mask as booleans, [B or 1, 1, S, T], True for a key that the query attends."""
        if self.allowed is not None:
            device = self.allowed.device if device is None else device
            rest = replace(self, allowed=None)
            allowed = self.allowed.to(device)
            return allowed if rest.is_full else allowed & rest.allowed_BHST(device)
        ranges = self.key_ranges(device or "cpu")
        keys = torch.arange(self.num_keys, device=ranges.start_S.device)
        start, stop = ranges.start_S[:, None], ranges.stop_S[:, None]
        return ((start <= keys) & (keys < stop))[None, None]

    def served_queries_BS(self, device: torch.device | str | None = None) -> torch.Tensor:
        if self.allowed is not None:
            return self.allowed_BHST(device).any(3)[:, 0]
        ranges = self.key_ranges(device or "cpu")
        return (ranges.start_S < ranges.stop_S)[None]

    def used_keys_BT(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the keys that some query attends, [B or 1, T]. Others must not reach a mean."""
        if self.allowed is not None:
            return self.allowed_BHST(device).any(2)[:, 0]
        if self.packed is None or not self.packed.has_padding:
            return torch.ones(1, self.num_keys, dtype=torch.bool, device=device)
        starts, lengths = self.packed.of_keys()
        keys = torch.arange(self.num_keys, device=starts.device)
        owner = torch.searchsorted(starts, keys, right=True) - 1
        return (keys - starts[owner] < lengths[owner])[None].to(device)
