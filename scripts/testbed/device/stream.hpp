// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// A stream: a queue of tasks and the thread that runs them, one after the other. Events, waits of
// streams and waits of the host are all positions in such queues.
//
// CUDA C++ Programming Guide, "Streams": commands of one stream execute in order; commands of
// different streams may execute out of order with respect to one another, or concurrently.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "clock.hpp"

namespace device {

struct Queue;
struct Stream;

// Reached when the first `count` tasks of the stream are done; begun when the last of them has
// begun, where that is a kernel.
struct Position {
  Stream* stream = nullptr;
  int64_t count = 0;

  bool operator==(const Position& other) const {
    return stream == other.stream && count == other.count;
  }
  bool is_reached() const;
  void demand() const;
  void wait() const;  // under Law::on_demand this is what makes streams go on
  void wait_begun() const;
};

struct Stream {
  Stream(int device, int priority);

  const int device;
  const int priority;

  Position push_kernel(std::function<void()> run);  // put off as the law says
  Position push(std::function<void()> run);         // at once
  Position push_beside(std::function<void()> run);  // as no command of CUDA: in no hardware queue
  void push_wait(Position other);                   // what follows waits for `other`
  void push_wait_begun(Position kernel);            // what follows waits for the begin of `kernel`
  Position end();

  static void synchronize_all(int device = -1);
  static void count_anew();
  static void restart_clock();

 private:
  friend struct Position;
  enum class Kind { kernel, mark, wait, beside };
  struct Task {
    std::function<void()> run;
    Kind kind;
    double issued;  // by the host; see clock.hpp
    bool is_queued;
  };
  Position add(std::function<void()> run, Kind kind);
  void work();
  bool may_go_on();
  void begin_kernel();

  std::mutex mutex_;
  std::condition_variable submitted_changed_, completed_changed_;
  std::deque<Task> tasks_;
  Queue* queue_ = nullptr;  // of the hardware; null: one of its own
  int64_t submitted_ = 0, completed_ = 0, begun_ = 0;
  Moments moments_;
  int64_t demanded_ = 0;  // Law::on_demand: how many tasks someone waits for
  int64_t num_kernels_ = 0;
  int number_ = -1;   // among all streams, in the order of their first use
  int ordinal_ = -1;  // among the streams that got a kernel, in the order of their first
  bool has_thread_ = false;
};

// The stream that a handle of the API stands for: null is the current device's default stream.
Stream* stream_of(void* handle);
int current_device();  // of this thread
void set_current_device(int device);

}  // namespace device
