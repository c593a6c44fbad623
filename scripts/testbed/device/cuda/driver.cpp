// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// The little of CUDA's driver API that torch calls without a kernel of its own.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "report.hpp"

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGet(CUdevice* out, int index) {
  *out = index;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
  cudaGetDeviceCount(count);
  return CUDA_SUCCESS;
}

// Whether NCCL's allocator is of use is asked of the driver (torch, supports_tensor_alloc).
EXPORT CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute which, CUdevice) {
  *out = which == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
  return CUDA_SUCCESS;
}

// Active from the start: torch then takes a context as there and sets the device.
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  if (flags) *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

// Tables of functions that NVIDIA's own tools ask for by number: the profiler then sees no device.
EXPORT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the emulated driver";
  return CUDA_SUCCESS;
}

#if CUDA_VERSION >= 12090  // that has these types
// "Register a callback function to receive error log messages" (cuda.h): an error of this device
// ends the process with a line of its own, so there are none.
EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* out) {
  if (out) *out = nullptr;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
#endif
