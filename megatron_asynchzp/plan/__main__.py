# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which shard sizes, prefetch depth, micro-batch size and recomputation make a Megatron command
line fastest on a cluster. Starts no ranks and needs no device:

    asynchzp plan --cluster h100 --ranks 256 -- pretrain_gpt.py <your flags>

Exit status: 0; 1 where no plan fits into the memory; 2 for what cannot be planned.
"""

import sys

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planning import plan
from megatron_asynchzp.sharding.topology import ShardSizeError


def main(argv: list[str]) -> int:
    try:
        return command.run(argv)
    except (ConfigurationError, ShardSizeError) as error:
        print(f"megatron_asynchzp: {' '.join(str(error).split())}", file=sys.stderr)
        return command.EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
