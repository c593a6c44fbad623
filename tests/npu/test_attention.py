# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""PASA through npu_fusion_attention, with torch_npu's own autograd, by every mask."""

from typing import NamedTuple

import pytest
import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from megatron_asynchzp.attention.pasa import choose_vendor, delegate_attention
from megatron_asynchzp.attention.vendors import Sdpa
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.attention.paper_data import Inputs, normal_inputs, relative_rmse
from scripts.testbed.device.worlds import DeviceWorlds
from tests.attention.cases import cumulative, exact, masks, with_garbage
from tests.support.selection import slow_unless

SCALE = 0.21
REFUSED = {"packed causal, more queries": "attend nothing"}
REFUSED |= dict.fromkeys(("packed, padded", "padding"), "no padding")
MASKS = masks() | {
    "packed window": AttentionMask(
        60,
        60,
        is_causal=True,
        window=(7, -1),
        packed=PackedSequences(cumulative(20, 40), cumulative(20, 40)),
    ),
    "padding, causal": AttentionMask(
        40, 40, is_causal=True, allowed=(torch.arange(40) < 25).expand(1, 1, 40, 40)
    ),
}
# Both round alike; which of the two is nearer by a tenth is chance.
ROUNDING = 1.1


class Errors(NamedTuple):
    """RMS errors of output, dq, dk and dv over the truth in fp64; unserved: the largest output of
    a query that attends nothing."""

    ours: list[float]
    by_sdpa: list[float]
    unserved: float


def errors_of(
    names: list[str], dtypes: list[torch.dtype], shifts_values: bool
) -> dict[tuple[str, torch.dtype], Errors | str]:
    """Or why npu-fusion refused."""
    found = {}
    for name in names:
        for dtype in dtypes:
            try:
                found[name, dtype] = _errors(MASKS[name], dtype, shifts_values)
            except ConfigurationError as error:
                found[name, dtype] = str(error)
    return found


def _errors(mask: AttentionMask, dtype: torch.dtype, shifts_values: bool) -> Errors:
    drawn = normal_inputs(mask, heads=4, groups=2, dim=24)
    inputs = drawn._replace(k=drawn.k + 3, v=drawn.v + 5).to(dtype)
    given = (
        with_garbage(inputs, mask, 7.0)
        if mask.has_unused_keys and (not mask.used_keys_BT().all())
        else inputs
    )

    def ours(call: AttentionCall) -> torch.Tensor:
        return delegate_attention(call, "npu-fusion", shifts_values=shifts_values)

    seen = _through_autograd(ours, given, mask, "npu")
    by_sdpa = _through_autograd(Sdpa().run, inputs, mask, "cpu")
    output, _lse, *grads = exact(inputs.to(torch.float64), mask, SCALE)
    true = [output, *grads]
    is_left_out = ~mask.served_queries_BS()[:, None, :, None]
    unserved = seen[0].masked_fill(~is_left_out, 0).abs().max().item()
    return Errors(
        [relative_rmse(*pair) for pair in zip(seen, true, strict=True)],
        [relative_rmse(*pair) for pair in zip(by_sdpa, true, strict=True)],
        unserved,
    )


def _through_autograd(
    attend, inputs: Inputs, mask: AttentionMask, device: str
) -> list[torch.Tensor]:
    leaves = [x.to(device).requires_grad_() for x in inputs[:3]]
    output = attend(AttentionCall(*leaves, mask, SCALE))
    grads = torch.autograd.grad(output, leaves, inputs.d_output.to(device))
    return [x.cpu() for x in (output.detach(), *grads)]


def judge(found: dict[tuple[str, torch.dtype], Errors | str]) -> None:
    for (name, dtype), errors in found.items():
        if name in REFUSED:
            assert REFUSED[name] in errors, (name, errors)
            continue
        assert errors.unserved == 0, (name, dtype)
        for ours, theirs in zip(errors.ours, errors.by_sdpa, strict=True):
            assert ours <= ROUNDING * theirs, (name, dtype, errors)


@pytest.mark.parametrize(
    ("names", "dtypes", "shifts_values"),
    [
        slow_unless(True, list(MASKS)[::8], [torch.bfloat16], False),
        slow_unless(False, list(MASKS), [torch.bfloat16], False),
        slow_unless(False, list(MASKS), [torch.float32, torch.float16], False),
        slow_unless(False, list(MASKS), [torch.float32, torch.float16, torch.bfloat16], True),
    ],
)
def test_by_every_mask_pasa_on_npu_fusion_is_no_further_from_fp64_than_sdpa(
    npu_worlds: DeviceWorlds, names: list[str], dtypes: list[torch.dtype], shifts_values: bool
):
    (found,) = npu_worlds.run(errors_of, 1, names, dtypes, shifts_values)
    judge(found)


def choices() -> list[str]:
    """Of auto, on a device; for tensors that torch_npu has."""
    names = []
    for heads, dim, mask in (
        (2, 8, MASKS["full"]),
        (257, 8, MASKS["full"]),
        (2, 769, MASKS["full"]),
    ):
        x = normal_inputs(mask, heads=heads, groups=heads, dim=dim).to(torch.bfloat16)
        call = AttentionCall(*(part.to("npu") for part in x[:3]), mask, SCALE)
        names.append(choose_vendor(call).name)
    return names


def test_what_the_operator_cannot_do_goes_to_torchs_attention(npu_worlds: DeviceWorlds):
    assert npu_worlds.run(choices, 1) == [["npu-fusion", "sdpa", "sdpa"]]
