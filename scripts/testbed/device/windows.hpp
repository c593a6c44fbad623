// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Memory that is registered with a communicator. A window (ncclCommWindowRegister) has a number,
// the same on all ranks; collectives whose buffers lie in windows must find them at the same offset
// of the same window on every rank. What NCCL would not survive ends the process.
#pragma once
#include <map>

#include "nccl_api.hpp"
#include "room.hpp"
#include "stream.hpp"

// One registration of a rank. flags: those of a window, or kPlain (ncclCommRegister); last: the
// kernel launched last of those that use it.
struct ncclWindow_vidmem {
  const char* start;
  size_t size;
  int flags;
  int64_t number;
  device::Position last = {};
};

namespace device {

constexpr int kPlain = -1;

class Windows {
 public:
  // What lies at `buffer`, for a collective of `nbytes` there.
  Registered at(const void* buffer, size_t nbytes) const;
  // Null where NCCL gives no window.
  ncclWindow_t add(Room& room, const char* start, size_t size, int flags);
  // Whether it was registered in this way, and is no more.
  bool remove(ncclWindow_t window, bool is_plain);
  void note_use(const void* buffer, Position kernel);
  bool has_windows() const;
  void drop_all();  // of a communicator that is destroyed

 private:
  ncclWindow_t find(const void* buffer, bool is_plain) const;
  std::multimap<const char*, ncclWindow_t> all_;
  int64_t num_made_ = 0;
};

// Of this process, for tests.
void count_collective(const std::string& name);

}  // namespace device
