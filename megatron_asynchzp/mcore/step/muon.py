# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Muon on sharded main parameters, by Megatron's arithmetic, and Adam for all other parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from megatron.core.optimizer import (
    _get_megatron_optimizer_based_on_param_groups,
    emerging_optimizers,
)
from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    TensorParallelMuon,
    _eopt_init_state_fn,
    _get_qkv_split_shapes,
    _is_nonlinear_or_embedding,
    _muon_config_to_kwargs,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_asynchzp.engine.comm.collectives import Steps
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.zero.whole_matrices import Matrix, Pieces, Round, plan_rounds
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel

# From megatron-core 0.20 on also what a module excludes by name, as Mamba its input projection.
_has_adam = getattr(emerging_optimizers, "_is_muon_excluded", _is_nonlinear_or_embedding)

_Groups = Mapping[torch.nn.Parameter, dict[str, Any]]
"""The parameter group of each fragment."""


class ShardedMuon(TensorParallelMuon):
    """Megatron's Muon, whose parameters are 1-D fragments of matrices.

        main        momentum |          | orthogonalise 0 |          | orthogonalise 1 | update 0
        matrices             | gather 0 | gather 1        | return 0 | gather 2        | return 1

    Weight decay, momentum and the update work on the fragments. Newton-Schulz needs whole matrices:
    in each round every owner gathers one, orthogonalises it and sends it back, while the next round
    is gathered. A rank holds at most three rounds in addition to its shards. Tensor-parallel ranks
    own the same matrices in the same rounds, so Megatron may issue its own collectives between them
    while it orthogonalises (--muon-tp-mode duplicated, distributed).

    matrices are those of all ranks, in the same order on all ranks of a sharding group; fragments
    are of the model parameters that have elements on this rank.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        matrices: Sequence[Matrix],
        fragments: Mapping[torch.nn.Parameter, torch.nn.Parameter],
        driver: Driver,
        options: dict[str, Any],
    ):
        super().__init__(param_groups, **options)
        self._fragment_of = {m: fragments[m.param] for m in matrices if m.param in fragments}
        self._driver = driver
        self._rounds = list(_rounds_of(matrices))

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        group_of: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                group_of[param] = group
                self._apply_weight_decay_inplace(
                    param, param.grad, group["lr"], group["weight_decay"]
                )
                self.state[param]["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
        exchanges = (self._start(number, group_of) for number in range(len(self._rounds)))
        coming, returning = next(exchanges, None), None
        while (exchange := coming) is not None:
            coming = next(exchanges, None)
            self._orthogonalize(exchange)
            self._update(returning, group_of)
            returning = exchange
        self._update(returning, group_of)

    def _start(self, number: int, group_of: _Groups) -> "_Exchange":
        round_ = self._rounds[number]
        pieces = {matrix: self._direction(matrix, group_of) for matrix in round_.matrices}
        exchange = _Exchange(self._driver, f"round-{number}", round_, pieces)
        exchange.gather()
        return exchange

    def _direction(self, matrix: Matrix, group_of: _Groups) -> torch.Tensor:
        fragment: Any = self._fragment_of.get(matrix)
        if fragment is None:
            return torch.empty(0, device=matrix.unit.device)
        momentum = self.state[fragment]["momentum_buffer"]
        if self.nesterov:
            return fragment.grad.lerp(momentum, group_of[fragment]["momentum"])
        return momentum.clone()

    def _orthogonalize(self, exchange: "_Exchange") -> None:
        from emerging_optimizers.utils import fp32_matmul_precision

        exchange.wait()
        with fp32_matmul_precision(self.fp32_matmul_prec):
            for matrix, whole in exchange.wholes.items():
                result = self.orthogonalize(matrix.param, whole.view(matrix.shape))
                whole.copy_(result.reshape(-1))
        exchange.send_back()

    def _update(self, exchange: "_Exchange | None", group_of: _Groups) -> None:
        if exchange is None:
            return
        exchange.wait()
        for matrix, piece in exchange.pieces.items():
            if (fragment := self._fragment_of.get(matrix)) is not None:
                fragment.add_(piece, alpha=-group_of[fragment]["lr"])


class _Exchange:
    """A round in one step. Its memory belongs to the compute stream."""

    def __init__(self, driver: Driver, name: str, round_: Round, pieces: Pieces):
        self._driver, self._name, self._round = driver, name, round_
        self.pieces = pieces  # this rank's piece of every matrix: first its input, then its result
        # The matrices that this rank owns.
        self.wholes: Pieces = {
            matrix: torch.empty(matrix.numel, device=matrix.unit.device) for matrix in round_.owned
        }

    def gather(self) -> None:
        self._submit(lambda: self._round.gather_steps(self.pieces, self.wholes))

    def send_back(self) -> None:
        self._submit(lambda: self._round.return_steps(self.wholes, self.pieces))

    def _submit(self, start: Callable[[], Steps]) -> None:
        ready = (self._driver.device.record_event(),)
        task = Task("matrices", self._name, self._round.axes, start, ready)
        self._task = self._driver.submit(task)

    def wait(self) -> None:
        self._task.wait()


def _rounds_of(matrices: Sequence[Matrix]) -> Iterator[Round]:
    by_groups: dict[ShardGroups, list[Matrix]] = {}
    for matrix in matrices:
        by_groups.setdefault(matrix.unit.groups, []).append(matrix)
    for groups, together in by_groups.items():
        yield from plan_rounds(together, [cost_of(matrix.shape) for matrix in together], groups)


def cost_of(shape: Sequence[int]) -> float:
    """Count the multiplications of a Newton-Schulz step: A = X X', A A, and their sum times X."""
    short, long = sorted(shape)
    return 2.0 * short * short * long + float(short) ** 3


