// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "clock.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "report.hpp"

namespace device {
namespace {

std::atomic<bool> is_stated{false};
std::atomic<double> host{0};

thread_local bool is_of_stream = false;
thread_local double now = 0, begun = 0;

// The times at which an engine of a device works, sorted; those that touch are joined.
std::mutex mutex;
auto& working = *new std::map<std::pair<int, Engine>, std::map<double, double>>;
auto& spans = *new std::string;  // a line each

}  // namespace

bool is_time_stated() { return is_stated; }

void start_clock() {
  std::lock_guard lock(mutex);
  working.clear();
  spans.clear();
  host = 0;
  is_stated = true;
}

void begin_moment(double least, double last) {
  is_of_stream = true;
  now = begun = std::max(least, last);
}

double moment() { return now; }
double moment_begun() { return begun; }
double host_moment() { return host; }

void reach(double moment) {
  if (is_of_stream) {
    now = std::max(now, moment);
    return;
  }
  double before = host;
  while (before < moment && !host.compare_exchange_weak(before, moment)) {
  }
}

// The first time that is long enough: threads of streams may come in any order.
void occupy(int device, Engine engine, double seconds) {
  std::lock_guard lock(mutex);
  auto& taken = working[{device, engine}];
  double begin = now;
  for (auto& [from, to] : taken)
    if (from < begin + seconds && begin < to) begin = to;
  now = begin + seconds;
  double end = now;
  auto next = taken.lower_bound(begin);
  if (next != taken.end() && next->first == end) {
    end = next->second;
    next = taken.erase(next);
  }
  if (next != taken.begin() && std::prev(next)->second == begin)
    std::prev(next)->second = end;
  else
    taken[begin] = end;
}

void note_span(const char* what, double begin) {
  char line[96];
  std::snprintf(line, sizeof line, "%s %.9f %.9f\n", what, begin, now);
  std::lock_guard lock(mutex);
  spans += line;
}

void Moments::add(double begin, double end) {
  last = end;
  if (is_stated)
    spans_.push_back({begin, end});
  else
    before_++;
}

const Moments::Span* Moments::found(int64_t count) const {
  const int64_t index = count - before_ - 1;
  return index >= 0 && index < int64_t(spans_.size()) ? &spans_[index] : nullptr;
}

double Moments::end_of(int64_t count) const {
  const Span* span = found(count);
  return span ? span->end : 0;
}

double Moments::begin_of(int64_t count) const {
  const Span* span = found(count);
  return span ? span->begin : begun;
}

}  // namespace device

// What has taken time since the last call, in seconds of the clock: "what begin end", one a line.
EXPORT const char* asynchzp_device_spans() {
  static std::string text;
  std::lock_guard lock(device::mutex);
  text = std::exchange(device::spans, {});
  return text.c_str();
}
