# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a Python script on emulated CUDA devices.

python -m scripts.testbed.device --ranks 2 --law uniform --seed 7 -- SCRIPT ...
python -m scripts.testbed.device --devices 4 -- -m scripts.gpu_check
"""

import argparse
import os
import sys

from scripts.testbed.command import RankCommand, count, run_as_ranks, split_command
from scripts.testbed.compiler import CompileError
from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.platforms import environment
from scripts.testbed.ranks import RankPlace, new_store


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="testbed.device",
        usage="python -m scripts.testbed.device [options] -- SCRIPT ... (or -m MODULE ...)",
        description=(__doc__ or "").split("\n\n")[0],
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--ranks", type=count, help="processes, each with a device of its own; default: 2"
    )
    number.add_argument(
        "--devices", type=count, help="of one process, which starts what it likes on them"
    )
    parser.add_argument("--law", choices=LAWS, default="none", help="of delay; default: none")
    parser.add_argument("--seed", type=int, default=0, help="of the delays; default: 0")
    parser.add_argument("--longest-us", type=count, default=Delays().longest_us, metavar="US")
    parser.add_argument(
        "--no-watch", action="store_true", help="go on where nothing orders two accesses"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds; default: no limit")
    args, command = split_command(parser, sys.argv[1:] if argv is None else argv)
    ranks = args.ranks or 2
    try:
        delays = Delays(args.law, args.seed, args.longest_us)
        env = environment(args.devices or ranks, delays)
    except CompileError as error:
        parser.error(f"no emulated device: {error}")
    env["ASYNCHZP_DEVICE_WATCH"] = str(int(not args.no_watch))
    env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # processes share the cores
    words = [sys.executable, *command]
    if args.devices:
        return run_as_ranks("testbed.device", [RankCommand(words, env)], args.timeout)
    store = new_store()
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    places = [RankPlace(rank, ranks, ranks, store.port) for rank in range(ranks)]
    commands = [RankCommand(words, env | place.environment()) for place in places]
    return run_as_ranks("testbed.device", commands, args.timeout)


if __name__ == "__main__":
    sys.exit(main())
