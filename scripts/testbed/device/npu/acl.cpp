// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// CANN's runtime interface (ACL), implemented anew for tests on the emulated device of
// scripts/testbed/device: its streams, events, memory, delays and watch. Signatures and numbers are
// facts of the interface; no header of CANN is compiled and no code of it is copied.
#include <cuda_runtime_api.h>  // the emulated device's own interface; hidden in this library

#include <dlfcn.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "report.hpp"
#include "stream.hpp"

extern "C" {  // of Python, in whose process this is
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int state);
__attribute__((weak)) int PyRun_SimpleStringFlags(const char* code, void* flags);
}

using Error = int;
namespace {

constexpr Error kSuccess = 0, kInvalidParam = 100000, kMemory = 207001, kContextNull = 107002;

int envi(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
int num_devices() { return envi("ASYNCHZP_DEVICES", 1); }
cudaStream_t S(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t E(void* event) { return static_cast<cudaEvent_t>(event); }
Error of(cudaError_t error) {
  return error == cudaSuccess ? kSuccess : error == cudaErrorMemoryAllocation ? kMemory : 107000;
}
// A thread has a device once it has set one, as on CANN (aclrtGetDevice: 107002 before).
thread_local bool has_device = false;
int contexts[64];

}  // namespace

// ---- the process and its devices

// torch_npu is there when it calls this: its operations are installed, those of Python too.
EXPORT Error aclInit(const char*) {
  int count;
  cudaGetDeviceCount(&count);  // installs aten's
  const int state = PyGILState_Ensure();
  if (PyRun_SimpleStringFlags("from scripts.testbed.device.npu import operators\n"
                              "operators.install()",
                              nullptr))
    device::end("the operators of the emulated NPU cannot be installed");
  PyGILState_Release(state);
  return kSuccess;
}
EXPORT Error aclFinalize() { return kSuccess; }
EXPORT const char* aclrtGetSocName() {
  const char* name = getenv("ASYNCHZP_SOC");
  return name ? name : "Ascend910B1";  // Atlas A2
}
EXPORT Error aclrtGetDeviceCount(uint32_t* count) {
  *count = num_devices();
  return kSuccess;
}
EXPORT Error aclrtSetDevice(int32_t index) {
  if (index < 0 || index >= num_devices()) return 107001;
  has_device = true;
  return of(cudaSetDevice(index));
}
EXPORT Error aclrtGetDevice(int32_t* index) {
  if (!has_device) return kContextNull;
  return of(cudaGetDevice(index));
}
EXPORT Error aclrtResetDevice(int32_t) { return of(cudaDeviceSynchronize()); }
EXPORT Error aclrtGetCurrentContext(void** context) {
  if (!has_device) return kContextNull;
  *context = &contexts[device::current_device()];
  return kSuccess;
}
EXPORT Error aclrtSetCurrentContext(void* context) {
  return aclrtSetDevice(static_cast<int*>(context) - contexts);
}
EXPORT Error aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = has_device;
  return kSuccess;
}
EXPORT Error aclrtSynchronizeDevice() { return of(cudaDeviceSynchronize()); }
EXPORT Error aclrtSynchronizeDeviceWithTimeout(int32_t) { return of(cudaDeviceSynchronize()); }
EXPORT Error aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 0;
  return kSuccess;
}
EXPORT Error aclGetDeviceCapability(uint32_t, int what, int64_t* value) {
  *value = what == 2 ? 192 << 20 : what == 1 ? 2 : 1;  // L2, vector cores, AI cores
  return kSuccess;
}
EXPORT Error aclrtGetDeviceInfo(uint32_t, int, int64_t* value) {
  *value = 1;
  return kSuccess;
}
EXPORT Error aclrtSetDeviceSatMode(int) { return kSuccess; }
EXPORT Error aclrtSetOpExecuteTimeOut(uint32_t) { return kSuccess; }
EXPORT Error aclrtSetOpWaitTimeout(uint32_t) { return kSuccess; }
EXPORT Error aclrtGetLastError(int) { return kSuccess; }
EXPORT Error aclrtPeekAtLastError(int) { return kSuccess; }
EXPORT const char* aclGetRecentErrMsg() { return "an error of the emulated device"; }
// aclsysGetCANNVersion: 8.5.0 makes torch_npu set devices lazily, as it does on a current CANN.
EXPORT Error aclsysGetCANNVersion(int, char* version) {
  const char* text = getenv("ASYNCHZP_CANN");
  if (!text) return kInvalidParam;
  snprintf(version, 128, "%s", text);
  return kSuccess;
}
EXPORT void aclAppLog(int level, const char* function, const char*, uint32_t line,
                      const char* format, ...) {
  if (level < envi("ASYNCHZP_ACL_LOG", 4)) return;  // 3: errors
  va_list list;
  va_start(list, format);
  char text[1000];
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fprintf(stderr, "acl log %d: %s:%u %s\n", level, function, line, text);
}

