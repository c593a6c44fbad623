// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// What the host asks of a stream while it is captured: nothing of it runs, and all is kept in the
// order of the calls, for a launch of the graph (graphs.cpp), which asks for all of that again: of
// the stream of the launch, and of a stream of its own for each further one that the capture
// reached by events. So the watch, the delays and the hardware queues see a launch as the same
// calls without a graph. Streams are names here.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace device {
struct Stream;

namespace captures {

using Issue = std::function<void(Stream*)>;  // asks a stream for what was captured of it

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

void begin(Stream* stream);
// Ends the capture that began on `stream`, for all of its streams; null without one.
Shared finish(Stream* stream);

// The capture that `stream` takes part in; 0 without one.
unsigned long long of(Stream* stream);
// Whether it is one that the capture reached by an event.
bool is_forked(Stream* stream);
// Ends the process with `what` where `stream` is captured, or, with null, where any stream is.
void refuse(Stream* stream, const char* what);
// Keeps `issue` for `stream`, where that is captured. Returns whether.
bool keeps(Stream* stream, const Issue& issue);
// An event is recorded on a captured stream; its number in the capture.
int record(Stream* stream);
// `stream` waits for event `number` of `capture`, and is captured from now on.
void wait(unsigned long long capture, Stream* stream, int number);

}  // namespace captures
}  // namespace device
