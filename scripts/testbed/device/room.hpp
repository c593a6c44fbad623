// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a communicator meet: a file of shared memory with a barrier, a place for the
// data of each rank, and a mailbox from each rank to each other.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace device {

constexpr int kMostRanks = 16;
constexpr size_t kPlace = 1 << 20;  // of a rank; longer data goes through in rounds
constexpr size_t kLetter = 1 << 16;

// What a rank is about to do; the ranks of a collective must agree.
struct Call {
  int kind, type, op, root;
  int64_t count;
  bool operator==(const Call& other) const {
    return kind == other.kind && type == other.type && op == other.op && root == other.root &&
           count == other.count;
  }
};

// Where a buffer of a collective lies. window: its number in the communicator, -1 without one.
struct Registered {
  int64_t window = -1, offset = 0;
  bool operator==(const Registered& other) const {
    return window == other.window && offset == other.offset;
  }
};

// What a rank registers. number: of the registrations with the communicator, this one included.
struct Registration {
  int64_t number, size;
  int flags;
};

struct Mailbox {
  std::atomic<uint32_t> is_full;
  uint32_t size;
  double sent;    // when, by the device's clock
  int64_t whole;  // bytes of the message that this is part of
  char bytes[kLetter];
};

// Three barriers: threads of the host must not meet kernels, nor registrations other calls.
struct Barrier {
  std::atomic<uint32_t> arrived, generation;
};

class Room {
 public:
  Room(const std::string& name, int rank, int num_ranks, int global_rank);
  ~Room();

  // False where this rank has aborted. late: called after `limit_s` seconds in vain.
  bool meet(Barrier& barrier, double limit_s = 0, const std::function<void()>& late = {});
  // Whether `other` is lost to what waits for it here; to be called while that waits.
  template <typename Waits>
  void look_for_lost(int other, Waits waits) {
    if (lost < 0 && is_gone(other) && waits()) lost = other;  // it may go when it has done its part
  }
  Barrier& of_kernels() { return shared_->of_kernels; }
  Barrier& of_hosts() { return shared_->of_hosts; }
  Barrier& of_registrations() { return shared_->of_registrations; }
  Call& call(int rank) { return shared_->calls[rank]; }
  Registered* registered(int rank) { return shared_->registered[rank]; }  // input, output
  Registration& registration(int rank) { return shared_->registrations[rank]; }
  double& moment(int rank) { return shared_->members[rank].moment; }
  int global_rank(int rank) const { return shared_->members[rank].global_rank; }
  int32_t* split(int rank) { return shared_->splits[rank]; }
  char* place(int rank) { return places_ + kPlace * rank; }
  Mailbox& mailbox(int from, int to) { return mailboxes_[from * num_ranks + to]; }

  // This rank leaves the communicator.
  void abort();
  void leave() { shared_->members[rank].state = left; }

  const std::string name;
  const int rank, num_ranks;
  std::atomic<bool> is_aborted{false};
  std::atomic<int> lost{-1};  // a rank that something has waited for in vain

 private:
  // It has aborted, or it came and its process has ended without leaving.
  bool is_gone(int other) const;

  enum State { here, left, aborted };
  struct Member {
    std::atomic<int32_t> state;
    int32_t process, global_rank;
    double moment;  // when its kernel has begun, by the device's clock
  };
  struct Shared {
    Barrier of_kernels, of_hosts, of_registrations;
    Member members[kMostRanks];
    Call calls[kMostRanks];
    Registered registered[kMostRanks][2];
    Registration registrations[kMostRanks];
    int32_t splits[kMostRanks][2];  // color and key
  };
  Shared* shared_;
  char* places_;
  Mailbox* mailboxes_;
  size_t size_;
};

}  // namespace device
