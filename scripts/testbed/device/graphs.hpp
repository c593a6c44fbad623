// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// CUDA graphs: while a stream is captured nothing of it runs. What the host asks of it is kept in
// the order of the calls, and a launch of the graph asks for all of that again: of the stream of
// the launch, and of a stream of its own for each further one that the capture reached by events.
// So the watch, the delays and the hardware queues see a launch as the same calls without a graph.
#pragma once
#include <functional>

namespace device {
struct Stream;

namespace graphs {

using Issue = std::function<void(Stream*)>;  // asks a stream for what was captured of it

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

}  // namespace graphs
}  // namespace device
