# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's parts on made-up runs: what it reads from logs, draws, counts and refuses."""

import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scripts import quickstart
from scripts.report import loss_picture
from scripts.report.megatron_log import parse_iteration, parse_log

LINE = (
    " [2026-11-21 02:59:47.1] iteration {step:8d}/{total:8d} | consumed samples:          960 | "
    "elapsed time per iteration (ms): {ms:.1f} | learning rate: 3.000000E-04 | "
    "global batch size:    32 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def a_line(step: int, total: int, loss: float, norm: float = 1.5, ms: float = 93.1) -> str:
    return LINE.format(step=step, total=total, loss=loss, norm=norm, ms=ms)


@given(
    step=st.integers(1, 10**7),
    loss=st.floats(1e-6, 1e6),
    norm=st.floats(0, 1e4),
    ms=st.floats(0.1, 1e7),
)
def test_a_printed_step_reads_back_to_its_printed_digits(step, loss, norm, ms):
    read = parse_iteration(a_line(step, 10**7, loss, norm, ms))
    assert (read.number, read.total) == (step, 10**7)
    assert read.loss == float(f"{loss:.6E}")
    assert read.grad_norm == float(f"{norm:.3f}")
    assert read.step_ms == float(f"{ms:.1f}")


def test_a_step_of_ours_also_has_the_time_that_it_waited_for_communication():
    more = " exposed comm (ms): 8.5 | overlap (%): 91.0 |"
    read = [parse_iteration(line)[-2:] for line in (a_line(1, 2, 3.0), a_line(1, 2, 3.0) + more)]
    assert read == [(None, None), (8.5, 91.0)]


def test_other_lines_and_skipped_steps_are_no_steps():
    skipped = a_line(3, 10, 1.0).replace(" lm loss: 1.000000E+00 |", "")
    validation = "validation loss at iteration 10 on test set | lm loss value: 2.1E+00 | PPL: 8 |"
    assert parse_log(["training ...", skipped, validation, a_line(4, 10, 2.0)])[0].number == 4
    assert len(parse_log([skipped, validation])) == 0


def result(losses: list[float], nbytes: int, more="") -> quickstart.Result:
    lines = [a_line(i + 1, len(losses), loss) + more for i, loss in enumerate(losses)]
    rank = dict.fromkeys(loss_picture.STATES, nbytes) | {"peak_rss": 1}
    less = dict.fromkeys(loss_picture.STATES, nbytes // 2) | {"peak_rss": 1}
    return quickstart.Result(parse_log(lines), {"state_bytes_per_rank": [less, rank]})


def show(stock, asynchzp, folder: Path) -> str:
    console = Console(file=io.StringIO(), width=100)
    sizes = {"param": 2, "grad": 2, "optim": 4}
    quickstart.show_results(stock, asynchzp, sizes, "a title", folder, console)
    return console.file.getvalue()


def test_the_end_shows_a_table_and_a_picture(tmp_path):
    waited = " exposed comm (ms): 17.0 | overlap (%): 91.0 |"
    ours = result([5.5, 3.0, 2.000001], 2**19, more=waited)
    output = show(result([5.5, 3.0, 2.0], 2**20), ours, tmp_path)
    numbers = ("2.000001", "1.00 MiB", "0.50 MiB", "17 ms")
    for expected in (*numbers, "2 of 3"):
        assert expected in output
    for label, stock_mib, our_mib in (
        ("state at rest", 4, 2),
        ("in flight", 1, 0.5),
        ("both together", 5, 2.5),
    ):
        (line,) = (line for line in output.splitlines() if label in line)
        assert f"{stock_mib:.2f} MiB" in line and f"{our_mib:.2f} MiB" in line
    record = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in record] == ["machine", "run", "run"]
    assert record[2]["losses"] == ours.losses and record[2]["state_bytes"]["rings"] == 2**19
    header = (tmp_path / "loss.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:])
    assert header[1:4] == b"PNG" and width > 1000 and height > 500


@pytest.mark.parametrize("last", [2.1, float("inf")])
def test_losses_that_do_not_agree_fail_the_quickstart(last, tmp_path):
    stock, asynchzp = result([5.5, 2.0], 2**20), result([5.5, 2.0], 2**20)
    asynchzp.steps[-1] = asynchzp.steps[-1]._replace(loss=last)
    with pytest.raises(quickstart.QuickstartError, match="differ"):
        show(stock, asynchzp, tmp_path)


def fake_training(monkeypatch, script: str) -> None:
    """Runs `script` where torchrun would run; sys.argv holds its flags."""
    real = subprocess.Popen

    def popen(command, **kwargs):
        return real([sys.executable, "-c", script, *command[1:]], **kwargs)

    monkeypatch.setattr(quickstart.subprocess, "Popen", popen)


def train(tmp_path: Path, steps: int) -> tuple[quickstart.Result, str]:
    platform = quickstart.Platform("2 CPU ranks", 2, "gloo", {})
    console = Console(file=io.StringIO(), width=100)
    found = quickstart.train("ddp", [], platform, tmp_path, steps, console)
    return found, console.file.getvalue()


def test_a_run_is_followed_line_by_line_and_its_log_is_kept(tmp_path, monkeypatch):
    lines = "\n".join(["starting", *(a_line(i, 20, 5 - i / 10) for i in range(1, 21))])
    script = (
        f"import sys; print({lines!r})\n"
        "open(sys.argv[sys.argv.index('--report-json') + 1], 'w').write('{\"ranks\": 1}')"
    )
    fake_training(monkeypatch, script)
    found, output = train(tmp_path, 20)
    assert found.losses == pytest.approx([5 - i / 10 for i in range(1, 21)])
    assert found.report == {"ranks": 1}
    assert output.count("\n") == 10 and "step 20/20  loss 3.000" in output
    assert (tmp_path / "ddp.log").read_text().rstrip() == lines


@pytest.mark.parametrize(
    "script, output",
    [
        ("print('the reason'); raise SystemExit(3)", "status 3"),
        ("raise SystemExit(0)", "status 0"),  # no report: the run did not get to its end
        (
            "import sys; open(sys.argv[sys.argv.index('--report-json') + 1], 'w').write('{}')",
            "printed 0 of 20 losses",
        ),
    ],
)
def test_a_run_that_fails_is_reported_with_its_log(script, output, tmp_path, monkeypatch):
    fake_training(monkeypatch, script)
    with pytest.raises(quickstart.QuickstartError, match=output) as failure:
        train(tmp_path, 20)
    assert str(tmp_path / "ddp.log") in str(failure.value)


def test_a_text_that_does_not_exist_is_one_line(tmp_path, capsys):
    arguments = ["--text", str(tmp_path / "absent.txt"), "--output", str(tmp_path / "out")]
    assert quickstart.main(arguments) == 1
    line = f"quickstart: input does not exist: {tmp_path / 'absent.txt'}"
    assert capsys.readouterr().err.strip().splitlines()[-1] == line


@pytest.mark.slow
def test_the_whole_quickstart_in_a_few_steps(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 2000)
    arguments = ["--steps", "4", "--ranks", "2", "--text", tmp_path / "text.txt"]
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.quickstart", *arguments, "--output", out],
        capture_output=True,
        text=True,
        cwd=quickstart.ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "loss.png").stat().st_size > 10_000
    report = json.loads((out / "asynchzp.json").read_text())
    assert report["world_size"] == 2
