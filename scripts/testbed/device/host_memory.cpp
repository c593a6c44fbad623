// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "host_memory.hpp"

#include <sys/mman.h>

#include <map>
#include <mutex>

namespace device {
namespace {

constexpr size_t kPage = 4096;

std::mutex mutex;
auto& blocks = *new std::map<const char*, HostBlock>;  // by their ends

}  // namespace

size_t HostBlock::in_pages(size_t size) { return (size + kPage - 1) / kPage * kPage; }

void HostBlock::add() const {
  std::lock_guard lock(mutex);
  blocks[start + size] = *this;
}

void HostBlock::remove() const {
  std::lock_guard lock(mutex);
  blocks.erase(start + size);
}

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
