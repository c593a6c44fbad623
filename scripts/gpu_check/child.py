# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The process of one check: `python -m scripts.gpu_check.child NAME MODULE DEVICE NUM_GPUS FOLDER
[OPTION ...]` writes FOLDER/NAME.json, an Outcome."""

import importlib
import json
import sys
import time
import traceback
from pathlib import Path

from scripts.gpu_check.outcome import (
    FAILED,
    PASSED,
    SKIPPED,
    CheckFailed,
    CheckSkipped,
    Outcome,
    Place,
)


def run(name: str, module: str, place: Place, options: list[int]) -> Outcome:
    """The outcome of one check; an error that it did not foresee is a failure."""
    start_s = time.monotonic()
    try:
        figures = importlib.import_module(module).run(place, *options)
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
    name, module, device, num_gpus, folder, *options = argv
    place = Place(device, int(num_gpus), Path(folder))
    outcome = run(name, module, place, [int(option) for option in options])
    (place.folder / f"{name}.json").write_text(json.dumps(outcome.as_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
