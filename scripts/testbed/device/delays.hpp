// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// How long each kernel is put off: a function of a law, a seed, the rank, the stream and the
// kernel's number in it, and of nothing else.
#pragma once
#include <cstdint>

namespace device {

enum class Law { none, uniform, slow_stream, slow_rank, on_demand };

struct Delays {
  Law law = Law::none;
  uint64_t seed = 0;
  int rank = 0;
  int world_size = 1;
  int longest_us = 0;
};

const Delays& delays();
void set_delays(const Delays& delays);  // kernels are counted anew

// Of kernel `index` of the stream that was the `ordinal`-th to get a kernel.
int delay_us(int ordinal, int64_t index);

}  // namespace device