// ---- streams

EXPORT Error aclrtCreateStreamWithConfig(void** out, uint32_t priority, uint32_t) {
  return of(cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(out),
                                         cudaStreamNonBlocking, priority));
}
EXPORT Error aclrtCreateStream(void** out) { return aclrtCreateStreamWithConfig(out, 0, 0); }
EXPORT Error aclrtDestroyStream(void*) { return kSuccess; }
EXPORT Error aclrtDestroyStreamForce(void*) { return kSuccess; }
EXPORT Error aclrtSetStreamFailureMode(void*, uint64_t) { return kSuccess; }
EXPORT Error aclrtSetStreamOverflowSwitch(void*, uint32_t) { return kSuccess; }
EXPORT Error aclrtGetStreamOverflowSwitch(void*, uint32_t* flag) {
  *flag = 0;
  return kSuccess;
}
EXPORT Error aclrtSynchronizeStream(void* stream) { return of(cudaStreamSynchronize(S(stream))); }
EXPORT Error aclrtSynchronizeStreamWithTimeout(void* stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}
EXPORT Error aclrtStreamQuery(void* stream, int* status) {
  *status = cudaStreamQuery(S(stream)) == cudaSuccess ? 0 : 1;  // complete, not ready
  return kSuccess;
}
EXPORT Error aclrtStreamGetId(void* stream, int32_t* id) {
  *id = int32_t(reinterpret_cast<uintptr_t>(stream) >> 4);
  return kSuccess;
}
EXPORT Error aclrtLaunchCallback(void (*run)(void*), void* argument, int, void* stream) {
  return of(cudaLaunchHostFunc(S(stream), run, argument));
}
EXPORT Error aclrtLaunchHostFunc(void* stream, void (*run)(void*), void* argument) {
  return of(cudaLaunchHostFunc(S(stream), run, argument));
}
// No stream is ever captured.
EXPORT Error aclmdlRICaptureGetInfo(void*, int* status, void** model) {
  *status = 0;
  if (model) *model = nullptr;
  return kSuccess;
}
EXPORT Error aclmdlRICaptureThreadExchangeMode(int*) { return kSuccess; }

// ---- events

EXPORT Error aclrtCreateEventWithFlag(void** out, uint32_t) {
  return of(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(out), 0));
}
EXPORT Error aclrtCreateEventExWithFlag(void** out, uint32_t flag) {
  return aclrtCreateEventWithFlag(out, flag);
}
EXPORT Error aclrtDestroyEvent(void* event) { return of(cudaEventDestroy(E(event))); }
EXPORT Error aclrtRecordEvent(void* event, void* stream) {
  return of(cudaEventRecord(E(event), S(stream)));
}
EXPORT Error aclrtResetEvent(void*, void*) { return kSuccess; }
EXPORT Error aclrtStreamWaitEvent(void* stream, void* event) {
  return of(cudaStreamWaitEvent(S(stream), E(event), 0));
}
EXPORT Error aclrtSynchronizeEvent(void* event) { return of(cudaEventSynchronize(E(event))); }
EXPORT Error aclrtQueryEventStatus(void* event, int* status) {
  *status = cudaEventQuery(E(event)) == cudaSuccess;  // 1: complete
  return kSuccess;
}
EXPORT Error aclrtQueryEventWaitStatus(void*, int* status) {
  *status = 0;  // complete
  return kSuccess;
}
EXPORT Error aclrtEventElapsedTime(float* ms, void* first, void* last) {
  return of(cudaEventElapsedTime(ms, E(first), E(last)));
}

// ---- memory

