# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A few made-up records of every benchmark, as the benchmarks write them."""

MIB = 1 << 20
PROFILE = {
    "name": "slow",
    "inter_gbit": 0.1,
    "intra_gbit": 1.0,
    "inter_latency_us": 0.0,
    "intra_latency_us": 0.0,
}
# fmt: off
WORKLOAD = {"layers": 8, "hidden": 128, "samples": 8, "seq_length": 64, "layer_ms": 19.0,
            "steps": 3}
MACHINE = {"kind": "machine", "date": "2026-01-01", "cpus": 2, "python": "3.12", "command": "c",
           "versions": {"torch": "2", "deepspeed": None}}
RUN = {"kind": "run", "reason": "", "losses": [4.9, 4.5], "node_nbytes": 1e6, "exposed_ms": 5.0,
       "state_nbytes": 1e7, "peak_nbytes": 2e7, "host_waits": 0.0, "foreign": 0.01, "busy": 0.3}
OURS = "AsyncHZP (node, node, world)"


def compare_records() -> list[dict]:
    place = {"nodes": 2, "ranks_per_node": 2, "profile": PROFILE, "workload": WORKLOAD}
    families = {"DDP": "stock ND", "AsyncHZP threaded (2,2,4)": "AsyncHZP"}
    runs = [
        RUN | place | {"name": name, "family": family, "step_ms": [1000.0, 1010.0]}
        for name, family in families.items()
    ]
    absent = runs[0] | {"name": "absent", "family": "sharded peer", "reason": "not installed"}
    return [MACHINE, *runs, absent]


def schedule_records() -> list[dict]:
    times = {"compute only": 400.0, "communication only": 200.0, "threaded": 440.0}
    return [
        {
            "contender": name, "nodes": 2, "ranks_per_node": 2, "profile": PROFILE,
            "model": {"hidden": 512, "block_ms": 20.0}, "repetitions": 5, "steps": 3,
            "median_ms": ms, "step_ms": [ms, ms + 1], "foreign_cpu": 0.1, "volume": 1.0,
            "ideal_volume": 1.0,
        }
        for name, ms in times.items()
    ]


def checkpoint_records() -> list[dict]:
    act = {"resident_nbytes": 2 * MIB, "total_nbytes": 100 * MIB, "tensor_nbytes": MIB,
           "foreign_cpu": 0.25, "parts_s": {}, "seconds": 1.0}
    acts = dict.fromkeys(("first save", "save 2", "cold load", "load 2"), act)
    return [
        {"contender": name, "acts": acts, "disk_nbytes": 10 * MIB, "num_files": 6}
        for name in ("stock DDP", "AsyncHZP 2,2,4")
    ]


def parity_records() -> list[dict]:
    return [{"variant": "fp32", "ranks": 4, "loss_error": 1e-7, "grad_norm_error": 2e-7,
             "tolerance": 1e-6, "faults": [], "steps": 20}]
# fmt: on


def wire_records() -> list[dict]:
    ends = [("fp32", 1234, 1.000), ("bf16", 1234, 1.001), ("fp32", 4321, 1.010)]
    losses = [
        {"kind": "loss", "wire": wire, "seed": seed, "steps": 500, "first": 4.9, "last": last}
        for wire, seed, last in ends
    ]
    times = [
        {"kind": "time", "wire": wire, "step_ms": step_ms, "node_nbytes": 1e6, "foreign": 0.01}
        for wire, step_ms in (("fp32", [1400.0, 1500.0, 1450.0]), ("bf16", [1000.0] * 3))
    ]
    return [MACHINE, *losses, *times]


def shrunk_records() -> list[dict]:
    errors = {"loss_error": 1e-7, "grad_norm_error": 2e-7, "params_norm_error": 0.0}
    bounds = {"more_losses_error": 3e-7, "loss_tolerance": 1e-6, "tolerance": 1e-6, "faults": []}
    run = {"variant": "a model", "ranks": 8, "steps": 20, "sizes": [1, 2, 4]} | errors | bounds
    return [run, run | {"sizes": [2, 4, 8], "loss_error": 2e-6}, run | {"ranks": 4}]
