// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "stream.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "captures.hpp"
#include "delays.hpp"
#include "report.hpp"

namespace device {

// A hardware queue: its commands run one after the other, whatever their streams. That is the
// strictest device that CUDA allows: it promises nowhere that two kernels run at the same time, and
// CUDA_DEVICE_MAX_CONNECTIONS says how many such queues there are (Programming Guide, "Environment
// Variables" and "Implicit Synchronization"; NCCL, "Using multiple NCCL communicators
// concurrently").
struct Queue {
  std::mutex mutex;
  std::condition_variable first_changed;
  std::deque<Position> commands;
  double left = 0;  // when the last command left it, by the device's clock

  void await_turn(const Position& mine) {
    std::unique_lock lock(mutex);
    while (!(commands.front() == mine)) {
      const Position first = commands.front();
      lock.unlock();
      first.demand();
      lock.lock();
      first_changed.wait(lock, [&] { return !(commands.front() == first); });
    }
  }

  void leave() {
    std::lock_guard lock(mutex);
    commands.pop_front();
    first_changed.notify_all();
  }
};

namespace {

using Clock = std::chrono::steady_clock;

// Under Law::on_demand what nobody waits for runs once the host has been quiet for so long: another
// rank may need it.
constexpr auto kQuiet = std::chrono::milliseconds(50);

// Never destroyed: threads of streams outlive main().
auto& all = *new std::vector<Stream*>;
auto& all_mutex = *new std::mutex;
std::atomic<int> next_ordinal{0}, next_number{0};
std::atomic<Clock::rep> last_submission{0};
thread_local int current = 0;
auto& defaults = *new std::map<int, Stream*>;  // of each device

bool is_quiet() {
  return Clock::now().time_since_epoch() - Clock::duration(last_submission) > kQuiet;
}

// By the order in which streams are first used; without the variable each has one of its own, where
// CUDA would have 8 for all.
Queue* queue_of(int stream_number) {
  static std::mutex mutex;
  static auto& queues = *new std::map<int, Queue>;
  static const char* text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");  // once, as the driver does
  if (!text) return nullptr;
  std::lock_guard lock(mutex);
  return &queues[stream_number % std::max(1, atoi(text))];
}

std::vector<Stream*> streams_of(int device) {
  std::lock_guard lock(all_mutex);
  std::vector<Stream*> found;
  for (Stream* stream : all)
    if (device < 0 || stream->device == device) found.push_back(stream);
  return found;
}

}  // namespace

Stream::Stream(int device, int priority) : device(device), priority(priority) {
  std::lock_guard lock(all_mutex);
  all.push_back(this);
}

Position Stream::push_kernel(std::function<void()> run) {
  if (captures::keeps(this, [run](Stream* s) { s->push_kernel(run); })) return {};
  int us;
  {
    std::lock_guard lock(mutex_);
    if (ordinal_ < 0) ordinal_ = next_ordinal++;
    us = delay_us(ordinal_, num_kernels_++);
  }
  auto kernel = [this, us, run = std::move(run)] {
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    begin_kernel();
    run();
  };
  return add(std::move(kernel), Kind::kernel);
}

void Stream::push_wait(Position other) {
  if (other.stream && other.stream != this) add([other] { other.wait(); }, Kind::wait);
}

void Stream::push_wait_begun(Position kernel) {
  if (kernel.stream && kernel.stream != this) add([kernel] { kernel.wait_begun(); }, Kind::wait);
}

Position Stream::push(std::function<void()> run) { return add(std::move(run), Kind::mark); }

Position Stream::push_beside(std::function<void()> run) {
  if (captures::keeps(this, [run](Stream* s) { s->push_beside(run); })) return {};
  return add(std::move(run), Kind::beside);
}

Position Stream::add(std::function<void()> run, Kind kind) {
  captures::refuse(this, "a command that a graph does not keep");
  last_submission = Clock::now().time_since_epoch().count();
  std::lock_guard lock(mutex_);
  submitted_++;
  if (!has_thread_) {  // torch makes 128 streams and uses few
    has_thread_ = true;
    number_ = next_number++;
    queue_ = queue_of(number_);
    std::thread([this] { work(); }).detach();
  }
  const bool is_queued = queue_ && kind != Kind::beside;
  tasks_.push_back({std::move(run), kind, host_moment(), is_queued});
  if (is_queued) {
    std::lock_guard queue_lock(queue_->mutex);
    queue_->commands.push_back({this, submitted_});
  }
  submitted_changed_.notify_one();
  return {this, submitted_};
}

Position Stream::end() {
  std::lock_guard lock(mutex_);
  return {this, submitted_};
}

bool Stream::may_go_on() {
  if (tasks_.empty()) return false;
  return delays().law != Law::on_demand || completed_ < demanded_ || is_quiet();
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (!may_go_on()) {
      if (tasks_.empty())
        submitted_changed_.wait(lock);
      else
        submitted_changed_.wait_for(lock, kQuiet);
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    const Position mine{this, completed_ + 1};
    lock.unlock();
    if (task.is_queued) queue_->await_turn(mine);
    // A kernel leaves its queue when it begins, a wait when it is over, and a mark is a part of
    // what is before it: [Note: the device's clock].
    const bool takes_turn = task.is_queued && task.kind != Kind::mark;
    begin_moment(takes_turn ? std::max(task.issued, queue_->left) : task.issued, moments_.last);
    task.run();
    task.run = nullptr;  // what it owns ends before it counts as done
    if (takes_turn) queue_->left = task.kind == Kind::wait ? moment() : moment_begun();
    lock.lock();
    completed_++;
    moments_.add(moment_begun(), moment());
    completed_changed_.notify_all();
    if (task.is_queued) queue_->leave();
  }
}

bool Position::is_reached() const {
  if (!stream) return true;
  std::lock_guard lock(stream->mutex_);
  return stream->completed_ >= count;
}

void Position::demand() const {
  std::lock_guard lock(stream->mutex_);
  stream->demanded_ = std::max(stream->demanded_, count);
  stream->submitted_changed_.notify_one();
}

void Position::wait() const {
  if (!stream) return;
  demand();
  std::unique_lock lock(stream->mutex_);
  stream->completed_changed_.wait(lock, [this] { return stream->completed_ >= count; });
  reach(stream->moments_.end_of(count));
}

void Position::wait_begun() const {
  demand();
  std::unique_lock lock(stream->mutex_);
  stream->completed_changed_.wait(lock, [this] { return stream->begun_ >= count; });
  reach(stream->moments_.begin_of(count));
}

void Stream::begin_kernel() {
  std::lock_guard lock(mutex_);
  begun_ = completed_ + 1;
  moments_.begun = moment();
  completed_changed_.notify_all();
}

void Stream::synchronize_all(int device) {
  std::vector<Position> ends;
  for (Stream* stream : streams_of(device)) ends.push_back(stream->end());
  for (const Position& end : ends) end.wait();
}

void Stream::count_anew() {
  for (Stream* stream : streams_of(-1)) {
    std::lock_guard lock(stream->mutex_);
    stream->num_kernels_ = 0;
    stream->ordinal_ = -1;
  }
  next_ordinal = 0;
}

void Stream::restart_clock() {
  for (Stream* stream : streams_of(-1)) {
    std::lock_guard lock(stream->mutex_);
    stream->moments_ = Moments(stream->completed_);
    if (stream->queue_) stream->queue_->left = 0;
  }
}

int current_device() { return current; }
void set_current_device(int device) { current = device; }

Stream* stream_of(void* handle) {
  if (handle == cudaStreamPerThread) end("the stream per thread is not emulated");
  if (handle && handle != cudaStreamLegacy) return static_cast<Stream*>(handle);
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  Stream*& stream = defaults[current];
  if (!stream) stream = new Stream(current, 0);
  return stream;
}

}  // namespace device
