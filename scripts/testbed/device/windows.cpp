// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "windows.hpp"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <mutex>
#include <string>

#include "captures.hpp"
#include "report.hpp"

namespace device {
namespace {

std::mutex mutex;  // of what all communicators of this process share
auto& allocated = *new std::map<const char*, size_t>;  // by ncclMemAlloc
auto& registered = *new std::map<const char*, int>;    // starts, with how many windows of each
auto& collectives = *new std::map<std::string, int64_t>;
int num_plain = 0;

// NCCL's parameter, 1 by default; without windows it says success all the same (init.cc,
// symmetricSupport; dev_runtime.cc, ncclCommWindowRegister).
bool gives_windows() {
  const char* text = getenv("NCCL_WIN_ENABLE");
  return !text || atoi(text);
}

double limit_s() {
  const char* text = getenv("ASYNCHZP_DEVICE_REGISTRATION_LIMIT_S");
  return text ? atof(text) : 60;
}

// "Collectively register local buffer [...] every rank in the communicator needs to participate"
// (NCCL). It waits for them without a limit of its own.
void meet_for(Room& room, const Registration& mine) {
  room.registration(room.rank) = mine;
  room.meet(room.of_registrations(), limit_s(), [&] {
    std::string late;
    for (int other = 0; other < room.num_ranks; other++)
      if (room.registration(other).number < mine.number) late += " " + std::to_string(other);
    end("rank %d of the communicator registers window %ld, which these ranks have not done after "
        "%g s:%s",
        room.rank, long(mine.number - 1), limit_s(), late.c_str());
  });
  for (int other = 0; other < room.num_ranks; other++) {
    const Registration theirs = room.registration(other);
    // Sizes may differ for NCCL from 2.30 on.
    if (theirs.size != mine.size || theirs.flags != mine.flags)
      end("ranks differ in window %ld: rank %d of the communicator registers %ld bytes with flags "
          "%d, rank %d registers %ld bytes with flags %d",
          long(mine.number - 1), room.rank, long(mine.size), mine.flags, other, long(theirs.size),
          theirs.flags);
  }
  room.meet(room.of_registrations());
}

}  // namespace

ncclWindow_t Windows::find(const void* buffer, bool is_plain) const {
  auto at = static_cast<const char*>(buffer);
  for (auto& [start, window] : all_)
    if (start <= at && at < start + window->size && (window->flags == kPlain) == is_plain)
      return window;
  return nullptr;
}

Registered Windows::at(const void* buffer, size_t nbytes) const {
  ncclWindow_t window = find(buffer, false);
  if (!window || !(window->flags & NCCL_WIN_COLL_SYMMETRIC)) return {};
  const int64_t offset = static_cast<const char*>(buffer) - window->start;
  if (offset + nbytes > window->size)
    end("a collective's %zu bytes at byte %ld of window %ld reach beyond its end", nbytes,
        long(offset), long(window->number));
  return {window->number, offset};
}

// "supports input buffers only from VMM-based allocators and ncclMemAlloc"; "Host APIs do not
// accept buffers that are symmetrically registered more than once" (NCCL).
ncclWindow_t Windows::add(Room& room, const char* start, size_t size, int flags) {
  captures::refuse(nullptr, "a registration");
  if (flags != kPlain) {
    if (!gives_windows()) return nullptr;
    std::lock_guard lock(mutex);
    auto block = allocated.upper_bound(start);
    if (block == allocated.begin() || start + size > (--block)->first + block->second)
      end("a window of memory that is not of ncclMemAlloc");
    for (auto& [other, window] : all_)
      if (window->flags != kPlain && start < other + window->size && other < start + size)
        end("memory is registered twice with a communicator: window %ld and window %ld",
            long(window->number), long(num_made_));
    registered[start]++;
  } else {
    std::lock_guard lock(mutex);
    num_plain++;
  }
  const int64_t number = flags == kPlain ? -1 : num_made_++;
  if (flags != kPlain) meet_for(room, {number + 1, int64_t(size), flags});
  auto window = new ncclWindow_vidmem{start, size, flags, number};
  all_.insert({start, window});
  return window;
}

// "Deregistration is local to the rank, and caller needs to make sure the corresponding buffer
// within the window is not being accessed by any NCCL operation" (NCCL).
bool Windows::remove(ncclWindow_t window, bool is_plain) {
  captures::refuse(nullptr, "a deregistration");
  for (auto item = all_.begin(); item != all_.end(); ++item) {
    if (item->second != window) continue;
    if ((window->flags == kPlain) != is_plain) return false;
    if (!window->last.is_reached())
      end("window %ld is deregistered while a collective uses it", long(window->number));
    std::lock_guard lock(mutex);
    is_plain ? num_plain-- : registered[window->start]--;
    all_.erase(item);
    delete window;
    return true;
  }
  return false;
}

void Windows::note_use(const void* buffer, Position kernel) {
  for (bool is_plain : {false, true})
    if (ncclWindow_t window = find(buffer, is_plain)) window->last = kernel;
}

bool Windows::has_windows() const {
  for (auto& [start, window] : all_)
    if (window->flags != kPlain) return true;
  return false;
}

// "users might not call deregister API [...] we need to destroy all remaining window objects"
// (dev_runtime.cc, ncclDevrFinalize).
void Windows::drop_all() {
  std::lock_guard lock(mutex);
  for (auto& [start, window] : all_) {
    window->flags == kPlain ? num_plain-- : registered[start]--;
    delete window;
  }
  all_.clear();
}

void count_collective(const std::string& name) {
  std::lock_guard lock(mutex);
  collectives[name]++;
}

}  // namespace device

using namespace device;

EXPORT ncclResult_t ncclMemAlloc(void** out, size_t size) {
  if (cudaMalloc(out, size) != cudaSuccess) return ncclUnhandledCudaError;
  std::lock_guard lock(mutex);
  allocated[static_cast<char*>(*out)] = size;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclMemFree(void* start) {
  if (!start) return ncclSuccess;
  {
    std::lock_guard lock(mutex);
    auto block = allocated.find(static_cast<char*>(start));
    if (block == allocated.end()) return ncclInvalidArgument;
    for (auto& [window, count] : registered)
      if (count && window >= block->first && window < block->first + block->second)
        end("memory is freed that %d communicators have registered", count);
    allocated.erase(block);
  }
  return cudaFree(start) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// Collectives of communicators with windows since the last call: kind, type, where input and output
// were, how many.
EXPORT const char* asynchzp_device_collectives() {
  static std::string text;
  std::lock_guard lock(mutex);
  text.clear();
  for (auto& [name, count] : collectives) text += name + " " + std::to_string(count) + "\n";
  collectives.clear();
  return text.c_str();
}

// What is registered now with all communicators of this process: windows, or plainly.
EXPORT int asynchzp_device_num_registered(int is_plain) {
  std::lock_guard lock(mutex);
  if (is_plain) return num_plain;
  int count = 0;
  for (auto& [start, windows] : registered) count += windows;
  return count;
}
