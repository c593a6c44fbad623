// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// CUDA graphs: [captures.hpp] has what is kept of a capture; a launch asks for it again.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "captures.hpp"
#include "report.hpp"
#include "stream.hpp"
#include "watch.hpp"

namespace device::graphs {
namespace {

using captures::Captured, captures::Kept;

struct Graph {
  captures::Shared captured;
  std::vector<Stream*> own;  // of one that is launched: for the branches, from the second on
};

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
      for (size_t i = 0; i < mine.size(); i++) mine[i] = std::max(mine[i], at_event[one.waits][i]);
  }
  for (size_t i = 0; i < known.size(); i++)
    if (known[0][i] < known[i][i])
      end("a capture ends while a stream that it forked is not joined");
}

void launch(Graph& graph, Stream* stream) {
  captures::refuse(stream, "the launch of a graph");
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

}  // namespace device::graphs

using namespace device;
using graphs::Graph;

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  Stream* stream = stream_of(handle);
  if (stream == stream_of(nullptr)) end("the default stream cannot be captured");
  captures::begin(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  const captures::Shared captured = captures::finish(stream_of(handle));
  if (!captured) return cudaErrorStreamCaptureUnmatched;
  graphs::refuse_unjoined(*captured);
  *out = reinterpret_cast<cudaGraph_t>(new Graph{captured, {}});
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      captures::of(stream_of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
  const auto capture = captures::of(stream_of(stream));
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
