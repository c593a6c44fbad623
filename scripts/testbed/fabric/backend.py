# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the torch.distributed backend "fabric".

Its process groups behave like NCCL's (one operation of a group after the other, asynchronous to the
caller) over a modelled network.

    from scripts.testbed import fabric
    network = fabric.register()              # the profile of ASYNCHZP_FABRIC_*
    dist.init_process_group("fabric")        # or dist.new_group(backend="fabric")
    ...
    network.counters.snapshot()              # wire bytes, operations, busy seconds

What it models: links, first come, first served by whole messages; rings whose steps follow each
other. What it does not: packets, congestion, rings pipelined in chunks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from scripts.testbed.fabric import rings
from scripts.testbed.fabric.group import BACKEND, LaneGroup
from scripts.testbed.fabric.lane import FabricWork
from scripts.testbed.fabric.network import Link, Network
from scripts.testbed.fabric.reduction import reduction_of
from scripts.testbed.fabric.staging import (
    copy_unless_same,
    described,
    flattened,
    staged,
    staged_all,
)
from scripts.testbed.profile import NetworkProfile, profile_from_env

Tensors = list[torch.Tensor]


def register(profile: NetworkProfile | None = None) -> Network:
    """Make the backend known to torch; groups created from now on belong to the network returned.

    profile: None for that of the environment. All ranks must register the same one.
    """
    network = Network(profile or profile_from_env())

    def create(options: Any, _backend_options: Any = None) -> FabricGroup:
        return FabricGroup(options, network)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return network


