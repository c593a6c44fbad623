// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Vector clocks over the streams, and for each range of bytes the last write and the reads since
// (Flanagan and Freund, "FastTrack", 2009). A write replaces all that it is ordered after, so what
// is kept grows with the ranges in use and not with time.
#include "watch.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstdio>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "captures.hpp"
#include "host_memory.hpp"
#include "report.hpp"
#include "stream.hpp"

namespace device::watch {
namespace {

using Address = uintptr_t;
using Traceback = std::shared_ptr<void>;

struct Operation {
  Kind kind;
  std::string name;
  int stream;      // its number, in the order in which streams were first used
  int64_t number;  // on its stream, counted from 1
  Traceback traceback;
};
using Shared = std::shared_ptr<const Operation>;

// Bytes [key, end) of which all are in the same state.
struct Cell {
  Address end;
  Shared write;
  std::vector<Shared> reads;  // since the write, at most one of a stream
};
using Cells = std::map<Address, Cell>;

struct Line {  // of operations: a stream, with what is known where its next one runs
  Stream* stream;
  int64_t number = 0;
  Clock clock;
};

struct Fault {
  Shared before, now;
  bool has_written, writes;
  Address start = 0;
  size_t size = 0;
};

// How to keep where this thread is, and to write it down; null where nobody asks for it.
using Gather = Traceback (*)(bool may_wait);
using TextOf = std::string (*)(const Traceback&);

// Never destroyed: threads outlive main().
auto& mutex = *new std::mutex;
enum class Mode { off, ends, notes };
Mode from_environment() {
  const char* text = getenv("ASYNCHZP_DEVICE_WATCH");
  return text && *text == '0' ? Mode::off : Mode::ends;
}

std::atomic<Mode> mode{from_environment()};
Gather traceback_of_here = nullptr;
TextOf text_of_traceback = nullptr;
auto& cells = *new Cells;
auto& lines = *new std::vector<Line>;
auto& numbers = *new std::unordered_map<Stream*, int>;
auto& host = *new Clock;
auto& noted = *new std::string;  // lines

// What only this thread has seen. A thread that does nothing but ask whether something has happened
// (a watchdog) orders nothing for others: whether it saw it in time is chance.
thread_local Clock seen_here;
thread_local bool has_submitted = false;

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

bool includes(const Clock& clock, const Operation& operation) {
  return size_t(operation.stream) < clock.size() && clock[operation.stream] >= operation.number;
}

Line& line_of(Stream* stream) {
  auto [found, is_new] = numbers.try_emplace(stream, int(lines.size()));
  if (is_new) lines.push_back({stream, 0, {}});
  return lines[found->second];
}

// ---- what streams still do with page-locked memory

struct Use {
  Shared operation;
  bool writes;
};
auto& in_use = *new std::map<HostBlock, std::vector<Use>>;

void protect(const HostBlock& block, const std::vector<Use>& uses) {
  auto writes = [](const Use& one) { return one.writes; };
  const bool is_written = std::any_of(uses.begin(), uses.end(), writes);
  block.allow(is_written     ? Allowed::nothing
              : uses.empty() ? Allowed::everything
                             : Allowed::reading);
}

void note_use_of_host_memory(const Access& access, const Shared& now) {
  const HostBlock block = HostBlock::holder(access.start);
  if (!block.start) return;
  auto& uses = in_use[block];
  uses.push_back({now, access.is_write});
  protect(block, uses);
}

// The host may touch what it has waited for.
void end_uses_of_host_memory(const Clock& known) {
  for (auto one = in_use.begin(); one != in_use.end();) {
    auto& [block, uses] = *one;
    if (std::erase_if(uses, [&](const Use& use) { return includes(known, *use.operation); }))
      protect(block, uses);
    one = uses.empty() ? in_use.erase(one) : std::next(one);
  }
}

// ---- cells

// Makes `at` the start of a cell where it lies within one.
void split(Address at) {
  auto after = cells.lower_bound(at);
  if (after == cells.begin()) return;
  auto before = std::prev(after);
  if (before->second.end <= at) return;
  Cell rest = before->second;
  before->second.end = at;
  cells.emplace_hint(after, at, std::move(rest));
}

Cells::iterator first_in(Address start) {
  auto found = cells.upper_bound(start);
  if (found != cells.begin() && std::prev(found)->second.end > start) --found;
  return found;
}

bool is_gone(const Cell& cell, const Operation& now) {
  return cell.write && cell.write->kind == Kind::free && now.kind == Kind::kernel;
}

std::optional<Fault> conflict(const Cell& cell, const Shared& now, const Clock& clock,
                              bool writes) {
  if (cell.write && (is_gone(cell, *now) || !includes(clock, *cell.write)))
    return Fault{cell.write, now, true, writes};
  if (writes)
    for (const Shared& read : cell.reads)
      if (!includes(clock, *read)) return Fault{read, now, false, true};
  return {};
}

std::optional<Fault> check(Address start, Address end, const Shared& now, const Clock& clock,
                           bool writes) {
  for (auto at = first_in(start); at != cells.end() && at->first < end; ++at)
    if (auto fault = conflict(at->second, now, clock, writes)) {
      fault->start = std::max(start, at->first);
      fault->size = std::min(end, at->second.end) - fault->start;
      return fault;
    }
  return {};
}

void note_write(Address start, Address end, const Shared& now) {
  split(start);
  split(end);
  cells.erase(cells.lower_bound(start), cells.lower_bound(end));
  cells[start] = {end, now, {}};
}

void note_read(Address start, Address end, const Shared& now, const Clock& clock) {
  split(start);
  split(end);
  for (Address at = start; at < end;) {
    auto found = cells.lower_bound(at);
    if (found == cells.end() || found->first > at) {  // nobody has used these bytes yet
      const Address next = found == cells.end() ? end : std::min(end, found->first);
      found = cells.emplace_hint(found, at, Cell{next, nullptr, {}});
    }
    auto& reads = found->second.reads;
    // What is not ordered after this read is not ordered after those that came before it either.
    std::erase_if(reads, [&](const Shared& read) { return includes(clock, *read); });
    reads.push_back(now);
    at = found->second.end;
    if (found == cells.begin()) continue;
    auto before = std::prev(found);
    if (before->second.end == found->first && before->second.write == found->second.write &&
        before->second.reads == reads) {
      before->second.end = at;
      cells.erase(found);
    }
  }
}

// ---- reports: without the lock, for tracebacks need the interpreter's

std::string text_of(const Operation& operation) {
  Stream* stream;
  {
    std::lock_guard lock(mutex);
    stream = lines[operation.stream].stream;
  }
  const bool is_default = stream == stream_of(nullptr);
  return operation.name + " (no. " + std::to_string(operation.number) + " on stream " +
         std::to_string(operation.stream) + (is_default ? ", the default)" : ")");
}

void report_traceback(const Operation& operation) {
  if (!operation.traceback) return;
  report("%s comes from", text_of(operation).c_str());
  const std::string text = text_of_traceback(operation.traceback);
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    report("  %s", text.substr(start, end - start).c_str());
    start = end + 1;
  }
}

// Ends the process, or notes the line.
void tell(const std::string& line, std::initializer_list<const Operation*> from) {
  if (mode == Mode::notes) {
    std::lock_guard lock(mutex);
    noted += line + "\n";
    return;
  }
  for (const Operation* operation : from) report_traceback(*operation);
  end("%s", line.c_str());
}

void tell(const Fault& fault) {
  auto verb = [](bool writes) { return writes ? " writes " : " reads "; };
  char start[32];
  snprintf(start, sizeof start, "%p", reinterpret_cast<void*>(fault.start));
  const std::string what =
      text_of(*fault.now) + verb(fault.writes) + std::to_string(fault.size) + " bytes at " + start;
  const std::string before = text_of(*fault.before);
  if (fault.before->kind == Kind::free && fault.now->kind == Kind::kernel)
    tell(what + " after " + before + " has taken them back", {&*fault.before, &*fault.now});
  else
    tell(what + " that " + before + (fault.has_written ? " writes" : " reads") +
             ", and nothing orders the two",
         {&*fault.before, &*fault.now});
}

Known kept(Clock clock) { return std::make_shared<const Clock>(std::move(clock)); }

}  // namespace

