# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What Megatron refuses is known before torchrun starts; what cannot be known stops nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_asynchzp.commands import validation
from tests.support.command_server import Ended, serving

_SCRIPT = str(Path(__file__).parents[2] / "scripts" / "train" / "pretrain_gpt.py")
_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 2 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 63 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data"
)


@pytest.fixture(scope="module")
def check() -> Iterator[Callable[..., Ended]]:
    """Call with the words after the model's flags."""
    with serving(validation.main) as run:
        yield lambda more, script=_SCRIPT, nodes="1": run(
            nodes, "4", script, *_MODEL.split(), *more.split()
        )


@pytest.mark.parametrize(
    "more, line",
    [
        ("--num-layrs 2", "unrecognized arguments: --num-layrs 2; the nearest to --num-layrs is "
         "--num-layers"),
        ("--seed 2 --hiden-size=4", "the nearest to --hiden-size is --hidden-size"),
        ("--use-asynchzp --qk_layernorm", "the nearest to --qk_layernorm is --qk-layernorm"),
        ("--use-asynchzp --bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        ("--use-asynchzp --tensor-model-parallel-size 3", "4 ranks are not a multiple"),
        ("--use-asynchzp --global-batch-size 6", "use a multiple of 4"),
        ("--use-asynchzp --asynchzp-param-shard-size 4 --asynchzp-optim-shard-size 2", "not nest"),
        ("--use-asynchzp --data-path absent", "absent: no dataset there"),
        ("--use-asynchzp --save runs", "add --save-interval"),
        ("--use-asynchzp --load README.md", "--load README.md is a file"),
        ("--hidden-size 65", "hidden_size"),
        ("--use-asynchzp --seq-length 64", "max_position_embeddings"),
        ("--group-query-attention --num-query-groups 3", "-attention-heads 4 is not a multiple of"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|L", "num_layers 2"),
        ("--lr-warmup-iters 2000", "assert self.lr_warmup_steps < self.lr_decay_steps"),
        ("--use-tp-pp-dp-mapping --num-experts 2 --expert-model-parallel-size 2 "
         "--pipeline-model-parallel-size 2 --disable-bias-linear", "pp-last rank ordering"),
        ("--use-asynchzp --lr abc", "--lr: invalid float value: 'abc'"),
        ("--use-asynchzp --freeze-all-layers", "--freeze-all-layers is not supported"),
        (
            "--use-asynchzp --asynchzp-memory-in-flight-gb 0.00001",
            "--asynchzp-memory-in-flight-gb: memory in flight of 1e-05 GiB",
        ),
        (
            "--use-asynchzp --tokenizer-type BertWordPieceCase",
            "--tokenizer-type BertWordPieceCase: Megatron cannot make it here",
        ),
    ],
)  # fmt: skip
def test_what_megatron_or_we_refuse_is_one_line(check, more, line):
    status, out, err = check(more)
    assert (status, out) == (2, "")
    (printed,) = err.splitlines()
    assert printed.startswith("megatron_asynchzp: ") and line in printed


@pytest.mark.parametrize(
    "nodes, more, line",
    [
        ("1:2", "--asynchzp-param-shard-size 8", "with 1 of 1 to 2 nodes: "
         "--asynchzp-param-shard-size 8 does not divide the 4 ranks of the sharding group (data x "
         "context parallel); valid values: 1, 2, 4, or node, which fits any"),
        ("2:4", "--micro-batch-size 3 --global-batch-size 24", "with 3 of 2 to 4 nodes: "
         "--global-batch-size 24 is not a multiple of --micro-batch-size 3 x 12 data-parallel "
         "ranks; use a multiple of 36 (of 144 for every number of nodes)"),
        ("1:2", "--lr abc", "--lr: invalid float value: 'abc'"),
        ("1:2", "--use-checkpoint-args --tensor-model-parallel-size 3", "-args requires --load"),
    ],
)  # fmt: skip
def test_what_some_number_of_nodes_cannot_have_is_one_line(check, nodes, more, line):
    status, _, err = check(f"--use-asynchzp {more}", nodes=nodes)
    assert status == 2 and line in err and err.count("\n") == 1


@pytest.mark.parametrize("more", ["", "--use-asynchzp"])
def test_sizes_that_every_number_of_nodes_can_have_pass(check, more):
    assert check(more, nodes="1:2") == (0, "", "")


def test_a_flag_that_is_like_none_gets_no_advice(check):
    assert "nearest" not in check("--fruit-of-the-day 3").err


@pytest.mark.parametrize("more", ["", "--use-asynchzp --bf16"])
def test_a_command_line_that_trains_passes(check, more):
    assert check(more) == (0, "", "")


@pytest.mark.parametrize(
    "text",
    [
        "import torch; torch.distributed.init_process_group('gloo')",
        "raise SystemExit(3)",
        "assert False, 'of the script'",
        "import no_such_module",
        "print('no Megatron at all')",
    ],
)
def test_a_script_that_does_not_come_to_megatrons_arguments_stops_nothing(check, tmp_path, text):
    script = tmp_path / "train.py"
    script.write_text(text + "\n")
    assert check("--num-layrs 2", str(script)) == (0, "", "")
