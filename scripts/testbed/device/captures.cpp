// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "captures.hpp"

#include <atomic>
#include <mutex>

#include "report.hpp"

namespace device::captures {
namespace {

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

}  // namespace

void begin(Stream* stream) {
  refuse(stream, "another capture");
  std::lock_guard lock(mutex);
  auto captured = std::make_shared<Captured>();
  captured->id = ++last_id;
  captured->branches[stream] = 0;
  enter(stream, captured);
}

Shared finish(Stream* stream) {
  std::lock_guard lock(mutex);
  const Shared captured = capture_of(stream);
  if (!captured) return nullptr;
  if (captured->branches.at(stream) != 0) end("a capture ends on another stream");
  for (auto& [other, branch] : captured->branches) num_captured -= captures.erase(other);
  return captured;
}

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

}  // namespace device::captures
