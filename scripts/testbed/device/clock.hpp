// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// The device's own clock: when each command would begin and end if kernels took the time that is
// stated for them.
//
// [Note: the device's clock] Nothing sleeps for it and no clock of the machine is read: a command's
// moments follow from those of what it waits for, so they are the same in every run. A command
// begins when the host has issued it, the one before it in its stream has ended and its hardware
// queue has let it go. A kernel leaves its queue when it begins, so kernels of one queue may
// overlap here, in the order of the host; a wait leaves when it is over, and holds up all behind
// it (Programming Guide, "Implicit Synchronization", CUDA_DEVICE_MAX_CONNECTIONS; Megatron runs
// with one queue so that a collective begins before the kernel that is to overlap with it). The
// record of an event is a part of what is before it and holds up nothing. Only kernels with a
// stated time, collectives and, over a link of stated speed, copies from and to the host take any;
// the host takes none, but goes on no earlier than what it has waited for.
#pragma once
#include <cstdint>
#include <vector>

namespace device {

bool is_time_stated();
void start_clock();  // from 0, when nothing runs

// ---- of the task that this thread of a stream runs

// It begins: not before `least`, nor before `last`, the end of the task before it.
void begin_moment(double least, double last);
double moment();        // seconds since the clock was started; grows while the task runs
double moment_begun();  // at which it began

// What follows on this thread, of a stream or of the host, comes no earlier.
void reach(double moment);

// Each does one thing at a time.
enum class Engine { computes, copies_in, copies_out };

// On a thread of a stream: a command that takes so many seconds of an engine of the device.
void occupy(int device, Engine engine, double seconds);

// Within a command that takes a stated time: what it does, since when.
void note_span(const char* what, double begin);

// Of the host: what it issues now is not before.
double host_moment();

// When the tasks of a stream began and ended; empty where no time is stated.
class Moments {
 public:
  explicit Moments(int64_t before = 0) : before_(before) {}
  void add(double begin, double end);
  double begin_of(int64_t count) const;  // of the task that is the `count`-th, or runs now
  double end_of(int64_t count) const;

  double last = 0;   // end of the last one
  double begun = 0;  // begin of the one that runs

 private:
  struct Span {
    double begin, end;
  };
  const Span* found(int64_t count) const;
  int64_t before_;  // tasks that were done before the clock was started
  std::vector<Span> spans_;
};

}  // namespace device
