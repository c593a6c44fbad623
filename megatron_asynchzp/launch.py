# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs an unmodified Megatron-LM script, as SCRIPT, with the flags of this package added.

`torchrun ... -m megatron_asynchzp.launch SCRIPT [arguments of SCRIPT]`
"""

import os
import runpy
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from megatron_asynchzp.commands import launch_words
from megatron_asynchzp.commands.meeting import check_meeting, torchrun_options
from megatron_asynchzp.errors import ConfigurationError, MissingPackage
from megatron_asynchzp.mcore.flags.arguments import add_asynchzp_arguments
from megatron_asynchzp.mcore.flags.pasa import add_pasa_arguments
from megatron_asynchzp.mcore.process.refusal import (
    EXIT_USAGE,
    check_or_exit,
    refused_in_one_line,
    world_size,
)

_SYNOPSIS = (
    "torchrun [torchrun options] -m megatron_asynchzp.launch SCRIPT [arguments of SCRIPT]\n"
    "       asynchzp launch [torchrun options] SCRIPT [arguments of SCRIPT]\n"
    "       asynchzp dry-run [torchrun options] SCRIPT [arguments of SCRIPT]"
)
_PURPOSE = """\
Runs an unmodified Megatron-LM training script, such as pretrain_gpt.py of core_v0.19.0, with these
further flags:"""


def usage() -> str:
    """Return the text of --help, from the flags themselves."""
    parser = ArgumentParser(
        usage=_SYNOPSIS,
        description=_PURPOSE,
        add_help=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    return add_pasa_arguments(add_asynchzp_arguments(parser)).format_help()


@refused_in_one_line()
def main(argv: list[str]) -> None:
    """Run the script argv[0] with the arguments argv[1:], as `python SCRIPT` would."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage(), end="")
        return
    if not argv or argv[0].startswith("-"):
        launch_words.refuse_as_script(argv)
    script = Path(argv[0])
    launch_words.check_script(script)
    check_or_exit(argv[1:], world_size())
    launch_words.check_packages(argv[1:])
    run_script(script, argv[1:])


@refused_in_one_line()
def start(argv: list[str]) -> None:
    """Check a command line once, then become torchrun, whose ranks run `main`.

    `asynchzp launch [options of torchrun] SCRIPT [arguments of SCRIPT]`: SCRIPT is the first word
    that ends in .py. In a process that is a rank already (torchrun --no-python), run `main`.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(usage(), end="")
        return
    if "RANK" in os.environ:
        launch_words.check_rank(argv)
        main(argv)
        return
    options, script, arguments = launch_words.split_at_script(argv)
    launch_words.check_script(Path(script))
    known = torchrun_options(options)
    _check_counts(known)
    check_or_exit(arguments, _world_size(known))
    launch_words.check_packages(arguments)
    _prepare_restarts(known)
    check_meeting(known)
    if known.nproc_per_node.isdecimal():
        _let_megatron_check(script, arguments, known)
    run = ["-m", "megatron_asynchzp.commands.torchrun", *options, "-m", __name__]
    os.execv(sys.executable, [sys.executable, *run, script, *arguments])


@refused_in_one_line()
def dry_run(argv: list[str]) -> None:
    """Print the tables of the run that `asynchzp launch` of the same words would start.

    Without options of torchrun, or if only torchrun knows the ranks, --asynchzp-dry-run chooses.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(usage(), end="")
        return
    options, script, arguments = launch_words.split_at_script(argv)
    known = torchrun_options(options)
    _check_counts(known)
    ranks = _world_size(known) if options else None
    check_or_exit(arguments, ranks)
    if options and known.nproc_per_node.isdecimal():
        # As torchrun would set it in the ranks.
        os.environ["LOCAL_WORLD_SIZE"] = known.nproc_per_node
    # First, so that a number of ranks among the arguments comes later and counts.
    main([script, "--asynchzp-dry-run", str(ranks or 0), *arguments])


