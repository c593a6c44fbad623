// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "graphs.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "report.hpp"
#include "stream.hpp"
#include "watch.hpp"

namespace device::graphs {
namespace {

struct Kept {
  int branch;   // 0: the stream on which the capture began
  Issue issue;  // of kernels, copies, and memory that the allocator hands out and takes back
  int records = -1, waits = -1;  // an event
};

// What an instantiated graph and the graph that it came from share: neither is changed.
struct Captured {
  unsigned long long id;
  std::map<Stream*, int> branches;
  std::vector<Kept> kept;
  int num_events = 0;
  size_t num_kernels = 0;
};
using Shared = std::shared_ptr<Captured>;

struct Graph {
  Shared captured;
  std::vector<Stream*> own;  // of one that is launched: for the branches, from the second on
};

auto& mutex = *new std::mutex;  // never destroyed: threads outlive main()
auto& captures = *new std::map<Stream*, Shared>;
std::atomic<int> num_captured{0};
unsigned long long last_id = 0;

Shared capture_of(Stream* stream) {
  auto found = captures.find(stream);
  return found == captures.end() ? nullptr : found->second;
}

void enter(Stream* stream, const Shared& capture) {
  captures[stream] = capture;
  num_captured++;
}

// A branch that nothing of the first one has waited for (cudaErrorStreamCaptureUnjoined).
void refuse_unjoined(const Captured& graph) {
  using Clock = std::vector<int>;  // of each branch how much is done
  std::vector<Clock> known(graph.branches.size(), Clock(graph.branches.size()));
  std::vector<Clock> at_event;
  for (const Kept& one : graph.kept) {
    Clock& mine = known[one.branch];
    if (one.issue) mine[one.branch]++;
    if (one.records >= 0) at_event.push_back(mine);
    if (one.waits >= 0)
      for (size_t i = 0; i < mine.size(); i++)
        mine[i] = std::max(mine[i], at_event[one.waits][i]);
  }
  for (size_t i = 0; i < known.size(); i++)
    if (known[0][i] < known[i][i])
      end("a capture ends while a stream that it forked is not joined");
}

void launch(Graph& graph, Stream* stream) {
  refuse(stream, "the launch of a graph");
  const Captured& captured = *graph.captured;
  while (graph.own.size() + 1 < captured.branches.size())
    graph.own.push_back(new Stream(stream->device, 0));
  std::vector<Position> positions(captured.num_events);
  std::vector<watch::Known> known(captured.num_events);
  // All of a graph comes after what is on the stream of its launch, and what follows after all:
  // each branch was forked from the first one and joined to it.
  for (const Kept& one : captured.kept) {
    Stream* branch = one.branch ? graph.own[one.branch - 1] : stream;
    if (one.issue) one.issue(branch);
    if (one.records >= 0) {
      known[one.records] = watch::end_of(branch);
      positions[one.records] = branch->end();
    }
    if (one.waits >= 0) {
      watch::order_stream(branch, known[one.waits]);
      branch->push_wait(positions[one.waits]);
    }
  }
}

}  // namespace

unsigned long long of(Stream* stream) {
  if (!num_captured) return 0;
  std::lock_guard lock(mutex);
  const Shared capture = capture_of(stream);
  return capture ? capture->id : 0;
}

bool is_forked(Stream* stream) {
  if (!num_captured) return false;
  std::lock_guard lock(mutex);
  const Shared capture = capture_of(stream);
  return capture && capture->branches.at(stream) != 0;
}

void refuse(Stream* stream, const char* what) {
  if (stream ? of(stream) != 0 : num_captured > 0)
    end("%s is not allowed while a stream is captured", what);
}

bool keeps(Stream* stream, const Issue& issue) {
  if (!num_captured) return false;
  std::lock_guard lock(mutex);
  const Shared capture = capture_of(stream);
  if (!capture) return false;
  capture->kept.push_back({capture->branches.at(stream), issue});
  capture->num_kernels++;
  return true;
}

int record(Stream* stream) {
  std::lock_guard lock(mutex);
  const Shared capture = capture_of(stream);
  capture->kept.push_back({capture->branches.at(stream), nullptr, capture->num_events});
  return capture->num_events++;
}

void wait(unsigned long long id, Stream* stream, int number) {
  std::lock_guard lock(mutex);
  Shared capture;
  for (auto& [other, one] : captures)
    if (one->id == id) capture = one;
  if (!capture) end("a stream waits for an event of a capture that has ended");
  const Shared own = capture_of(stream);
  if (own && own != capture) end("a captured stream waits for an event of another capture");
  if (!own) {
    capture->branches.try_emplace(stream, capture->branches.size());
    enter(stream, capture);
  }
  capture->kept.push_back({capture->branches.at(stream), nullptr, -1, number});
}

}  // namespace device::graphs

using namespace device;
using graphs::Graph;

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  Stream* stream = stream_of(handle);
  if (stream == stream_of(nullptr)) end("the default stream cannot be captured");
  graphs::refuse(stream, "another capture");
  std::lock_guard lock(graphs::mutex);
  auto captured = std::make_shared<graphs::Captured>();
  captured->id = ++graphs::last_id;
  captured->branches[stream] = 0;
  graphs::enter(stream, captured);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  graphs::Shared captured;
  {
    std::lock_guard lock(graphs::mutex);
    captured = graphs::capture_of(stream_of(handle));
    if (!captured) return cudaErrorStreamCaptureUnmatched;
    if (captured->branches.at(stream_of(handle)) != 0) end("a capture ends on another stream");
    for (auto& [stream, branch] : captured->branches)
      graphs::num_captured -= graphs::captures.erase(stream);
  }
  graphs::refuse_unjoined(*captured);
  *out = reinterpret_cast<cudaGraph_t>(new Graph{captured, {}});
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = graphs::of(stream_of(stream)) ? cudaStreamCaptureStatusActive
                                          : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
  const auto capture = graphs::of(stream_of(stream));
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->captured->num_kernels;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph,
                                                 unsigned long long) {
  auto captured = reinterpret_cast<Graph*>(graph)->captured;
  *out = reinterpret_cast<cudaGraphExec_t>(new Graph{captured, {}});
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  graphs::launch(*reinterpret_cast<Graph*>(graph), stream_of(stream));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