def muon_overrides() -> dict:
    """Return Megatron's rule: embeddings, output layers and other non-matrices have Adam."""
    return _EMERGING_OPTIMIZERS["muon"].default_param_overrides


def _matrices_of(chunk: AsyncHZPDataParallel) -> Iterator[Matrix]:
    for unit in chunk.units:
        for index, param in enumerate(unit.params):
            if unit.is_trained and not _has_adam(param):
                yield Matrix(unit, index)


def _mark_matrices(chunk: AsyncHZPDataParallel) -> None:
    qkv_split_shapes = _get_qkv_split_shapes(chunk.config)
    for name, param in chunk.named_parameters():
        marked: Any = param
        if "experts" in name and "shared" not in name:
            marked.expert_tp = True
        is_qkv = "linear_qkv.weight" in name and param.dim() == 2
        if is_qkv and param.shape[0] % sum(qkv_split_shapes) == 0:
            marked.is_qkv, marked.qkv_split_shapes = True, qkv_split_shapes


def build_muon(
    config: OptimizerConfig,
    model_chunks: Sequence[AsyncHZPDataParallel],
    param_groups: Sequence[dict[str, Any]],
    fragments: Mapping[torch.nn.Parameter, torch.nn.Parameter],
    pg_collection: ProcessGroupCollection,
) -> tuple[list[torch.optim.Optimizer], Callable]:
    """Build Muon for matrices, Adam for the rest, and the function that makes their states."""
    for chunk in model_chunks:
        _mark_matrices(chunk)
    muon = ShardedMuon(
        [group for group in param_groups if "optimizer" not in group],
        [matrix for chunk in model_chunks for matrix in _matrices_of(chunk)],
        fragments,
        model_chunks[0].communication.driver,
        _muon_config_to_kwargs(config, list(model_chunks), pg_collection),
    )
    adam_config = copy(config)
    adam_config.optimizer = "adam"
    built: Any = _get_megatron_optimizer_based_on_param_groups(
        adam_config,
        list(model_chunks),
        [group for group in param_groups if "optimizer" in group],
        skip_megatron_wrapping=True,
    )
    adam, init_adam = built

    def init_state(_: Any, config: OptimizerConfig | None = None) -> None:
        _eopt_init_state_fn(muon)
        if adam is not None:
            init_adam(adam, config)

    # If only adapters are trained, all parameters are matrices and there is no Adam.
    return [muon] if adam is None else [muon, adam], init_state
