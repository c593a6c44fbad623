# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a CUDA graph of all micro-batches of a step, with their gathers and reductions."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.step import StepState
from megatron_asynchzp.engine.zero.unit import HZPUnit


class CapturedStep:
    """The work of a rank's model chunks between zero_grads and the update, or in an evaluation.

        main    | zero_grads | prepare | replay                     | note_replay | optimizer |
        graph                          | shards, gathers, F, B, reductions |
        order                                                              | compare |

    [Note: captured step] A replay repeats the decisions and tasks of the captured step. No event
    from outside reaches it, so nothing may be in flight before it. The graph of training rebuilds
    all shards; between two replays only an evaluation or a checkpoint does, with the same values.
    The ranks compare the captured tasks once, and then that all replay. The time limit and the roll
    call watch this comparison, which follows the replay.
    """

    def __init__(
        self,
        chunks: Sequence[HZPRuntime],
        is_training: bool,
        num_micro_batches: int,
        release: Callable[[], None],  # drops the graph
    ):
        self._chunks, self.driver = list(chunks), chunks[0].driver
        self._is_training, self.num_micro_batches = is_training, num_micro_batches
        self.release = release
        self._reached: list[set[HZPUnit]] = []  # of each chunk

    def prepare(self) -> None:
        """End everything in flight, before the capture and before each replay. Collective."""
        for chunk in self._chunks:
            chunk.barrier_on_kind_change("training" if self._is_training else "evaluation")
            if self._is_training:
                chunk.gathers.leave_to_graph()
                self.driver.timeline.leave_step()  # nothing that a mark could measure comes
            chunk.settle(reads_values=False)

    @contextmanager
    def capturing(self) -> Generator[None]:
        """Wrap the calls that are captured."""
        with self.driver.capturing():
            for chunk in self._chunks:
                # An accumulating node belongs to the stream on which it was made.
                chunk.grad_hooks.renew_accumulators(chunk.units)
                chunk.reductions.forget_events()
                chunk.gathers.enter_graph(rebuilds=self._is_training)
            yield
            for chunk in self._chunks:
                chunk.gathers.drop_spares()
        for chunk in self._chunks:
            chunk.reductions.forget_events()
            chunk.gathers.forget_events()
        self._reached = [set(chunk.reductions.reached) for chunk in self._chunks]

    def note_replay(self) -> None:
        """Note that the graph was launched. Collective."""
        if not self._is_training:
            self.driver.submitted.add("graph of an evaluation")
        for chunk, reached in zip(self._chunks, self._reached, strict=True):
            chunk.gathers.note_written()
            if self._is_training:
                chunk.state = StepState.COMPLETE
                chunk.reductions.reached = set(reached)
                chunk.order_check.start(chunk.settings_of_update(), "the graph")
