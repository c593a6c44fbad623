// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Memory of the devices; what is new or freed is poisoned: every byte 0xff, which is NaN in each
// floating-point type.
#include "memory.hpp"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "captures.hpp"
#include "clock.hpp"
#include "host_memory.hpp"
#include "links.hpp"
#include "report.hpp"
#include "stream.hpp"
#include "watch.hpp"

namespace device {
namespace {

constexpr size_t kPage = 4096, kTotal = size_t(8) << 30;
constexpr int kPoison = 0xff;

struct Block {
  size_t size;
  int device;
};
using Blocks = std::map<const char*, Block>;

std::mutex mutex;
auto& live = *new Blocks;
auto& freed = *new Blocks;  // kept without access: whoever touches it is told

Blocks::iterator holder(Blocks& blocks, const void* address) {
  auto at = static_cast<const char*>(address);
  auto found = blocks.upper_bound(at);
  if (found == blocks.begin()) return blocks.end();
  --found;
  return at < found->first + found->second.size ? found : blocks.end();
}

void submit(Stream* stream, const char* name, const void* read, const void* written, size_t size) {
  std::vector<Access> accesses;
  if (read) accesses.push_back({read, size, false});
  if (written) accesses.push_back({written, size, true});
  watch::submit(stream, watch::Kind::kernel, name, accesses.data(), accesses.size());
}

void wait_for(Stream* stream) {
  captures::refuse(stream, "a wait of the host for it");
  const auto done = watch::end_of(stream);
  stream->end().wait();
  watch::order_host(done);
}

char* mapped(int file, size_t size) {
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return start == MAP_FAILED ? nullptr : static_cast<char*>(start);
}

size_t in_pages(size_t size) { return (size + kPage) / kPage * kPage; }

void on_fault(int number, siginfo_t* info, void*) {
  if (watch::tell_of_touching(info->si_addr)) return;  // the instruction runs again
  if (holder(freed, info->si_addr) != freed.end())
    end("%p is read or written after cudaFree", info->si_addr);
  signal(number, SIG_DFL);  // runs again, and ends as it would have
}

void report_faults() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace

bool is_on_device(const void* address) {
  std::lock_guard lock(mutex);
  return holder(live, address) != live.end();
}

}  // namespace device

using namespace device;

EXPORT cudaError_t cudaMalloc(void** out, size_t size) {
  static std::once_flag once;
  std::call_once(once, report_faults);
  size_t free_size, total;
  cudaMemGetInfo(&free_size, &total);
  if (size > free_size) return cudaErrorMemoryAllocation;
  void* start =
      mmap(nullptr, in_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
  memset(start, kPoison, size);
  std::lock_guard lock(mutex);
  live[static_cast<char*>(start)] = {size, current_device()};
  watch::forget(start, size);
  *out = start;
  return cudaSuccess;
}

// Waits for the device, as cudaFree does (Programming Guide, "Implicit Synchronization", and the
// caching allocator relies on it).
EXPORT cudaError_t cudaFree(void* start) {
  if (!start) return cudaSuccess;
  const auto done = watch::end_of_all(-1);
  Stream::synchronize_all();
  watch::order_host(done);
  std::lock_guard lock(mutex);
  auto block = live.find(static_cast<char*>(start));
  if (block == live.end()) return cudaErrorInvalidValue;
  watch::forget(start, block->second.size);
  madvise(start, in_pages(block->second.size), MADV_DONTNEED);
  mprotect(start, in_pages(block->second.size), PROT_NONE);
  freed.insert(*block);
  live.erase(block);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free_size, size_t* total) {
  std::lock_guard lock(mutex);
  size_t used = 0;
  for (auto& [start, block] : live) used += block.size;
  *total = kTotal;
  *free_size = kTotal - used;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
  *out = {};
  std::lock_guard lock(mutex);
  auto found = holder(live, address);
  if (found != live.end()) {
    out->type = cudaMemoryTypeDevice;
    out->device = found->second.device;
    out->devicePointer = const_cast<void*>(address);
  } else if (auto block = HostBlock::holder(address); block.start) {
    out->type = cudaMemoryTypeHost;
    out->device = block.device;
    out->devicePointer = out->hostPointer = const_cast<void*>(address);
  }
  return cudaSuccess;  // cudaMemoryTypeUnregistered is 0
}

// Within a copy on the stream, of `size` bytes from the device's host or to it.
EXPORT void asynchzp_device_carry(void* stream, size_t size, bool is_to_host) {
  const Engine engine = is_to_host ? Engine::copies_out : Engine::copies_in;
  if (is_time_stated()) occupy(stream_of(stream)->device, engine, size / links().host_nbytes_per_s);
}

// Runtime API, "API synchronization behavior": a copy from pageable memory is staged before the
// call returns; one to pageable memory returns when it is complete; page-locked memory is read and
// written when the stream gets there.
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                                   cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  const bool reads_later = is_on_device(from) || is_pinned(from);
  const bool writes_later = is_on_device(to) || is_pinned(to);
  std::shared_ptr<std::vector<char>> staged;
  if (!reads_later) {
    auto bytes = static_cast<const char*>(from);
    staged = std::make_shared<std::vector<char>>(bytes, bytes + size);
  }
  submit(stream, "cudaMemcpyAsync", reads_later ? from : nullptr, writes_later ? to : nullptr,
         size);
  void* target = for_kernels(to);
  const void* source = for_kernels(from);
  const bool is_to_host = !is_on_device(to);
  const bool is_over_link = is_to_host != !is_on_device(from);
  stream->push_kernel([=] {
    memmove(target, staged ? staged->data() : source, size);
    if (is_over_link) asynchzp_device_carry(handle, size, is_to_host);
  });
  if (!writes_later) wait_for(stream);
  return cudaSuccess;
}

// As above, on the default stream; with the host on one side it returns when it is complete.
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  auto error = cudaMemcpyAsync(to, from, size, kind, nullptr);
  if (!is_on_device(to) || !is_on_device(from)) wait_for(stream_of(nullptr));
  return error;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                       cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

EXPORT cudaError_t cudaMemsetAsync(void* start, int value, size_t size, cudaStream_t stream) {
  submit(stream_of(stream), "cudaMemsetAsync", nullptr, start, size);
  void* target = for_kernels(start);
  stream_of(stream)->push_kernel([=] { memset(target, value, size); });
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void* start, int value, size_t size) {
  return cudaMemsetAsync(start, value, size, nullptr);  // asynchronous for memory of a device
}

EXPORT void asynchzp_device_poison(void* start, size_t size, void* stream) {
  stream_of(stream)->push_beside([=] { memset(start, kPoison, size); });
}

// What the caching allocator has freed may belong to the next owner on that stream from here on:
// the strictest such owner overwrites it at once.
EXPORT void asynchzp_device_freed(void* start, size_t size, void* stream) {
  const Access access{start, size, true};
  // Within a graph that is no command: after the join nothing would order one of a forked stream,
  // and what was captured later may have these bytes without an allocation that tells.
  if (captures::is_forked(stream_of(stream))) return;
  const auto kind = captures::of(stream_of(stream)) ? watch::Kind::allocation : watch::Kind::free;
  watch::submit(stream_of(stream), kind, "freeing", &access, 1);
  asynchzp_device_poison(start, size, stream);
}

// ---- page-locked memory of the host

EXPORT cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) {
  const int file = memfd_create("page-locked", MFD_CLOEXEC);
  const size_t whole = HostBlock::in_pages(size);
  if (file < 0 || ftruncate(file, whole)) return cudaErrorMemoryAllocation;
  HostBlock block{mapped(file, whole), size, current_device(), mapped(file, whole)};
  close(file);
  if (!block.start || !block.for_kernels) return cudaErrorMemoryAllocation;
  memset(block.start, kPoison, size);
  block.add();
  *out = block.start;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* start, size_t size, unsigned) {
  HostBlock{static_cast<char*>(start), size, current_device(), nullptr}.add();
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* start) {
  const HostBlock block = HostBlock::holder(start);
  if (!block.start || block.start != start) return cudaErrorHostMemoryNotRegistered;
  const auto done = watch::end_of_all(-1);
  Stream::synchronize_all();
  watch::order_host(done);
  watch::forget(block.start, block.size);
  block.remove();
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void* start) {
  const HostBlock block = HostBlock::holder(start);
  if (auto error = cudaHostUnregister(start)) return error;
  munmap(block.start, HostBlock::in_pages(block.size));
  munmap(block.for_kernels, HostBlock::in_pages(block.size));
  return cudaSuccess;
}
