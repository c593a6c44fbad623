// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Happens-before on the bytes that kernels read and write: two accesses to the same bytes, one of
// them a write, must be ordered by a stream, an event or a wait of the host. Where they are not the
// process ends with both, also where they came in the right order this time.
//
// Programming Guide, "Streams": different streams "may execute their commands out of order with
// respect to one another or concurrently; this behavior is not guaranteed and should therefore not
// be relied upon for correctness".
//
// Nobody sees how threads of the host order one another (mutexes, Python), so their calls count as
// one sequence, that in which they came: what is checked is what devices do later than the call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace device {

struct Stream;

struct Access {
  const void* start;
  size_t size;
  bool is_write;
};

namespace watch {

// Of each stream how many of its operations are known to be done.
using Clock = std::vector<int64_t>;
using Known = std::shared_ptr<const Clock>;

enum class Kind { kernel, allocation, free };

// A kernel or a copy is about to be put on the stream; or the caching allocator gives memory of the
// stream to an owner, or takes it back. Both of these count as writes: of the owner before, whose
// last kernels may still be under way, and of the next.
void submit(Stream* stream, Kind kind, const std::string& name, const Access* accesses,
            size_t count);

// What is known when all that is on the stream now is done. Before the matching Stream::end.
Known end_of(Stream* stream);
Known end_of_all(int device);

void order_stream(Stream* stream, const Known& after);  // what the stream gets from now on
void order_host(const Known& after);  // this thread has waited, or a query has succeeded

void forget(const void* start, size_t size);  // memory that is new or gone

// Whether `address` is in page-locked memory that a stream still uses: an error too.
bool tell_of_touching(const void* address);

}  // namespace watch
}  // namespace device
