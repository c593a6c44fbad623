// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "host_memory.hpp"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "report.hpp"
#include "stream.hpp"
#include "watch.hpp"

namespace device {
namespace {

constexpr size_t kPage = 4096;
constexpr int kPoison = 0xff;

std::mutex mutex;
auto& blocks = *new std::map<const char*, HostBlock>;  // by their ends

size_t in_pages(size_t size) { return (size + kPage - 1) / kPage * kPage; }

char* mapped(int file, size_t size) {
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return start == MAP_FAILED ? nullptr : static_cast<char*>(start);
}

void add(const HostBlock& block) {
  std::lock_guard lock(mutex);
  blocks[block.start + block.size] = block;
}

}  // namespace

HostBlock HostBlock::holder(const void* address) {
  auto at = static_cast<const char*>(address);
  std::lock_guard lock(mutex);
  auto found = blocks.upper_bound(at);
  return found == blocks.end() || at < found->second.start ? HostBlock() : found->second;
}

void HostBlock::allow(Allowed what) const {
  if (!for_kernels) return;
  const int protection = what == Allowed::everything ? PROT_READ | PROT_WRITE
                         : what == Allowed::reading  ? PROT_READ
                                                     : PROT_NONE;
  mprotect(start, in_pages(size), protection);
}

bool is_pinned(const void* address) { return HostBlock::holder(address).start; }

void* for_kernels(const void* address) {
  const HostBlock block = HostBlock::holder(address);
  auto at = static_cast<char*>(const_cast<void*>(address));
  return block.for_kernels ? block.for_kernels + (at - block.start) : at;
}

}  // namespace device

using namespace device;

EXPORT cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) {
  const int file = memfd_create("page-locked", MFD_CLOEXEC);
  const size_t whole = in_pages(size);
  if (file < 0 || ftruncate(file, whole)) return cudaErrorMemoryAllocation;
  HostBlock block{mapped(file, whole), size, current_device(), mapped(file, whole)};
  close(file);
  if (!block.start || !block.for_kernels) return cudaErrorMemoryAllocation;
  memset(block.start, kPoison, size);
  add(block);
  *out = block.start;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* start, size_t size, unsigned) {
  add({static_cast<char*>(start), size, current_device(), nullptr});
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* start) {
  const HostBlock block = HostBlock::holder(start);
  if (!block.start || block.start != start) return cudaErrorHostMemoryNotRegistered;
  const auto done = watch::end_of_all(-1);
  Stream::synchronize_all();
  watch::order_host(done);
  watch::forget(block.start, block.size);
  std::lock_guard lock(mutex);
  blocks.erase(block.start + block.size);
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void* start) {
  const HostBlock block = HostBlock::holder(start);
  if (auto error = cudaHostUnregister(start)) return error;
  munmap(block.start, in_pages(block.size));
  munmap(block.for_kernels, in_pages(block.size));
  return cudaSuccess;
}
