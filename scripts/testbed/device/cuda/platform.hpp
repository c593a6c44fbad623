// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// The device of operations.cpp as torch's own CUDA. Another folder has another file of this name.
#pragma once
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <string>

#include "operations_api.hpp"

namespace platform {

constexpr auto kType = c10::kCUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;
constexpr bool kHasComposites = false;  // kernels for operations that others compose

using c10::CachingDeviceAllocator::TraceEntry;
template <typename Note>
void attach_to_allocator(const Note& note) {
  c10::cuda::CUDACachingAllocator::get()->attachAllocatorTraceTracker(note);
}

// Of a kernel: a seed and an offset or, in a captured graph, where each launch has put them.
struct Numbers {
  uint64_t seed, offset;
  const int64_t *seed_memory = nullptr, *offset_memory = nullptr;
};

// The next numbers of a generator, which moves on by `count` (Philox engine).
inline Numbers drawn(at::Generator& generator, uint64_t count) {
  const auto state =
      at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(count);
  if (!state.captured_) return {state.seed_.val, state.offset_.val};
  return {0, state.offset_intragraph_, state.seed_.ptr, state.offset_.ptr};
}

inline void* handle_of(const c10::Stream& stream) { return c10::cuda::CUDAStream(stream).stream(); }

// A wait of which torch.cuda.set_sync_debug_mode does not tell.
inline void wait_untold(const c10::Stream& stream) {
  asynchzp_device_synchronize(handle_of(stream));
}

// `run` makes a launch: here at once, by the thread that asks for it.
template <typename Run>
void in_order(void*, const std::string&, Run run) {
  run();
}

inline bool has_copied(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*) {
  return false;
}

// These choose compiled kernels; the attention that is left is made of operations.
inline void prepare() {
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
}

}  // namespace platform
