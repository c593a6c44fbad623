// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Takes the place of what torch_npu's header of its allocator includes, which ends in CANN's
// headers: names alone, so that the class has its functions in the order of the wheel. CANN's are
// licensed for software on Huawei's processors; nothing here is compiled with them.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

using aclrtStream = void*;
enum { ACL_HBM_MEM };
inline int aclrtGetMemInfo(int, size_t*, size_t*) { return 0; }
inline int aclrtGetDeviceCount(uint32_t*) { return 0; }
#define NPU_CHECK_ERROR(call) (void)(call)
#define PTA_ERROR(code) ""

namespace npu_logging {
struct Logger;
struct Loggers {
  std::shared_ptr<Logger> getLogger(const std::string&) { return nullptr; }
};
inline Loggers logging() { return {}; }
}  // namespace npu_logging

namespace c10d_npu {
struct HCCLComm;
}

namespace c10_npu {
// As torch_npu has it: a stream of torch, and a destructor, which decides how it is passed.
struct NPUStream {
  explicit NPUStream(c10::Stream stream) : stream_(stream) {}
  ~NPUStream() {}
  aclrtStream stream(bool needs_empty_queue) const;  // of libtorch_npu.so

 private:
  c10::Stream stream_;
};
struct NPUGuard {
  explicit NPUGuard(c10::DeviceIndex) {}
};
using CaptureId_t = unsigned long long;
using MempoolId_t = std::pair<CaptureId_t, CaptureId_t>;
}  // namespace c10_npu