void submit(Stream* stream, Kind kind, const std::string& name, const Access* accesses,
            size_t count) {
  if (mode == Mode::off) return;
  std::vector<Access> kept(accesses, accesses + count);
  if (captures::keeps(stream, [=](Stream* s) { submit(s, kind, name, kept.data(), kept.size()); }))
    return;
  // The caching allocator calls with its lock held.
  Traceback traceback = traceback_of_here ? traceback_of_here(kind == Kind::kernel) : nullptr;
  std::unique_lock lock(mutex);
  has_submitted = true;
  join(host, seen_here);
  seen_here.clear();
  Line& line = line_of(stream);
  const int index = numbers[stream];
  join(line.clock, host);
  if (line.clock.size() <= size_t(index)) line.clock.resize(index + 1);
  line.clock[index] = ++line.number;
  Shared now(new Operation{kind, name, index, line.number, std::move(traceback)});
  std::optional<Fault> fault;
  for (const Access* one = accesses; one != accesses + count && !fault; one++) {
    const auto start = reinterpret_cast<Address>(one->start);
    fault = check(start, start + one->size, now, line.clock, one->is_write);
  }
  if (fault) {
    lock.unlock();
    tell(*fault);
    lock.lock();
  }
  // Reads first: an operation on its own input leaves a write.
  for (const bool is_write : {false, true})
    for (const Access* one = accesses; one != accesses + count; one++) {
      if (one->is_write != is_write || !one->size) continue;
      const auto start = reinterpret_cast<Address>(one->start);
      if (is_write)
        note_write(start, start + one->size, now);
      else
        note_read(start, start + one->size, now, line.clock);
      if (kind == Kind::kernel) note_use_of_host_memory(*one, now);
    }
}

