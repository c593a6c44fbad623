# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.bench.launch_orders into tables: states that the search for circles
visited, and where there are circles."""

from collections.abc import Iterable, Sequence

from scripts.report.records import markdown_table


def launch_table(lines: Sequence[dict]) -> str:
    """A row for each layout, over all its devices. Without the implicit order: the least number of
    places from which on there is no circle, whatever the queues."""
    rows = []
    for program in (line for line in lines if line["kind"] == "program"):
        own = [line for line in lines if line["layout"] == program["layout"]]
        searches = [line for line in own if line["kind"] == "search"]
        implicit = [one for one in searches if one["in_host_order"]]
        every = [one for one in implicit if not one["is_reduced"]]
        none = [one for one in searches if not one["in_host_order"]]
        (planted,) = (line for line in own if line["kind"] == "planted")
        rows.append(
            [
                program["layout"],
                f"{program['collectives']}, {program['waits']}",
                f"{_states(every)} in {sum(one['seconds'] for one in every):.0f} s",
                _circles(implicit),
                f"{_states(none)} in {sum(one['seconds'] for one in none):.0f} s",
                _circles(none),
                f"{planted['found']} of {planted['planted']}",
            ]
        )
    head = ["layout", "collectives, waits of a rank", "implicit order: states", "circles"]
    head += ["without: states", "circles", "planted circles found"]
    return markdown_table(head, rows)


def num_states(lines: Iterable[dict]) -> int:
    return sum(line["states"] for line in lines if line["kind"] == "search")


def _states(searches: Sequence[dict]) -> str:
    return f"{num_states(searches):,}"


def _circles(searches: Sequence[dict]) -> str:
    """Of all devices: where there is a circle, and where not all orders were tried."""
    if not any(one["circle"] for one in searches) and all(one["is_all"] for one in searches):
        return "none"
    found = _devices(one for one in searches if one["circle"])
    left = _devices(one for one in searches if not one["circle"] and not one["is_all"])
    return "; ".join([*found, *(f"not all tried: {one}" for one in left)])


def _devices(searches: Iterable[dict]) -> list[str]:
    """Places, each with its queues."""
    queues: dict[int, list[int]] = {}
    for one in searches:
        queues.setdefault(one["places"], []).append(one["queues"])
    return [
        f"{places} {'place' if places == 1 else 'places'}, {_listed(found)} queues"
        for places, found in sorted(queues.items())
    ]


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, sorted(set(numbers)))
    return f"{', '.join(first)} or {last}" if first else last
