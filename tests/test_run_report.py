# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a run reports of itself: bytes counted from live tensors."""

import torch


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