def _world_size(known: Namespace) -> int | None:
    """Return the ranks that torchrun would start, None if only torchrun knows (auto, a range)."""
    counts = (known.nnodes, known.nproc_per_node)
    return int(counts[0]) * int(counts[1]) if all(map(str.isdecimal, counts)) else None


def _check_counts(options: Namespace) -> None:
    """Raise ConfigurationError for numbers of ranks or nodes that torchrun cannot read."""
    per_node, nodes, fault = options.nproc_per_node, options.nnodes, ""
    if per_node not in _COUNTED_BY_TORCHRUN and not _is_count(per_node):
        counted = ", ".join(_COUNTED_BY_TORCHRUN)
        fault = f"--nproc-per-node {per_node}: give a number of ranks above 0, or one of {counted}"
    ends = nodes.split(":")
    if len(ends) > 2 or not all(map(_is_count, ends)) or int(ends[0]) > int(ends[-1]):
        fault = f"--nnodes {nodes}: give a number of nodes above 0, or a range MIN:MAX"
    if fault:
        raise ConfigurationError(fault)


_COUNTED_BY_TORCHRUN = ("auto", "gpu", "cpu", "xpu")


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def _let_megatron_check(script: str, arguments: list[str], options: Namespace) -> None:
    """End the process with one line for a command line that Megatron or --use-asynchzp refuses.

    A child process imports Megatron once, before the ranks would each end in torchrun's table.
    """
    line = "importing Megatron to check the command line; each rank will import it once more"
    print(f"megatron_asynchzp: {line}", flush=True)
    words = [options.nnodes, options.nproc_per_node, script, *arguments]
    command = [sys.executable, "-m", "megatron_asynchzp.commands.validation", *words]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=_CHECKED_S)
    except subprocess.TimeoutExpired:
        return  # it waits for something that torchrun may give it
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    if done.returncode == EXIT_USAGE:
        print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
        sys.exit(EXIT_USAGE)


_CHECKED_S = 300.0
_EXIT_INTERRUPTED = 130  # a shell's status for SIGINT


def _prepare_restarts(options: Namespace) -> None:
    """Let restarted ranks meet, or raise ConfigurationError if torchrun restarts one node alone."""
    ends = [int(end) for end in options.nnodes.split(":")]
    fewest, most = ends[0], ends[-1]
    may_restart, may_change = options.max_restarts != "0", fewest < most
    if not may_restart and not may_change:
        return
    if options.rdzv_backend == "static" and not options.standalone and most > 1:
        flag = f"--nnodes {options.nnodes}"
        if may_restart:
            flag = f"--max-restarts {options.max_restarts}"
        raise ConfigurationError(
            f"{flag}: with a static rendezvous (--master-addr, --master-port) the other nodes "
            "never hear of a restart, and wait; give --rdzv-backend c10d --rdzv-endpoint "
            "HOST:PORT instead"
        )
    if may_change and not may_restart:
        line = f"--nnodes {options.nnodes} without --max-restarts: a lost node ends the run"
        print(f"megatron_asynchzp: {line}", flush=True)
    # Otherwise they find the addresses of the ranks before them in torchrun's store (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@refused_in_one_line()
def run_script(script: Path, arguments: list[str]) -> None:
    """Patch Megatron, then run `script` as __main__, or its dry run."""
    # The script's folder comes first, so that a Megatron checkout is what gets patched.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
    from megatron_asynchzp.commands import dry_run as command

    asked = command.asked_of(arguments)
    try:
        from megatron_asynchzp.mcore.start import startup
        from megatron_asynchzp.mcore.step import ending
    except ModuleNotFoundError as error:
        if (missing := MissingPackage.of(error, script.name)) is None:
            raise
        raise missing from error
    try:
        if asked is not None:
            sys.exit(command.dry_run(script, arguments, asked))
        startup.prepare_process(arguments)
        runpy.run_path(str(script), run_name="__main__")
    except ConfigurationError:
        raise  # a line for the user; anything else keeps its traceback
    except (Exception, KeyboardInterrupt) as error:
        ending.end_training(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
