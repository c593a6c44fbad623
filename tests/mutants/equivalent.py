# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Generated mutants that no test can notice, by key, each with the reason."""

EQUIVALENT: dict[str, str] = {
    "87eb18dc0a": "cuts the dimensions in another order, until none can be cut",
    "51aad84f66": "numbers the elements from 1; any first number makes as good a hash",
    "0dd5484a35": "main and model parameters are the same when the checks begin",
    "fbf2dce582": "any number of steps that no run reaches",
    "3378164202": "looks at the store less often; every wait ends as before",
    "303094f190": "looks again after a longer time, later and later as before",
    "5531ba2672": "two boxes of one place and one number of a copy are the same box",
    "342dafe90a": "all contenders that follow need nodes too",
    "0d8d80ede5": "the step is in a message that only a task leads to",
    "ad8dc43491": "sums a second segment, which is not read",
    "785fb814d8": "another start value, as arbitrary as the first",
    "4f687acfad": "a part in 10^9 of a duration",
    "36b662e776": "one loop with masks over all tiles in place of three; the same numbers, later",
}
