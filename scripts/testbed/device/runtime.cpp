// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime API: devices, streams and events.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "captures.hpp"
#include "clock.hpp"
#include "delays.hpp"
#include "links.hpp"
#include "report.hpp"
#include "stream.hpp"
#include "watch.hpp"

namespace device {
namespace {

using Clock = std::chrono::steady_clock;  // or [Note: the device's clock], in the same ticks
static_assert(std::is_same_v<Clock::period, std::nano>);

int num_devices() {
  const char* text = getenv("ASYNCHZP_DEVICES");
  return text ? atoi(text) : 1;
}

// The operations need torch, which is there when it asks how many devices there are. They lie
// beside this library.
void install_operations() {
  static std::once_flag once;
  static thread_local bool is_inside = false;  // they ask too
  if (is_inside) return;
  is_inside = true;
  std::call_once(once, [] {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&install_operations), &here);
    std::string path = here.dli_fname;
    path.replace(path.rfind('/') + 1, std::string::npos, "operations.so");
    void* library = dlopen(path.c_str(), RTLD_NOW);
    if (!library) end("%s", dlerror());
    reinterpret_cast<void (*)()>(dlsym(library, "asynchzp_device_install_operations"))();
  });
  is_inside = false;
}

// What is recorded replaces what was recorded before; who waits already keeps that.
struct Event {
  struct Record {
    Position position;
    watch::Known known;  // to who has waited for it
    std::atomic<Clock::rep> at{0};
    unsigned long long capture = 0;  // 0: none
    int number = -1;                 // in it
  };
  std::mutex mutex;
  std::shared_ptr<Record> record;
};

std::shared_ptr<Event::Record> record_of(cudaEvent_t handle) {
  auto event = reinterpret_cast<Event*>(handle);
  std::lock_guard lock(event->mutex);
  return event->record;
}

void set_record(cudaEvent_t handle, std::shared_ptr<Event::Record> record) {
  auto event = reinterpret_cast<Event*>(handle);
  std::lock_guard lock(event->mutex);
  event->record = std::move(record);
}

// For the host: an event of a capture happens in launches alone (cudaErrorCapturedEvent).
std::shared_ptr<Event::Record> record_for_host(cudaEvent_t handle) {
  auto record = record_of(handle);
  if (record && record->capture) end("the host asks for an event of a capture");
  return record;
}

cudaStream_t new_stream(int priority) {
  return reinterpret_cast<cudaStream_t>(new Stream(current_device(), priority));
}

}  // namespace

}  // namespace device

using namespace device;

// ---- devices

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  install_operations();
  *count = num_devices();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* index) {
  *index = current_device();
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int index) {
  if (index < 0 || index >= num_devices()) return cudaErrorInvalidDevice;
  set_current_device(index);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// Programs choose and refuse formats of numbers by it, before they ask for a kernel.
static int capability_major() {
  const char* major = getenv("ASYNCHZP_DEVICE_MAJOR");
  return major ? atoi(major) : 9;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  *out = {};
  snprintf(out->name, sizeof out->name, "emulated CUDA device");
  out->major = capability_major();
  out->totalGlobalMem = size_t(8) << 30;
  out->multiProcessorCount = 1;  // as slow as it is: programs may choose sizes by it
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = 227 << 10;
  out->sharedMemPerMultiprocessor = 228 << 10;
  out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = 50 << 20;
  for (int& size : out->maxGridSize) size = 1 << 30;
  for (int& size : out->maxThreadsDim) size = 1024;
  out->concurrentKernels = out->unifiedAddressing = 1;
  out->asyncEngineCount = 3;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability_major(); break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 1; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    default: end("cudaDeviceGetAttribute(%d) is not emulated", attribute);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int index) {
  snprintf(text, size, "0000:%02x:00.0", index);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  captures::refuse(nullptr, "cudaDeviceSynchronize");
  const auto done = watch::end_of_all(current_device());
  Stream::synchronize_all(current_device());
  watch::order_host(done);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError() {
  return cudaSuccess;
}  // a kernel that fails ends the process
EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

EXPORT const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    default: return "an error of the emulated device";
  }
}

// Symbols of the driver: driver.cpp has those that work, the rest end the process with their name.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- streams

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// A stream without cudaStreamNonBlocking waits for the default stream and the other way round
// (Runtime API, "Stream synchronization behavior"). torch makes none.
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  if (!(flags & cudaStreamNonBlocking)) end("a blocking stream is not emulated");
  *out = new_stream(priority);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

