// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "room.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "report.hpp"

namespace device {
namespace {

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  timespec most = {0, 50'000'000};  // to see that this rank has aborted, or another one is gone
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

bool is_running(int process) {
  char path[64], state = 'Z';  // a zombie has ended, too
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  if (FILE* file = fopen(path, "r")) {
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'Z';
    fclose(file);
  }
  return state != 'Z' && state != 'X';
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

// New shared memory is zero, so whoever comes first need prepare nothing.
Room::Room(const std::string& name, int rank, int num_ranks, int global_rank)
    : name(name), rank(rank), num_ranks(num_ranks) {
  if (num_ranks > kMostRanks) end("a communicator of %d ranks: %d at most", num_ranks, kMostRanks);
  size_ = sizeof(Shared) + kPlace * num_ranks + sizeof(Mailbox) * num_ranks * num_ranks;
  int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, size_)) end("shared memory: %s", strerror(errno));
  void* start = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (start == MAP_FAILED) end("shared memory: %s", strerror(errno));
  close(file);
  shared_ = static_cast<Shared*>(start);
  mailboxes_ = reinterpret_cast<Mailbox*>(shared_ + 1);
  places_ = reinterpret_cast<char*>(mailboxes_ + num_ranks * num_ranks);
  shared_->members[rank].process = getpid();
  shared_->members[rank].global_rank = global_rank;
  meet(of_hosts());
  if (rank == 0) shm_unlink(name.c_str());  // all have it: nothing is left behind
}

Room::~Room() { munmap(shared_, size_); }

void Room::abort() {
  shared_->members[rank].state = aborted;
  is_aborted = true;
}

bool Room::is_gone(int other) const {
  const Member& member = shared_->members[other];
  const bool has_ended = member.process && !is_running(member.process);
  return member.state == aborted || (member.state == here && has_ended);
}

bool Room::meet(Barrier& barrier, double limit_s, const std::function<void()>& late) {
  const auto start = std::chrono::steady_clock::now();
  uint32_t generation = barrier.generation;
  if (barrier.arrived.fetch_add(1) + 1 == uint32_t(num_ranks)) {
    barrier.arrived = 0;
    barrier.generation++;
    wake_all(barrier.generation);
    return !is_aborted;
  }
  auto waits = [&] { return barrier.generation == generation; };
  while (waits()) {
    if (is_aborted) return false;
    sleep_while(barrier.generation, generation);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (late && waits() && waited.count() > limit_s) late();
    for (int other = 0; other < num_ranks && waits(); other++) look_for_lost(other, waits);
  }
  return !is_aborted;
}

}  // namespace device
