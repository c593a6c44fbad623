# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one check: `python -m scripts.gpu_check.child NAME MODULE TARGET [OPTION ...]`.

It writes NAME.json, an Outcome, to the folder of the target.
"""

import importlib
import json
import sys
import time
import traceback

from scripts.gpu_check.outcome import (
    FAILED,
    PASSED,
    SKIPPED,
    CheckFailed,
    CheckSkipped,
    Outcome,
    Target,
)


def run(name: str, module: str, target: Target, options: list[int]) -> Outcome:
    """Run a check; an error that it did not foresee is a failure."""
    start_s = time.monotonic()
    try:
        figures = importlib.import_module(module).run(target, *options)
        outcome = Outcome(name, PASSED, figures=figures)
    except CheckSkipped as skipped:
        outcome = Outcome(name, SKIPPED, str(skipped))
    except CheckFailed as failed:
        outcome = Outcome(name, FAILED, str(failed), figures=failed.figures)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(name, FAILED, " ".join(f"{type(error).__name__}: {error}".split()))
    outcome.seconds = time.monotonic() - start_s
    return outcome


def main(argv: list[str]) -> int:
    name, module, text, *options = argv
    target = Target.from_text(text)
    outcome = run(name, module, target, [int(option) for option in options])
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
        distributed.destroy_process_group()
    (target.folder / f"{name}.json").write_text(json.dumps(outcome.as_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
