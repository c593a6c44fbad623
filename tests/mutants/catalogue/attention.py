# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: PASA."""

from tests.mutants.catalogue.mutant import Mutant

_EXACT = "tests/attention/test_equivalence.py::test_in_fp64_every_mode_is_softmax_attention"

MUTANTS = [
    Mutant(
        "psi-term",
        "scores of blocks with different shifts are compared in one frame",
        "attention/reference/block.py",
        "score = score + scale * gemm(q_BGND.to(vector), c_BGD1, vector)",
        "pass",
        _EXACT,
    ),
    Mutant(
        "r-term",
        "dQ has the part that the shift took off the keys",
        "attention/reference/block.py",
        "return ds_BGNn.sum(-1, keepdim=True) * c_BG1D",
        "return 0 * c_BG1D",
        _EXACT,
    ),
    Mutant(
        "shifted-lse",
        "the LSE is that of the true scores",
        "attention/reference/block.py",
        "true_lse_BGN = lse_BGN + frame_BGN[..., 0]",
        "true_lse_BGN = lse_BGN",
        _EXACT,
    ),
    Mutant(
        "published-psi-term",
        "scores of blocks with different means are compared in one frame",
        "attention/reference/paper.py",
        "new = block_maximum + inv * (block.mean_BGN - new_average)",
        "new = block_maximum",
        _EXACT,
    ),
    Mutant(
        "recovery-factor",
        "Inv = beta / (1 - beta)",
        "attention/shifting.py",
        "return beta / (1 - beta)",
        "return 1 / (1 - beta)",
        "tests/attention/test_shifting.py::"
        "test_the_recovery_factors_of_blocks_of_128_are_those_of_the_paper",
    ),
    Mutant(
        "shift-of-masked-keys",
        "keys that nobody attends do not reach the mean",
        "attention/key_shift.py",
        "k_BGTD = zero_unused(k_BGTD, used_BT)\n    with torch.no_grad():\n"
        "        shift_BGJD, mean_BG1D = _means",
        "pass\n    with torch.no_grad():\n        shift_BGJD, mean_BG1D = _means",
        "tests/attention/test_delegate.py::test_padding_may_hold_anything",
    ),
    Mutant(
        "values-are-not-restored",
        "what is taken off the values is added to the output",
        "attention/key_shift.py",
        "return output_BHSE + shift_BHSE",
        "return output_BHSE",
        "tests/attention/test_delegate.py::test_in_fp64_it_is_softmax_attention_and_its_gradients",
    ),
]
