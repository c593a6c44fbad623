// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Counts live and peak bytes of all CPU tensors of a process, whatever thread allocates or frees.
// Memory from before the installation keeps its own deleter and is not counted.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr size_t kHeader = 64;  // holds the size; keeps the alignment that kernels count on
std::atomic<int64_t> live{0}, peak{0};
c10::Allocator* previous = nullptr;

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeader;
  live -= *reinterpret_cast<int64_t*>(block);
  std::free(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &release, cpu};
    void* block = nullptr;
    if (posix_memalign(&block, kHeader, nbytes + kHeader) != 0) throw std::bad_alloc();
    *static_cast<int64_t*>(block) = static_cast<int64_t>(nbytes);
    const int64_t now = live += static_cast<int64_t>(nbytes);
    int64_t highest = peak.load();
    while (now > highest && !peak.compare_exchange_weak(highest, now)) {
    }
    void* data = static_cast<char*>(block) + kHeader;
    return {data, data, &release, cpu};  // context == data: what raw_allocate demands
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

constexpr uint8_t kPriority = 200;

}  // namespace

extern "C" {

void asynchzp_install() {
  static CountingAllocator allocator;
  if (previous != nullptr) return;
  previous = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&allocator, kPriority);
}

void asynchzp_uninstall() {
  if (previous == nullptr) return;
  c10::SetCPUAllocator(previous, kPriority);
  previous = nullptr;
}

int64_t asynchzp_live() { return live.load(); }
int64_t asynchzp_peak() { return peak.load(); }
void asynchzp_reset_peak() { peak = live.load(); }

}  // extern "C"
