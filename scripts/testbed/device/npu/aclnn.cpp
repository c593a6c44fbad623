// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// The kernels of CANN's operator library (aclnn) that torch_npu calls without aten's dispatcher:
// ProcessGroupHCCL pads what it gathers in lists to 512 bytes, and so every all_gather_object; and
// torch.npu._sleep.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "report.hpp"
#include "stream.hpp"
#include "watch.hpp"

using Error = int;
namespace {

struct Tensor {
  std::vector<int64_t> sizes, strides;
  size_t item;
  char* data;
  size_t nbytes() const {
    size_t found = item;
    for (int64_t size : sizes) found *= size;
    return found;
  }
};
struct Executor {
  std::string name;
  std::vector<device::Access> accesses;
  std::function<void()> run;
};

size_t size_of(int type) {
  switch (type) {
    case 2:
    case 4:
    case 12: return 1;
    case 1:
    case 6:
    case 7:
    case 27: return 2;
    case 0:
    case 3:
    case 8: return 4;
    case 9:
    case 10:
    case 11:
    case 16: return 8;
    default: device::end("aclnn's type %d is not emulated", type);
  }
}

}  // namespace

EXPORT void* aclCreateTensor(const int64_t* sizes, uint64_t dims, int type, const int64_t* strides,
                             int64_t offset, int, const int64_t*, uint64_t, void* data) {
  const size_t item = size_of(type);
  char* start = static_cast<char*>(data) + offset * item;
  return new Tensor{{sizes, sizes + dims}, {strides, strides + dims}, item, start};
}
EXPORT Error aclDestroyTensor(const void* tensor) {
  delete static_cast<const Tensor*>(tensor);
  return 0;
}
EXPORT void* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new std::vector<int64_t>(values, values + size);
}
EXPORT Error aclDestroyIntArray(const void* array) {
  delete static_cast<const std::vector<int64_t>*>(array);
  return 0;
}
EXPORT void* aclCreateScalar(void* value, int type) {
  auto bytes = static_cast<char*>(value);
  return new std::vector<char>(bytes, bytes + size_of(type));
}
EXPORT Error aclDestroyScalar(const void* scalar) {
  delete static_cast<const std::vector<char>*>(scalar);
  return 0;
}

EXPORT Error aclnnConstantPadNdGetWorkspaceSize(const Tensor* self, const std::vector<int64_t>* pad,
                                                const std::vector<char>* value, Tensor* out,
                                                uint64_t* nbytes, Executor** executor) {
  *nbytes = 0;
  for (char byte : *value)
    if (byte) device::end("padding with another value than 0 is not emulated");
  const bool is_row = self->sizes.size() == 2 && self->sizes[0] == 1 && self->strides[1] == 1;
  if (!is_row || pad->size() != 2 || (*pad)[0])
    device::end("only the end of a row is padded on the emulated device");
  Tensor from = *self, to = *out;
  *executor = new Executor{"aclnnConstantPadNd",
                           {{from.data, from.nbytes(), false}, {to.data, to.nbytes(), true}},
                           [from, to] {
                             memcpy(to.data, from.data, from.nbytes());
                             memset(to.data + from.nbytes(), 0, to.nbytes() - from.nbytes());
                           }};
  return 0;
}
EXPORT Error aclnnConstantPadNd(void*, uint64_t, Executor* executor, void* stream) {
  device::Stream* on = device::stream_of(stream);
  device::watch::submit(on, device::watch::Kind::kernel, executor->name, executor->accesses.data(),
                        executor->accesses.size());
  on->push_kernel(executor->run);
  delete executor;
  return 0;
}

constexpr int64_t kCyclesPerUs = 1500;  // as the emulated CUDA device has them
EXPORT Error aclnnSleepGetWorkspaceSize(const std::vector<char>* cycles, uint64_t* nbytes,
                                        Executor** executor) {
  int64_t count;
  if (cycles->size() != sizeof count) device::end("aclnnSleep takes its cycles as int64");
  memcpy(&count, cycles->data(), sizeof count);
  *nbytes = 0;
  const std::chrono::microseconds time(count / kCyclesPerUs);
  *executor = new Executor{"aclnnSleep", {}, [time] { std::this_thread::sleep_for(time); }};
  return 0;
}
EXPORT Error aclnnSleep(void*, uint64_t, Executor* executor, void* stream) {
  device::stream_of(stream)->push_kernel(executor->run);
  delete executor;
  return 0;
}
