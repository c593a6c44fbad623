# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher as a user meets it: processes, exit statuses, and what they print."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest

from megatron_asynchzp.attention import inspect
from scripts.testbed.launches import Ended, launch
from tests.support.selection import slow_unless

_ROOT = Path(__file__).parents[1]
_OWN_SCRIPT = _ROOT / "scripts" / "train" / "pretrain_gpt.py"
_LEGACY_SCRIPT = _ROOT / "tests" / "support" / "legacy_pretrain.py"

# A checkout of core_v0.19.0 or 0.20 whose scripts are run unmodified; no copy is kept here.
_CHECKOUT = os.environ.get("MEGATRON_LM")

TOY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --lr-decay-iters 3 "
    "--eval-iters 1 --eval-interval 100 --log-interval 1 --split 90,5,5 --mock-data"
)
_HYBRID = (
    TOY.replace("--num-layers 2", "--hybrid-layer-pattern *-*-")
    + " --spec megatron_asynchzp.cpu_platform.local_hybrid local_hybrid_stack_spec"
)


def _losses(ended: list[Ended]) -> list[tuple[str, str]]:
    """Loss and gradient norm of each step, which one of the ranks has printed."""
    text = "".join(rank.text for rank in ended)
    assert [rank.status for rank in ended] == [0] * len(ended), text[-4000:]
    losses = re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", text)
    assert len(losses) == 3
    return losses


@contextmanager
def torchrun(
    folder: Path, ranks: int, words: list[str], module: str = "torch.distributed.run", **env: str
) -> Iterator[subprocess.Popen]:
    """torchrun with these words, the leader of a group; its output goes to folder/log."""
    command = [sys.executable, "-m", module, "--standalone"]
    command += ["--nproc-per-node", str(ranks), *words]
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"} | env
    env = os.environ | {"PYTHONPATH": str(_ROOT)} | env
    with open(folder / "log", "wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=folder, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()  # where it still runs, it ends its ranks
        process.wait(timeout=90)


def await_third_step(process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 180
    while " iteration        3/" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.1)


def _unmodified(name: str, line: str):
    """A case that trains with Megatron's own script `name`, wherever a checkout is given."""
    mark = pytest.mark.skipif(
        not _CHECKOUT,
        reason=f"to train with Megatron's own {name}, set MEGATRON_LM=/path/to/Megatron-LM "
        "(a checkout of core_v0.19.0 or 0.20)",
    )
    return pytest.param(Path(_CHECKOUT or "", name), line, id=Path(name).stem, marks=mark)


# --- what is refused ---------------------------------------------------------------------------


def _python_m(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_asynchzp.launch", *words]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "words, status, output",
    [
        ([], 2, "megatron_asynchzp: no training script is given; name one that ends in .py"),
        (["--use-asynchzp"], 2, "megatron_asynchzp: no training script is given"),
        (["--help"], 0, "usage: torchrun"),
        (["nowhere/train.py"], 2, "megatron_asynchzp: nowhere/train.py: no such script\n"),
    ],
)
def test_without_a_script_the_usage_or_what_is_missing_is_printed(words, status, output):
    ended = _python_m(*words)
    assert ended.returncode == status
    assert (ended.stderr if status else ended.stdout).startswith(output)
    assert not status or ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flags, output",  # before Megatron is imported, and when it has parsed its flags
    [
        ("--skip-train", "--skip-train is not supported"),
        ("--asynchzp-grad-slot-mb 0", "--asynchzp-grad-"),
    ],
)
def test_bad_input_ends_before_training_in_one_line_with_status_2(tmp_path, flags, output):
    line = f"{TOY} --use-asynchzp --asynchzp-device cpu {flags}"
    (ended,) = launch(tmp_path, _LEGACY_SCRIPT, line)
    assert ended.status == 2
    last = ended.own_lines[-1]
    assert last.startswith(f"megatron_asynchzp: {output}") and ended.text.endswith(last + "\n")
    assert "Traceback" not in ended.text and "lm loss" not in ended.text


