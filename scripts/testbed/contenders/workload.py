# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what every contender of the comparison trains, and what it reports about a step."""

from dataclasses import dataclass, field

from scripts.testbed.megatron_flags import small_gpt

_WORDS = 128  # the vocabulary, padded


@dataclass(frozen=True)
class Workload:
    """One GPT and one global batch, equal for all.

    layer_ms: emulated forward time of a layer for one sample on one rank; its backward takes twice
    that. warm_up steps are trained and compared, not timed.
    """

    layers: int = 8
    hidden: int = 128
    seq_length: int = 64
    samples: int = 8
    layer_ms: float = 19.0
    warm_up: int = 3
    steps: int = 5
    learning_rate: float = 1e-3
    clip_grad: float = 1.0

    @property
    def layer_numel(self) -> int:
        """Parameters of one layer: matrices, biases and two norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_numel(self) -> int:
        """Parameters of the embeddings of words and positions."""
        return (_WORDS + self.seq_length) * self.hidden

    @property
    def head_numel(self) -> int:
        """Parameters of the last norm and the output layer."""
        return (_WORDS + 2) * self.hidden

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_length

    def argv(self, micro_batch: int) -> list[str]:
        """Megatron's command line, without any parallelism."""
        # fmt: off
        argv = small_gpt(
            self.layers, self.hidden, self.seq_length, words=_WORDS, micro_batch_size=micro_batch,
            global_batch_size=self.samples, train_iters=self.warm_up + self.steps + 1,
            lr=self.learning_rate, min_lr=self.learning_rate, lr_decay_style="constant",
            weight_decay=0, clip_grad=self.clip_grad, seed=1234, ddp_bucket_size=self.layer_numel,
        )
        # fmt: on
        return [*argv, "--untie-embeddings-and-output-weights"]


@dataclass
class RankReport:
    """What one rank reports of a run.

    step_s: from the begin of a step to that of the next one; node_nbytes: sent to other nodes in
    all timed steps; state_nbytes: of all tensors between two steps; exposed_s: for which
    computation waited, per step; optimizer_s: in its optimizer, per step; own_cpu_s,
    machine_cpu_s: processor time in the timed steps, of this process and of everything on the
    machine; wall_s: their length. None: not known.
    """

    losses: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    node_nbytes: int = 0
    state_nbytes: int | None = None
    peak_nbytes: int | None = None
    exposed_s: float | None = None
    optimizer_s: float = 0.0
    host_waits: int = 0
    own_cpu_s: float = 0.0
    machine_cpu_s: float = 0.0
    wall_s: float = 0.0
