// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// torch_npu is made for torch's build without CUDA. Beside the one with CUDA, libc10_cuda and
// libtorch_npu both register the same names of settings of the caching allocator, which c10 refuses
// (AllocatorConfig.h, "Duplicated key"). Here each of them gets a set of names of its own;
// PYTORCH_ALLOC_CONF then has no words that only one device knows.
#include <string>
#include <unordered_set>

__attribute__((visibility("default"))) std::unordered_set<std::string>& names_of_settings() asm(
    "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev");
std::unordered_set<std::string>& names_of_settings() {
  return *new std::unordered_set<std::string>;
}
