// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// The device of operations.cpp as torch_npu's: each operation is a task of torch_npu's own task
// queue, whose thread makes the launches.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>  // over stand_ins.hpp

#include <functional>
#include <string>

#include "operations_api.hpp"

namespace at_npu::native {
struct OpCommand {  // of libtorch_npu.so: runs `run` in the order of the device's task queue
  static void RunOpApiV2(const std::string& name, const std::function<int()>& run, bool is_sync);
};
}  // namespace at_npu::native

namespace platform {

constexpr auto kType = c10::kPrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr bool kHasComposites = true;

using c10_npu::NPUCachingAllocator::TraceEntry;
template <typename Note>
void attach_to_allocator(const Note& note) {
  c10_npu::NPUCachingAllocator::get()->attachAllocatorTraceTracker(note);
}

struct Numbers {
  uint64_t seed, offset;
  const int64_t *seed_memory = nullptr, *offset_memory = nullptr;  // of captured graphs: none here
};

inline Numbers drawn(at::Generator& generator, uint64_t count) {
  const uint64_t seed = generator.current_seed(), offset = generator.get_offset();
  generator.set_offset(offset + count);
  return {seed, offset};
}

// Without waiting for the task queue.
inline void* handle_of(const c10::Stream& stream) {
  return c10_npu::NPUStream(stream).stream(false);
}

inline void wait_untold(const c10::Stream& stream) { stream.synchronize(); }

// What the asking thread has waited for orders the launch too, which another thread makes.
template <typename Run>
void in_order(void* stream, const std::string& name, Run run) {
  asynchzp_device_submit(stream, device::watch::Kind::kernel, name, nullptr, 0);
  auto task = [run]() mutable {
    run();
    return 0;
  };
  at_npu::native::OpCommand::RunOpApiV2(name, task, false);
}

inline c10::SafeKernelFunction& own_copy() {
  static auto& found = *new c10::SafeKernelFunction(c10::Dispatcher::singleton()
                                                        .findSchemaOrThrow("aten::copy_", "")
                                                        .getComputedKernelForDispatchKey(kKey));
  return found;
}

// torch_npu's copy, where nothing but bytes moves between host and device: its own rules about
// streams and pageable memory. It has no kernel here for the rest.
inline bool has_copied(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const at::Tensor to = torch::jit::peek(*stack, 0, 3).toTensor();
  const at::Tensor from = torch::jit::peek(*stack, 1, 3).toTensor();
  const bool is_bytes = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
                        to.is_contiguous() && from.is_contiguous() && to.numel() &&
                        to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
  if (!is_bytes || to.device().type() == from.device().type()) return false;
  own_copy().callBoxed(op, keys, stack);
  return true;
}

inline void prepare() { own_copy(); }

}  // namespace platform