def test_a_wrong_megatron_version_ends_in_one_line_with_status_2(tmp_path):
    """The script's folder comes first in sys.path, as its megatron would in a checkout."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text('__version__ = "0.17.1"\n')
    script = tmp_path / "train.py"
    script.write_text('print("the script was run")\n')
    ended = _python_m(str(script))
    assert ended.returncode == 2 and "the script was run" not in ended.stdout
    (line,) = ended.stderr.splitlines()
    assert line.startswith("megatron_asynchzp: megatron-core 0.17.1 was found") and "0.18" in line


def test_a_checkout_without_compiled_helpers_borrows_those_of_the_wheel(tmp_path):
    core = tmp_path / "megatron" / "core"
    (core / "datasets").mkdir(parents=True)
    for name in ("__init__.py", "datasets/__init__.py"):
        (core / name).write_text("")
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megatron_asynchzp.mcore.process import platform\n"
        "platform.lend_dataset_helpers()\n"
        "import megatron.core, megatron.core.datasets.helpers_cpp as helpers\n"
        "print(megatron.core.__file__, helpers.__file__)\n"
    )
    env = os.environ | {"PYTHONPATH": str(_ROOT)}
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    used, helpers = ended.stdout.split()
    assert used.startswith(str(tmp_path)) and not helpers.startswith(str(tmp_path))


def test_all_ranks_fail_but_only_the_first_speaks(tmp_path):
    """Under torchrun, which ends the others as soon as one rank has failed."""
    flags = f"{TOY} --use-asynchzp --skip-train --asynchzp-device cpu".split()
    words = ["-m", "megatron_asynchzp.launch", str(_LEGACY_SCRIPT), *flags]
    with torchrun(tmp_path, 2, words) as process:
        assert process.wait(timeout=300) != 0
    line = "megatron_asynchzp: --skip-train is not supported"
    assert (tmp_path / "log").read_text().count(line) == 1


def test_an_edited_script_prints_our_errors_in_one_line_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import megatron_asynchzp.mcore.adaptor\n"
        "from megatron.training.arguments import parse_and_validate_args\n"
        "parse_and_validate_args()\n"
    )
    command = [sys.executable, "-W", "ignore", str(script), *TOY.split(), "--use-asynchzp"]
    command += ["--freeze-all-layers"]
    env = os.environ | {"PYTHONPATH": str(_ROOT)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "megatron_asynchzp: --freeze-all-layers is not supported" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- what runs ---------------------------------------------------------------------------------


def test_the_script_runs_as_python_would_run_it(tmp_path):
    (tmp_path / "neighbour.py").write_text('WORD = "hello"\n')
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, neighbour\nprint(__name__, neighbour.WORD, sys.argv[1:], __file__)\n"
    )
    (ended,) = launch(tmp_path, script, "--flag value")
    assert ended.status == 0
    assert f"__main__ hello ['--flag', 'value'] {script}" in ended.text


_SHARDED = "--use-asynchzp --use-distributed-optimizer --overlap-grad-reduce"


@pytest.mark.parametrize(
    "script, line",
    [
        # Ours trains in the next test, too.
        slow_unless(False, _OWN_SCRIPT, TOY, id="own"),
        pytest.param(_LEGACY_SCRIPT, TOY, id="model_provider"),
        _unmodified("pretrain_gpt.py", TOY),
        _unmodified("pretrain_hybrid.py", _HYBRID),
    ],
)
def test_a_script_trains_with_use_asynchzp_as_it_does_without(tmp_path, script, line):
    assert script.is_file(), f"{script}: no such script; is MEGATRON_LM a checkout?"
    device = "--asynchzp-device cpu"
    stock = launch(tmp_path, script, f"{line} {device}", world_size=2)
    sharded = launch(tmp_path, script, f"{line} {device} {_SHARDED}", world_size=2)
    assert _losses(sharded) == _losses(stock)
    output = [text for text in sharded[0].own_lines if "use_distributed_optimizer = False" in text]
    assert len(output) == 1


# In place of --mock-data: conversations, whose lengths Megatron's data set does not pad.
_CHATS = "--sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format identity"
_CHATS += " --no-create-attention-mask-in-dataloader --split 80,20,0 --position-embedding-type rope"
_CHATS += " --seq-length 64 --max-position-embeddings 64 --global-batch-size 8"
_CHATS += " --hidden-dropout 0 --attention-dropout 0 --calculate-per-token-loss"
_CHATS += " --use-pasa-attention --dataloader-type single --asynchzp-device cpu"


def _write_chats(folder: Path) -> str:
    """Packed conversations of 5 to 64 tokens, their tokenizer, and the flags that name both."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    words = [*special.values(), *(f"w{number}" for number in range(60))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.save_pretrained(folder / "tokenizer")
    chance = random.Random(5)

    def messages(length: int) -> Iterator[dict[str, str]]:
        for role, count in (("system", 2), ("user", 2), ("assistant", length - 4)):
            content = "".join(f"{chance.choice(words[3:])} " for _ in range(count))
            yield {"role": role, "content": content}

    with open(folder / "chats.jsonl", "w") as file:
        for _ in range(40):
            left, packed = 64, []
            while left:
                length = chance.choice([5, 6, 7, 15, 16, 33])
                length = length if left - length > 4 else left
                packed += messages(length)
                left -= length
            file.write(json.dumps({"messages": packed}) + "\n")
    places = {
        "tokenizer-model": "tokenizer",
        "data-path": "chats.jsonl",
        "data-cache-path": "cache",
    }
    return " ".join(f"--{flag} {folder / name}" for flag, name in places.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, line",
    [_unmodified("pretrain_gpt.py", TOY), _unmodified("pretrain_hybrid.py", _HYBRID)],
)
def test_megatrons_own_script_trains_on_the_sub_samples_of_its_own_data_set(tmp_path, script, line):
    pytest.importorskip("datasets")
    line = f"{line.replace('--split 90,5,5 --mock-data', _CHATS)} {_write_chats(tmp_path)}"
    line = line.replace("--eval-iters 1", "--eval-iters 2")
    runs = [launch(tmp_path, script, line)]
    routed = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16"
    routed += " --use-asynchzp --asynchzp-param-shard-size 1 --asynchzp-grad-shard-size 2"
    runs.append(launch(tmp_path, script, f"{line} {routed}", world_size=4))
    packed, found = map(_losses, runs)
    for (loss, norm), (expected, expected_norm) in zip(found, packed, strict=True):
        assert float(loss) == pytest.approx(float(expected), rel=1e-6) and norm == expected_norm
    texts = ["".join(rank.text for rank in ended) for ended in runs]
    packed, found = (re.findall(r"validation loss .*?lm loss value: (\S+)", text) for text in texts)
    assert len(packed) == len(found) > 0
    assert [float(loss) for loss in found] == pytest.approx(
        [float(loss) for loss in packed], rel=1e-6
    )