class FabricGroup(LaneGroup):
    """The collectives of a group."""

    # ---- flat

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> FabricWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> FabricWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._check_multiple("all_gather", whole=output, part=input)

        def run(link: Link) -> None:
            for output, input in zip(outputs, inputs):
                with staged(output) as flat:
                    chunks = flat.view(link.size, -1)
                    copy_unless_same(chunks[link.rank], flattened(input))
                    rings.ring_all_gather(link, chunks)

        return self._submit("all_gather", described(outputs), outputs, run)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> FabricWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> FabricWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._check_multiple("reduce_scatter", whole=input, part=output)
        how = reduction_of(opts, inputs)

        def run(link: Link) -> None:
            for output, input in zip(outputs, inputs):
                chunks = how.prescaled(flattened(input)).view(link.size, -1)
                with staged(output) as own:
                    rings.ring_reduce_scatter(link, chunks, own, how)

        return self._submit("reduce_scatter", f"{how.name} {described(inputs)}", outputs, run)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        how = reduction_of(opts, tensors)

        def run(link: Link) -> None:
            for tensor in tensors:
                with staged(tensor) as flat:
                    copy_unless_same(flat, how.prescaled(flat))
                    rings.ring_all_reduce(link, flat, how)

        return self._submit("all_reduce", f"{how.name} {described(tensors)}", tensors, run)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> FabricWork:
        output_sizes = self._split_numels("output", output, output_splits)
        input_sizes = self._split_numels("input", input, input_splits)

        def run(link: Link) -> None:
            with staged(output) as flat:
                pieces = flattened(input).split(input_sizes)
                rings.pairwise_all_to_all(link, flat.split(output_sizes), pieces)

        return self._submit("all_to_all", str(input.dtype), [output], run)

    # What torch called them before 2.13; its C++ looks for both, and passes by position, so the
    # names of the parameters need not be those of torch's stubs.
    allreduce_coalesced = allreduce
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType]
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # pyright: ignore[reportAssignmentType]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # pyright: ignore[reportAssignmentType]

    # ---- lists: torch nests them one deeper than there are devices in a process

    def allgather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None):
        (outputs,), (input,) = output_lists, inputs
        self._check_equal("all_gather", outputs, input)

        def run(link: Link) -> None:
            with staged_all(outputs) as chunks:
                copy_unless_same(chunks[link.rank], flattened(input))
                rings.ring_all_gather(link, chunks)

        return self._submit("all_gather", described(outputs), output_lists, run)

    def reduce_scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any = None):
        (output,), (inputs,) = outputs, input_lists
        self._check_equal("reduce_scatter", inputs, output)
        how = reduction_of(opts, outputs)

        def run(link: Link) -> None:
            chunks = [how.prescaled(flattened(input)) for input in inputs]
            with staged(output) as own:
                rings.ring_reduce_scatter(link, chunks, own, how)

        return self._submit("reduce_scatter", f"{how.name} {described(inputs)}", outputs, run)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> FabricWork:
        if not len(outputs) == len(inputs) == self._size:
            raise ValueError(f"all_to_all: needs {self._size} outputs and inputs, one per rank")

        def run(link: Link) -> None:
            with staged_all(outputs) as pieces:
                rings.pairwise_all_to_all(link, pieces, [flattened(input) for input in inputs])

        return self._submit("all_to_all", str(inputs[0].dtype), outputs, run)

    # ---- with a root

    def broadcast(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        root = opts.rootRank if opts is not None else 0

        def run(link: Link) -> None:
            for tensor in tensors:
                with staged(tensor) as flat:
                    rings.chain_broadcast(link, flat, root)

        return self._submit("broadcast", f"from {root} {described(tensors)}", tensors, run)

    def reduce(self, tensors: Tensors, opts: Any) -> FabricWork:
        how, root = reduction_of(opts, tensors), opts.rootRank

        def run(link: Link) -> None:
            for tensor in tensors:
                with staged(tensor) as flat:
                    partial = how.prescaled(flat)
                    rings.chain_reduce(link, partial, root, how)
                    if link.rank == root:
                        copy_unless_same(flat, partial)

        detail = f"{how.name} to {root} {described(tensors)}"
        return self._submit("reduce", detail, tensors, run)

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> FabricWork:
        (input,), root = inputs, opts.rootRank
        outputs = output_lists[0] if self._rank == root else []
        if self._rank == root:
            self._check_equal("gather", outputs, input)

        def run(link: Link) -> None:
            with staged_all(outputs) as pieces:
                rings.gather_to(link, flattened(input), pieces, root)

        return self._submit("gather", f"to {root} {described(inputs)}", output_lists, run)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> FabricWork:
        (output,), root = outputs, opts.rootRank
        inputs = input_lists[0] if self._rank == root else []
        if self._rank == root:
            self._check_equal("scatter", inputs, output)

        def run(link: Link) -> None:
            with staged(output) as own:
                rings.scatter_from(link, own, [flattened(input) for input in inputs], root)

        return self._submit("scatter", f"from {root} {described(outputs)}", outputs, run)

    def barrier(self, opts: Any = None) -> FabricWork:
        return self._submit("barrier", "", [], rings.dissemination_barrier)

    # ---- checks, before anything is queued

    def _check_multiple(self, kind: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != self._size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{kind}: {described([whole])} is not {self._size} times {described([part])}: "
                "every rank must give equally many elements of one dtype"
            )

    def _check_equal(self, kind: str, pieces: Tensors, own: torch.Tensor) -> None:
        kinds = {(piece.numel(), piece.dtype) for piece in [*pieces, own]}
        if len(pieces) != self._size or len(kinds) != 1:
            raise ValueError(
                f"{kind}: needs {self._size} pieces as large as this rank's {described([own])}, "
                f"got {', '.join(described([piece]) for piece in pieces)}"
            )

    def _split_numels(self, name: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank of an all-to-all; rows are split, evenly where none are given."""
        rows = tensor.shape[0] if tensor.dim() else 1
        splits = list(splits) or [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise ValueError(
                f"all_to_all: {rows} rows of {name} do not split into {self._size} parts {splits}"
            )
        return [size * (tensor.numel() // max(rows, 1)) for size in splits]
