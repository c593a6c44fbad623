# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a Python script on emulated CUDA devices: one process and one device per rank.

python -m scripts.testbed.device --ranks 2 --law uniform --seed 7 -- SCRIPT ...
"""

import argparse
import os
import sys

from scripts.testbed.command import RankCommand, count, run_as_ranks, split_command
from scripts.testbed.compiler import CompileError
from scripts.testbed.device.build import environment
from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.ranks import Place, new_store


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="testbed.device",
        usage="python -m scripts.testbed.device [options] -- SCRIPT ... (or -m MODULE ...)",
        description=(__doc__ or "").split("\n\n")[0],
    )
    parser.add_argument("--ranks", type=count, default=2, help="default: 2")
    parser.add_argument("--law", choices=LAWS, default="none", help="of delay; default: none")
    parser.add_argument("--seed", type=int, default=0, help="of the delays; default: 0")
    parser.add_argument("--longest-us", type=count, default=Delays().longest_us, metavar="US")
    parser.add_argument(
        "--no-watch", action="store_true", help="go on where nothing orders two accesses"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds; default: no limit")
    args, command = split_command(parser, sys.argv[1:] if argv is None else argv)
    try:
        preloaded = environment()
    except CompileError as error:
        parser.error(f"no emulated device: {error}")
    store = new_store()
    env = preloaded | {
        "ASYNCHZP_DEVICES": str(args.ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # ranks share the cores
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    settings = [args.law, str(args.seed), str(args.longest_us), str(int(not args.no_watch))]
    rank_of = [sys.executable, "-m", "scripts.testbed.device.rank", *settings, *command]
    places = [Place(rank, args.ranks, args.ranks, store.port) for rank in range(args.ranks)]
    commands = [RankCommand(rank_of, env | place.environment()) for place in places]
    return run_as_ranks("testbed.device", commands, args.timeout)


if __name__ == "__main__":
    sys.exit(main())