// What is in it still runs; handles of torch's pools live as long as the process.
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  captures::refuse(stream_of(stream), "a wait of the host for it");
  const auto done = watch::end_of(stream_of(stream));
  stream_of(stream)->end().wait();
  watch::order_host(done);
  return cudaSuccess;
}

// Programming Guide, "Explicit Synchronization": a query tells whether all preceding commands in
// the stream have completed.
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  captures::refuse(stream_of(stream), "cudaStreamQuery of it");
  const auto done = watch::end_of(stream_of(stream));
  if (!stream_of(stream)->end().is_reached()) return cudaErrorNotReady;
  watch::order_host(done);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void* argument) {
  stream_of(stream)->push_kernel([=] { run(argument); });
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

// ---- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

// Captures what the stream has at the time of this call (Runtime API, cudaEventRecord).
EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  Stream* stream = stream_of(stream_handle);
  auto record = std::make_shared<Event::Record>();
  if ((record->capture = captures::of(stream))) {
    record->number = captures::record(stream);
    set_record(handle, record);
    return cudaSuccess;
  }
  record->known = watch::end_of(stream);
  record->position = stream->push([record] {
    record->at =
        is_time_stated() ? Clock::rep(1e9 * moment()) : Clock::now().time_since_epoch().count();
  });
  set_record(handle, record);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

// An event that was never recorded is complete, and waiting for it does nothing (cudaEventQuery,
// cudaStreamWaitEvent).
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto record = record_for_host(event);
  if (!record) return cudaSuccess;
  if (!record->position.is_reached()) return cudaErrorNotReady;
  watch::order_host(record->known);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto record = record_for_host(event);
  if (!record) return cudaSuccess;
  record->position.wait();
  watch::order_host(record->known);
  return cudaSuccess;
}

// Waits for the record of now: one made later does not count (cudaStreamWaitEvent).
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto record = record_of(event);
  if (!record) return cudaSuccess;
  if (record->capture) {
    captures::wait(record->capture, stream_of(stream), record->number);
    return cudaSuccess;
  }
  captures::refuse(stream_of(stream), "a wait for an event from outside of the capture");
  watch::order_stream(stream_of(stream), record->known);
  stream_of(stream)->push_wait(record->position);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  auto from = record_for_host(first), to = record_for_host(last);
  if (!from || !to) return cudaErrorInvalidResourceHandle;
  if (!from->position.is_reached() || !to->position.is_reached()) return cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(Clock::duration(to->at - from->at)).count();
  return cudaSuccess;
}

// ---- operations.cpp, a library of its own

EXPORT void asynchzp_device_launch(void* stream, std::function<void()>* run) {
  stream_of(stream)->push_kernel(std::move(*run));
}

EXPORT void asynchzp_device_synchronize(void* stream) {
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
}

// The number of the capture that the stream is in, 0 without one.
EXPORT unsigned long long asynchzp_device_capture(void* stream) {
  return captures::of(stream_of(stream));
}

// ---- the clock and the delays of tests

// From here on, when everything submitted so far has run, the clock goes, from 0. Speeds: see
// Links.
EXPORT void asynchzp_device_state_time(double inter_nbytes_per_s, double intra_nbytes_per_s,
                                       double inter_latency_s, double intra_latency_s,
                                       int ranks_per_node, double host_nbytes_per_s) {
  Stream::synchronize_all();
  links() = {inter_nbytes_per_s, intra_nbytes_per_s, inter_latency_s,
             intra_latency_s,    ranks_per_node,     host_nbytes_per_s};
  start_clock();
  Stream::restart_clock();
}

EXPORT void asynchzp_device_compute(void* handle, double seconds) {
  if (!is_time_stated())
    end("a kernel that takes a stated time, and no clock: call inside.state_time()");
  Stream* stream = stream_of(handle);
  stream->push_kernel([stream, seconds] {
    occupy(stream->device, Engine::computes, seconds);
    note_span("compute", moment() - seconds);
  });
}

// Takes effect when everything submitted so far has run; streams are counted anew.
EXPORT void asynchzp_device_set_delays(int law, uint64_t seed, int rank, int world_size,
                                       int longest_us) {
  Stream::synchronize_all();
  set_delays({Law(law), seed, rank, world_size, longest_us});
  Stream::count_anew();
}
