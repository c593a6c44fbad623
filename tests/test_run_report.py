# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a run reports of itself: bytes counted from live tensors, and a greedy sample."""

import torch
import torch.distributed as dist

from scripts.testbed.ranks import run_ranks

VOCAB, STOP = 11, 10


def stock_like_chunk(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module whose gradients are views of one fp32 buffer, as in Megatron's DDP, and its Adam
    over fp32 copies (over the parameters themselves in fp32), after one step."""
    chunk = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(dtype)
    params = list(chunk.parameters())
    buffer = torch.zeros(sum(p.numel() for p in params) + 28)  # 28 elements of padding
    offset = 0
    for param in params:
        param.main_grad = buffer[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    main = params if dtype == torch.float32 else [p.detach().float() for p in params]
    optimizer = torch.optim.AdamW(main)
    for param in main:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return chunk, optimizer


def test_every_state_of_stock_counts_once():
    from scripts.train.run_report import state_bytes

    numel, steps = 8 * 8 + 8 + 8 * 4 + 4, 4 * 4  # one fp32 step count per parameter
    chunk, optimizer = stock_like_chunk(torch.bfloat16)
    assert state_bytes([chunk], [optimizer]) == {
        "model_param": 2 * numel,
        "main_grad": 4 * (numel + 28),
        "main_param": 4 * numel,
        "optimizer_state": 8 * numel + steps,
        "rings": 0,
    }
    chunk, optimizer = stock_like_chunk(torch.float32)
    held = state_bytes([chunk], [optimizer])
    assert held["model_param"] == 4 * numel and held["main_param"] == 0


class Successor(torch.nn.Module):
    """Predicts t + 1 after t; the first token of a full window is not special."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(VOCAB).roll(1, dims=1))
        self.longest = 0

    def forward(self, ids, positions, future):
        assert not self.training and future.shape == (1, 1, ids.shape[1], ids.shape[1])
        assert torch.equal(future[0, 0], positions[0][None, :] > positions[0][:, None])
        self.longest = max(self.longest, ids.shape[1])
        dist.all_reduce(torch.zeros(1))  # as a wrapper that gathers: hangs if ranks differ
        return self.weight[ids]


def sample_on_this_rank() -> list:
    from scripts.train.run_report import greedy_sample

    model = Successor()
    stopped = greedy_sample(model, [7], 50, seq_length=4, stop_id=STOP)
    limited = greedy_sample(model, [0, 1], 6, seq_length=4, stop_id=STOP)
    assert model.training and model.longest == 4
    with torch.no_grad():
        model.weight.copy_(torch.eye(VOCAB))  # every token follows itself
    stuck = greedy_sample(model, [3], 500, seq_length=4, stop_id=STOP)
    return [stopped, limited, stuck]


def test_the_greedy_sample_is_the_likeliest_path_and_equal_on_all_ranks():
    expected = [[7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 6, 7], [3] * 24]
    assert run_ranks(sample_on_this_rank, 2) == [expected, expected]