EXPORT Error aclrtMalloc(void** out, size_t size, int) { return of(cudaMalloc(out, size)); }
EXPORT Error aclrtMallocAlign32(void** out, size_t size, int) { return of(cudaMalloc(out, size)); }
EXPORT Error aclrtFree(void* start) { return of(cudaFree(start)); }
EXPORT Error aclrtMallocHost(void** out, size_t size) { return of(cudaHostAlloc(out, size, 0)); }
EXPORT Error aclrtFreeHost(void* start) { return of(cudaFreeHost(start)); }
EXPORT Error aclrtGetMemInfo(int, size_t* free_size, size_t* total) {
  return of(cudaMemGetInfo(free_size, total));
}
EXPORT Error aclrtMemcpy(void* to, size_t, const void* from, size_t size, int) {
  return of(cudaMemcpy(to, from, size, cudaMemcpyDefault));
}
EXPORT Error aclrtMemcpyAsync(void* to, size_t, const void* from, size_t size, int, void* stream) {
  return of(cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, S(stream)));
}
EXPORT Error aclrtMemset(void* start, size_t, int32_t value, size_t size) {
  return of(cudaMemset(start, value, size));
}
EXPORT Error aclrtMemsetAsync(void* start, size_t, int32_t value, size_t size, void* stream) {
  return of(cudaMemsetAsync(start, value, size, S(stream)));
}
struct PtrAttributes {
  uint32_t id, type, page_size, reserved[4];
};
EXPORT Error aclrtPointerGetAttributes(const void* address, PtrAttributes* out) {
  cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, address);
  *out = {};
  out->type = found.type == cudaMemoryTypeDevice ? 1 : found.type == cudaMemoryTypeHost ? 0 : 2;
  return kSuccess;
}

// ---- options of the compiler of operations, which compiles none here

EXPORT Error aclSetCompileopt(int, const char*) { return kSuccess; }
EXPORT size_t aclGetCompileoptSize(int) { return 16; }
EXPORT Error aclGetCompileopt(int, char* value, size_t size) {
  snprintf(value, size, "disable");
  return kSuccess;
}
std::mutex options_mutex;
std::map<int, int64_t> options;  // deterministic, debug kernel, strong consistency
EXPORT Error aclrtSetSysParamOpt(int option, int64_t value) {
  std::lock_guard lock(options_mutex);
  options[option] = value;
  return kSuccess;
}
EXPORT Error aclrtGetSysParamOpt(int option, int64_t* value) {
  std::lock_guard lock(options_mutex);
  *value = options[option];
  return kSuccess;
}
EXPORT Error aclrtCtxSetSysParamOpt(int option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

// ---- the profiler, which sees nothing

EXPORT int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
EXPORT int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
EXPORT int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
EXPORT int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
EXPORT uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
EXPORT uint64_t MsprofSysCycleTime() { return 0; }
EXPORT Error rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return kInvalidParam; }

// ---- operations that torch_npu hands to CANN by their names: there is no kernel, so it is told

namespace {
char nothing;
}
EXPORT void* aclCreateTensorDesc(int, int, const int64_t*, int) { return &nothing; }
EXPORT void aclDestroyTensorDesc(const void*) {}
EXPORT void* aclCreateDataBuffer(void*, size_t) { return &nothing; }
EXPORT Error aclDestroyDataBuffer(const void*) { return kSuccess; }
EXPORT void aclSetTensorDescName(void*, const char*) {}
EXPORT Error aclSetTensorFormat(void*, int) { return kSuccess; }
EXPORT Error aclSetTensorShape(void*, int, const int64_t*) { return kSuccess; }
EXPORT Error aclSetTensorPlaceMent(void*, int) { return kSuccess; }
EXPORT void* aclopCreateAttr() { return &nothing; }
EXPORT void aclopDestroyAttr(const void*) {}
EXPORT Error aclopSetAttrBool(void*, const char*, uint8_t) { return kSuccess; }
EXPORT Error aclopSetAttrInt(void*, const char*, int64_t) { return kSuccess; }
EXPORT Error aclopSetAttrFloat(void*, const char*, float) { return kSuccess; }
EXPORT Error aclopSetAttrString(void*, const char*, const char*) { return kSuccess; }
EXPORT Error aclopSetAttrDataType(void*, const char*, int) { return kSuccess; }
EXPORT Error aclopSetAttrListInt(void*, const char*, int, const int64_t*) { return kSuccess; }
EXPORT Error aclopCompileAndExecute(const char* name, ...) {
  device::end("operation %s of CANN is not emulated", name);
}