_TAGS = {
    "asynchzp/exposed-communication-ms",
    "asynchzp/overlap-percent",
    "asynchzp/gathers-per-step",
    "asynchzp/reductions-per-step",
    "asynchzp/bytes-at-rest",
    "asynchzp/bytes-in-flight",
}


def test_a_short_run_prints_little_of_ours_and_nothing_twice_and_its_scalars_can_be_read_back(
    tmp_path,
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    line = TOY.replace("--train-iters 3", "--train-iters 8") + " --use-asynchzp"
    saves = f"--save {tmp_path / 'runs'} --save-interval 4 --tensorboard-dir {tmp_path / 'events'}"
    ended = launch(tmp_path, _OWN_SCRIPT, f"{line} {saves}", world_size=2)
    assert [one.status for one in ended] == [0, 0], ended[0].text[-3000:]
    text = "".join(one.text for one in ended)
    assert "CPU RNG state changed" not in text and "Theoretical memory" not in text
    below = ended[0].text.split("AsyncHZP groups of rank 0\n")[1].splitlines()
    titles = ("  ", "Bytes per rank", "Units")
    table = list(takewhile(lambda row: row.startswith(titles), below))
    own = [row for one in ended for row in one.own_lines] + table
    assert 10 < len(own) <= 60
    assert not [row for row in set(own) if own.count(row) > 1]

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= _TAGS
    for tag in _TAGS:
        found = events.Scalars(tag)
        assert [one.step for one in found] == list(range(1, 9))
    gathers = {one.step: one.value for one in events.Scalars("asynchzp/gathers-per-step")}
    del gathers[1]  # which knew no order yet
    after_save = gathers.pop(5)
    assert len(set(gathers.values())) == 1 and gathers[2] >= 2 * 2  # micro-batches, layers
    # The checkpoint dropped what was gathered ahead: at most each of five units is gathered again.
    assert gathers[2] < after_save <= gathers[2] + 5
    at_rest = {one.value for one in events.Scalars("asynchzp/bytes-at-rest")}
    assert len(at_rest) == 1 and at_rest.pop() > 100_000


@pytest.mark.slow
def test_queries_and_keys_of_a_step_are_captured_for_the_inspector(tmp_path, capsys):
    line = f"{TOY} --asynchzp-device cpu --asynchzp-capture-attention 2:{tmp_path / 'qk.pt'}"
    ended = launch(tmp_path, _OWN_SCRIPT, f"{line} --use-asynchzp", world_size=2)
    assert len(_losses(ended)) == 3
    assert sum("2 layers of step 2 are in" in text for text in ended[0].own_lines) == 1
    assert inspect.main([str(tmp_path / "qk.pt")]) in (0, 1)
    assert "decoder.layers.1.self_attention" in capsys.readouterr().out