Known end_of(Stream* stream) {
  if (mode == Mode::off) return nullptr;
  std::lock_guard lock(mutex);
  return kept(line_of(stream).clock);
}

Known end_of_all(int device) {
  if (mode == Mode::off) return nullptr;
  std::lock_guard lock(mutex);
  Clock all;
  for (const Line& line : lines)
    if (device < 0 || line.stream->device == device) join(all, line.clock);
  return kept(std::move(all));
}

void order_stream(Stream* stream, const Known& after) {
  if (!after) return;
  std::lock_guard lock(mutex);
  join(line_of(stream).clock, *after);
}

void order_host(const Known& after) {
  if (!after) return;
  std::lock_guard lock(mutex);
  join(has_submitted ? host : seen_here, *after);
  if (in_use.empty()) return;
  Clock known = host;
  join(known, seen_here);
  end_uses_of_host_memory(known);
}

void forget(const void* start_of, size_t size) {
  if (mode == Mode::off) return;
  const auto start = reinterpret_cast<Address>(start_of), end = start + size;
  std::lock_guard lock(mutex);
  split(start);
  split(end);
  cells.erase(cells.lower_bound(start), cells.lower_bound(end));
  in_use.erase(HostBlock::holder(start_of));
}

bool tell_of_touching(const void* address) {
  Shared operation;
  {
    std::lock_guard lock(mutex);
    auto found = in_use.find(HostBlock::holder(address));
    if (found == in_use.end()) return false;
    operation = found->second.back().operation;
    for (const Use& use : found->second)
      if (use.writes) operation = use.operation;
    found->first.allow(Allowed::everything);
    in_use.erase(found);
  }
  char text[32];
  snprintf(text, sizeof text, "%p", address);
  // The host is where it is: what it runs has its traceback from Python.
  tell("the host touches page-locked memory at " + std::string(text) + " of " +
           text_of(*operation) + ", for which it has not waited",
       {&*operation});
  return true;
}

}  // namespace device::watch

using namespace device;

EXPORT void asynchzp_device_watch(watch::Mode mode) { watch::mode = mode; }

// What Mode::notes has noted, line by line, since the last call.
EXPORT const char* asynchzp_device_noted() {
  static std::string text;
  std::lock_guard lock(watch::mutex);
  text = std::exchange(watch::noted, {});
  return text.c_str();
}

EXPORT void asynchzp_device_keep_tracebacks(watch::Gather of_here, watch::TextOf as_text) {
  watch::text_of_traceback = as_text;
  watch::traceback_of_here = of_here;
}

// For operations.cpp, which is a library of its own.
EXPORT bool asynchzp_device_is_pinned(const void* address) { return is_pinned(address); }
EXPORT void* asynchzp_device_for_kernels(const void* address) { return for_kernels(address); }

EXPORT void asynchzp_device_submit(void* stream, watch::Kind kind, const std::string& name,
                                   const Access* accesses, size_t count) {
  watch::submit(stream_of(stream), kind, name, accesses, count);
}
