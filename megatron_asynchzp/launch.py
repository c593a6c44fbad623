# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`torchrun ... -m megatron_asynchzp.launch SCRIPT [args]` runs an unmodified Megatron-LM script
with `--use-asynchzp` available. Owns the command line; knows nothing of what the script does.
"""

import runpy
import sys
from pathlib import Path

USAGE = """\
usage: torchrun [torchrun options] -m megatron_asynchzp.launch SCRIPT [arguments of SCRIPT]

Runs a Megatron-LM training script, such as pretrain_gpt.py of core_v0.19.0, as it is, and adds to
its flags:
  --use-asynchzp                      train with hierarchical ZeRO
  --asynchzp-param-shard-size RANKS   ranks per copy of the parameters (default: ranks of a node)
  --asynchzp-grad-shard-size RANKS    ranks per copy of the gradients (default: ranks of a node)
  --asynchzp-optim-shard-size RANKS   ranks per copy of the optimizer state (default: all)
  --asynchzp-schedule {inline,main-thread,threaded}
                                      who drives the collectives (default: threaded)
  --asynchzp-prefetch-depth UNITS     units of each size gathered ahead (default: 1)
  --no-asynchzp-check-order           do not compare the ranks' order of collectives every step
  --asynchzp-trace FILE               write a Chrome trace of one step
  --asynchzp-verify {full,structure}  what --load reads to find damage (default: full, all data)
  --asynchzp-device {auto,cpu}        auto: CPU with gloo where there is no accelerator
  --use-pasa-attention                shift keys by their mean in every attention layer
  --pasa-mode {delegate,block}        by the fastest attention present, or by our own kernels
  --pasa-vendor NAME                  the attention that mode delegate uses (default: auto)
  --pasa-shift-values                 shift values too; one more activation per layer
"""

# As argparse exits for a wrong command line.
_EXIT_USAGE = 2


def main(argv: list[str]) -> None:
    """Run the script argv[0] with the arguments argv[1:], as `python SCRIPT` would."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    if not argv or argv[0].startswith("-"):
        print(USAGE, end="", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    script = Path(argv[0])
    if not script.is_file():
        print(f"megatron_asynchzp: {script}: no such script\n\n{USAGE}", end="", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    run_script(script, argv[1:])


def run_script(script: Path, arguments: list[str]) -> None:
    """Patch Megatron, then run `script` as __main__; ends with one line on an error of ours."""
    # The script's folder comes first, so that a Megatron checkout is what gets patched.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
    from megatron_asynchzp.mcore import startup

    try:
        startup.prepare_process(arguments)
        runpy.run_path(str(script), run_name="__main__")
    except startup.OWN_ERRORS as error:
        startup.report(error)
        sys.exit(_EXIT_USAGE)
    except (Exception, KeyboardInterrupt) as error:
        startup.end_training(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
