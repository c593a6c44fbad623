// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Compiled kernels: their names are kept, and launching one ends the process with its name. What
// runs in their place are the operations of operations.cpp; but that of torch.cuda._sleep, which is
// no operation, runs here.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "report.hpp"
#include "stream.hpp"

namespace {

std::mutex mutex;
auto& names = *new std::map<const void*, const char*>;

[[noreturn]] void refuse(const void* kernel) {
  std::lock_guard lock(mutex);
  auto found = names.find(kernel);
  const char* name = found == names.end() ? "without a name" : found->second;
  int status;
  char* readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  device::end("no operation stands for the kernel %.700s", readable ? readable : name);
}

constexpr int64_t kCyclesPerUs = 1500;

thread_local cudaStream_t configured_stream = nullptr;

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  {
    std::lock_guard lock(mutex);
    auto found = names.find(kernel);
    // at::cuda::sleep: spin_kernel(int64_t cycles)
    if (found == names.end() || !strstr(found->second, "spin_kernel")) arguments = nullptr;
  }
  if (!arguments) refuse(kernel);
  const std::chrono::microseconds time(*static_cast<int64_t*>(arguments[0]) / kCyclesPerUs);
  device::stream_of(stream)->push_kernel([time] { std::this_thread::sleep_for(time); });
  return cudaSuccess;
}

}  // namespace

// What the compiler makes each library call when it is loaded.
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle = &handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                   void*, void*, void*, int*) {
  std::lock_guard lock(mutex);
  names[host] = name;
}

EXPORT cudaError_t __cudaGetKernel(void** kernel, const void* host) {
  *kernel = const_cast<void*>(host);
  return cudaSuccess;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t stream) {
  configured_stream = stream;
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void* stream) {
  *static_cast<cudaStream_t*>(stream) = configured_stream;
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t,
                                    cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
EXPORT cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void** arguments, size_t,
                                      cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  return launch(kernel, arguments, config->stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t,
                                               cudaStream_t) {
  refuse(kernel);
}
// Asked before a launch.
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  refuse(kernel);
}
EXPORT cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int) {
  refuse(kernel);
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int*, const void* kernel,
                                                                          int, size_t, unsigned) {
  refuse(kernel);
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int*, const void* kernel, int,
                                                                 size_t) {
  refuse(kernel);
}
