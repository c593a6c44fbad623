# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`torchrun ... -m megatron_asynchzp.launch SCRIPT [args]` runs an unmodified Megatron-LM script
with `--use-asynchzp` available.
"""

import runpy
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

_SYNOPSIS = "torchrun [torchrun options] -m megatron_asynchzp.launch SCRIPT [arguments of SCRIPT]"
_PURPOSE = """\
Runs a Megatron-LM training script, such as pretrain_gpt.py of core_v0.19.0, as it is, and adds to
its flags:"""

# As argparse exits for a wrong command line.
_EXIT_USAGE = 2


def usage() -> str:
    """What --help prints, from the flags themselves."""
    from megatron_asynchzp.mcore.attention.flags import add_pasa_arguments
    from megatron_asynchzp.mcore.flags.asynchzp import add_asynchzp_arguments

    parser = ArgumentParser(
        usage=_SYNOPSIS,
        description=_PURPOSE,
        add_help=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    return add_pasa_arguments(add_asynchzp_arguments(parser)).format_help()


def main(argv: list[str]) -> None:
    """Run the script argv[0] with the arguments argv[1:], as `python SCRIPT` would."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage(), end="")
        return
    if not argv or argv[0].startswith("-"):
        print(usage(), end="", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    script = Path(argv[0])
    if not script.is_file():
        print(f"megatron_asynchzp: {script}: no such script\n\n{usage()}", end="", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    run_script(script, argv[1:])


def run_script(script: Path, arguments: list[str]) -> None:
    """Patch Megatron, then run `script` as __main__; ends with one line on an error of ours. With
    --asynchzp-dry-run nothing is started."""
    # The script's folder comes first, so that a Megatron checkout is what gets patched.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
    from megatron_asynchzp.dry_run import command
    from megatron_asynchzp.mcore.process import ending, startup

    try:
        if (asked := command.asked_of(arguments)) is not None:
            sys.exit(command.dry_run(script, arguments, asked))
        startup.prepare_process(arguments)
        runpy.run_path(str(script), run_name="__main__")
    except ending.OWN_ERRORS as error:
        ending.report(error)
        sys.exit(_EXIT_USAGE)
    except (Exception, KeyboardInterrupt) as error:
        ending.end_training(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
