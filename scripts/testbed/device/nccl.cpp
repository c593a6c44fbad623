// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// NCCL's API: communicators, and collectives that are kernels of the stream they were launched on.
// They wait inside the kernel for their peers, as NCCL's do: what is behind them on the stream
// waits too.
#include <cuda_runtime_api.h>
#include "nccl_api.hpp"
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "captures.hpp"
#include "clock.hpp"
#include "delays.hpp"
#include "links.hpp"
#include "reduction.hpp"
#include "report.hpp"
#include "room.hpp"
#include "stream.hpp"
#include "watch.hpp"
#include "windows.hpp"

using namespace device;

// A sum in which each rank's data is multiplied by its own factor first.
struct Factor {
  double value = 1;
  const void* on_device = nullptr;  // read when the kernel runs
  ncclDataType_t type = ncclFloat64;
};

// Handles of NCCL's API.
struct ncclComm {
  std::shared_ptr<Room> room;  // kernels share it: they may outlive the handle
  int device;
  int num_splits = 0;
  std::mutex mutex;
  Position last;  // the kernel launched last
  std::map<int, Factor> factors;
  Windows windows;
};

namespace {

enum Kind { all_gather, reduce_scatter, all_reduce, broadcast, reduce_to, all_to_all, messages };
const char* const kKinds[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast",
                              "reduce",     "all-to-all",     "send/recv"};

struct Message {
  bool is_send;
  int peer;
  char* data;
  size_t size, done = 0;
};

// What was called between ncclGroupStart and ncclGroupEnd of this thread.
struct Pending {
  ncclComm_t comm;
  cudaStream_t stream;
  Call call;
  const void* in = nullptr;
  void* out = nullptr;
  Factor factor = {};
  std::vector<Message> messages = {};
  Registered registered[2] = {};  // input, output
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> group;
thread_local std::string last_error;

// ---- kernels: they run on the thread of a stream

// By the device's clock: from the begin of the last rank's kernel on, over rings.
double seconds_of(const Room& room, const Call& call) {
  std::vector<int> ranks;
  for (int rank = 0; rank < room.num_ranks; rank++) ranks.push_back(room.global_rank(rank));
  const int n = room.num_ranks;
  const double nbytes = double(call.count) * size_of(ncclDataType_t(call.type));
  if (n == 1 || !nbytes) return 0;
  switch (call.kind) {
    case all_gather:
    case reduce_scatter: return ring_s(ranks, n - 1, nbytes);
    case all_to_all: return pairs_s(ranks, nbytes);
    case all_reduce: return ring_s(ranks, 2 * (n - 1), nbytes / n);
    default: return ring_s(ranks, 1, nbytes);  // a chain, in small parts
  }
}

// "Register buffer into NCCL window, and users need to guarantee the offset to the buffer head
// address from all ranks must be equal when calling NCCL collective operations" (NCCL, "Window
// Registration Flags"). In place a rank's own part lies at another offset than its peers'
// (colls.rst, "In-place operations").
void compare_registered(Room& room, const Call& call) {
  static const char* const names[] = {"input", "output"};
  const int64_t nbytes = call.count * size_of(ncclDataType_t(call.type));
  auto from_whole = [&](int rank, int side) {
    Registered at = room.registered(rank)[side];
    const Registered& whole = room.registered(rank)[!side];
    const bool may_be_part = call.kind == (side == 0 ? all_gather : reduce_scatter);
    if (may_be_part && at.window >= 0 && at.window == whole.window &&
        at.offset == whole.offset + rank * nbytes)
      at.offset = whole.offset;
    return at;
  };
  for (int side = 0; side < 2; side++)
    for (int other = 0; other < room.num_ranks; other++) {
      const Registered mine = from_whole(room.rank, side), theirs = from_whole(other, side);
      if (mine == theirs) continue;
      end("ranks differ in registered memory: the %s of the %s of %ld %s is at byte %ld of window "
          "%ld on rank %d of the communicator, at byte %ld of window %ld on rank %d (-1: none)",
          names[side], kKinds[call.kind], long(call.count), name_of(ncclDataType_t(call.type)),
          long(mine.offset), long(mine.window), room.rank, long(theirs.offset), long(theirs.window),
          other);
    }
}

// Whether all ranks have come, with the same call; false after an abort.
bool agree(Room& room, const Call& call, const Registered* mine) {
  room.call(room.rank) = call;
  std::copy(mine, mine + 2, room.registered(room.rank));
  room.moment(room.rank) = moment();
  if (!room.meet(room.of_kernels())) return false;
  for (int other = 0; other < room.num_ranks; other++) reach(room.moment(other));
  if (is_time_stated()) {
    const double begin = moment();
    reach(begin + seconds_of(room, call));
    note_span(kKinds[call.kind], begin);
  }
  for (int other = 0; other < room.num_ranks; other++) {
    const Call& theirs = room.call(other);
    if (theirs == call) continue;
    end("ranks differ in a collective: rank %d of the communicator has %s of %ld %s, rank %d has "
        "%s of %ld %s",
        room.rank, kKinds[call.kind], long(call.count), name_of(ncclDataType_t(call.type)), other,
        kKinds[theirs.kind], long(theirs.count), name_of(ncclDataType_t(theirs.type)));
  }
  compare_registered(room, call);
  return true;
}

// Segments of `in` and `out`: one a rank, or the whole once.
void run_collective(Room& room, const Call& call, const void* in_start, void* out_start,
                    const Factor& factor, const Registered* registered) {
  if (!agree(room, call, registered)) return;
  if (!call.count) {
    room.meet(room.of_kernels());  // nobody announces the next call while another reads this one
    return;
  }
  auto in = static_cast<const char*>(in_start);
  auto out = static_cast<char*>(out_start);
  const auto type = ncclDataType_t(call.type);
  const bool is_scaled = call.op >= ncclNumOps;
  const auto op = is_scaled ? ncclSum : ncclRedOp_t(call.op);
  const double scale = factor.on_device ? number_of(factor.on_device, factor.type) : factor.value;
  const size_t item = size_of(type), whole = call.count * item;
  const int n = room.num_ranks, me = room.rank;
  const bool sends_segments = call.kind == reduce_scatter || call.kind == all_to_all;
  const bool has_input = call.kind != broadcast || me == call.root;
  const int sent = sends_segments ? n : 1;
  const size_t most = kPlace / sent / item * item;
  for (size_t first = 0; first < whole; first += most) {
    const size_t size = std::min(most, whole - first);
    if (has_input)
      for (int part = 0; part < sent; part++)
        memcpy(room.place(me) + part * size, in + part * whole + first, size);
    if (is_scaled) multiply(room.place(me), sent * size / item, type, scale);
    if (!room.meet(room.of_kernels())) return;
    const void* sources[kMostRanks];
    for (int rank = 0; rank < n; rank++)
      sources[rank] = room.place(rank) + (sends_segments ? me * size : 0);
    switch (call.kind) {
      case all_gather:
      case all_to_all:
        for (int rank = 0; rank < n; rank++)
          memcpy(out + rank * whole + first, sources[rank], size);
        break;
      case broadcast: memcpy(out + first, sources[call.root], size); break;
      case reduce_to:
        if (me != call.root) break;
        [[fallthrough]];
      default: reduce(out + first, sources, n, size / item, type, op);
    }
    if (!room.meet(room.of_kernels())) return;
  }
}

Mailbox& mailbox_of(Room& room, const Message& message) {
  return message.is_send ? room.mailbox(room.rank, message.peer)
                         : room.mailbox(message.peer, room.rank);
}

bool can_move(Room& room, const Message& message) {
  return mailbox_of(room, message).is_full.load(std::memory_order_acquire) != message.is_send;
}

// Moves what fits; a message goes through its mailbox letter by letter.
void move(Room& room, Message& message) {
  Mailbox& box = mailbox_of(room, message);
  if (message.is_send) {
    box.whole = message.size;
    box.sent = moment();
    box.size = std::min(kLetter, message.size - message.done);
    memcpy(box.bytes, message.data + message.done, box.size);
  } else {
    if (box.whole != int64_t(message.size))
      end("rank %d of the communicator receives %zu bytes, rank %d sends %ld", room.rank,
          message.size, message.peer, long(box.whole));
    memcpy(message.data + message.done, box.bytes, box.size);
    if (is_time_stated() && message.done + box.size == message.size) {
      const int from = room.global_rank(message.peer), to = room.global_rank(room.rank);
      reach(std::max(moment(), box.sent) + between_s(from, to, message.size));
    }
  }
  message.done += box.size;
  box.is_full.store(message.is_send, std::memory_order_release);
}

// All messages of a group go on together (NCCL, "Point-to-point communication"); those from one
// rank to another in the order of the calls.
void run_messages(Room& room, std::vector<Message> messages) {
  const double begin = moment();
  constexpr int kMostIdle_us = 1000;
  int idle_us = 10;
  while (!messages.empty() && !room.is_aborted) {
    bool has_moved = false;
    std::map<std::pair<bool, int>, Message*> waiting;  // the first of each way
    for (auto message = messages.begin(); message != messages.end();) {
      const std::pair<bool, int> way{message->is_send, message->peer};
      const bool moves = !waiting.count(way) && can_move(room, *message);
      has_moved |= moves;
      if (moves) move(room, *message);
      if (moves && message->done == message->size) {
        message = messages.erase(message);
      } else {
        waiting.insert({way, &*message});
        ++message;
      }
    }
    idle_us = has_moved ? 10 : std::min(kMostIdle_us, idle_us * 2);
    if (has_moved) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(idle_us));
    if (idle_us < kMostIdle_us) continue;
    for (auto& [way, message] : waiting)
      room.look_for_lost(message->peer, [&] { return !can_move(room, *message); });
  }
  if (is_time_stated()) note_span(kKinds[Kind::messages], begin);
}

// ---- launches: on threads of the host

// [Note: launch order] With NCCL_LAUNCH_ORDER_IMPLICIT a launch waits, on the device, for the begin
// of the one before it, of whatever communicator, stream and thread: NCCL 2.29 launches with
// CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT, "triggered once all blocks of the kernel have begun
// execution" (driver_types.h), and its next launch on that device waits for this event (enqueue.cc,
// ncclLaunchPrepare and ncclLaunchFinish). It takes the order from the host: two threads that
// launch at the same time are an error (NCCL_LAUNCH_RACE_FATAL; strongstream.cc).
struct LaunchOrder {
  std::atomic<std::thread::id> launches;
  std::mutex mutex;
  Position last;
};

bool is_set(const char* name, bool otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

LaunchOrder* launch_order_of(int device) {
  if (!is_set("NCCL_LAUNCH_ORDER_IMPLICIT", false)) return nullptr;
  static std::mutex mutex;
  static auto& orders = *new std::map<int, LaunchOrder>;
  std::lock_guard lock(mutex);
  return &orders[device];
}

ncclResult_t failed(ncclResult_t result, const char* text) {
  last_error = text;
  return result;
}

// Bytes of the input and of the output of a collective.
struct Sizes {
  size_t in, out;
};

Sizes sizes_of(const Call& call, int num_ranks) {
  const size_t once = call.count * size_of(ncclDataType_t(call.type)), all = once * num_ranks;
  const bool sends_all = call.kind == reduce_scatter || call.kind == all_to_all;
  const bool gets_all = call.kind == all_gather || call.kind == all_to_all;
  return {sends_all ? all : once, gets_all ? all : once};
}

// A captured collective knows its windows from the capture: a replay can have no others.
void find_registered(Pending& pending, bool is_replay) {
  const Call& call = pending.call;
  if (call.kind == messages) return;
  std::lock_guard lock(pending.comm->mutex);
  const Sizes sizes = sizes_of(call, pending.comm->room->num_ranks);
  const Registered now[] = {pending.comm->windows.at(pending.in, sizes.in),
                            pending.comm->windows.at(pending.out, sizes.out)};
  std::string name = std::string(kKinds[call.kind]) + " " + name_of(ncclDataType_t(call.type));
  for (int side = 0; side < 2; side++) {
    if (is_replay && !(now[side] == pending.registered[side]))
      end("a graph launches a collective whose window %ld is not registered any more",
          long(pending.registered[side].window));
    pending.registered[side] = now[side];
    name += now[side].window < 0 ? " plain" : " window";
  }
  if (pending.comm->windows.has_windows()) count_collective(name);
}

// What a collective or messages do to the buffers of this rank, for the watch. The order that NCCL
// keeps within a communicator is its own: it orders no memory of the caller.
void watch_call(const Pending& pending, Stream* stream, int num_ranks, int rank) {
  const Call& call = pending.call;
  const auto type = ncclDataType_t(call.type);
  std::string name = kKinds[call.kind];
  std::vector<Access> accesses;
  for (const Message& one : pending.messages)
    accesses.push_back({one.data, one.size, !one.is_send});
  if (call.kind != messages) {
    const Sizes sizes = sizes_of(call, num_ranks);
    name += " of " + std::to_string(call.count) + " " + name_of(type);
    if (call.kind != broadcast || rank == call.root)
      accesses.push_back({pending.in, sizes.in, false});
    if (call.kind != reduce_to || rank == call.root)
      accesses.push_back({pending.out, sizes.out, true});
  }
  watch::submit(stream, watch::Kind::kernel, name, accesses.data(), accesses.size());
}

void run(Room& room, const std::vector<Pending>& calls) {
  for (const Pending& pending : calls)
    if (pending.call.kind == messages)
      run_messages(room, pending.messages);
    else
      run_collective(room, pending.call, pending.in, pending.out, pending.factor,
                     pending.registered);
}

// One kernel for the calls of one communicator, on the first one's stream; the other streams wait
// for it, and it for them (enqueue.cc, "userStream[0] waits on each userStream[i]"). Kernels of one
// communicator run in the order of their launches, whatever their streams (NCCL, "Using multiple
// CUDA streams": NCCL enforces a stream dependency).
ncclResult_t launch(std::vector<Pending> calls, bool is_replay = false) {
  for (Pending& pending : calls) find_registered(pending, is_replay);
  const auto again = [calls](Stream* stream) mutable {
    for (Pending& pending : calls) pending.stream = reinterpret_cast<cudaStream_t>(stream);
    launch(calls, true);
  };
  for (const Pending& pending : calls)
    if (captures::of(stream_of(pending.stream)) != captures::of(stream_of(calls[0].stream)))
      end("a group of NCCL of which a part is captured is not emulated");
  if (captures::keeps(stream_of(calls[0].stream), again)) return ncclSuccess;
  ncclComm_t comm = calls[0].comm;
  auto room = comm->room;
  auto stream = stream_of(calls[0].stream);
  std::vector<Stream*> others;
  for (const Pending& pending : calls)
    if (auto other = stream_of(pending.stream); other != stream) others.push_back(other);
  for (Stream* other : others) watch::order_stream(stream, watch::end_of(other));
  for (const Pending& pending : calls) watch_call(pending, stream, room->num_ranks, room->rank);
  for (Stream* other : others) watch::order_stream(other, watch::end_of(stream));
  std::lock_guard lock(comm->mutex);
  LaunchOrder* order = launch_order_of(comm->device);
  if (order) order->launches = std::this_thread::get_id();
  for (Stream* other : others) stream->push_wait(other->end());
  stream->push_wait(comm->last);
  if (order) {
    // A launch of NCCL takes some microseconds of its thread.
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    std::lock_guard order_lock(order->mutex);
    stream->push_wait_begun(order->last);
  }
  comm->last = stream->push_kernel([room, calls] { run(*room, calls); });
  for (const Pending& pending : calls)
    for (const void* buffer : {pending.in, static_cast<const void*>(pending.out)})
      comm->windows.note_use(buffer, comm->last);
  for (Stream* other : others) other->push_wait(comm->last);
  if (order) {
    std::lock_guard order_lock(order->mutex);
    order->last = comm->last;
    if (order->launches != std::this_thread::get_id() && is_set("NCCL_LAUNCH_RACE_FATAL", true))
      return failed(ncclInvalidUsage, "host threads racing to launch NCCL on same device");
  }
  return ncclSuccess;
}

ncclResult_t add(Pending pending) {
  if (!group_depth) return launch({std::move(pending)});
  if (pending.call.kind == messages) {
    for (Pending& other : group)
      if (other.call.kind == messages && other.comm == pending.comm) {
        other.messages.push_back(pending.messages[0]);
        if (other.stream != pending.stream) {  // for the order of streams alone
          pending.messages.clear();
          break;
        }
        return ncclSuccess;
      }
  }
  group.push_back(std::move(pending));
  return ncclSuccess;
}

ncclResult_t collective(Kind kind, const void* in, void* out, size_t count, ncclDataType_t type,
                        int op, int root, ncclComm_t comm, cudaStream_t stream) {
  Pending pending{comm, stream, Call{kind, type, op, root, int64_t(count)}, in, out};
  if (op >= ncclNumOps) pending.factor = comm->factors.at(op);
  return add(std::move(pending));
}

ncclResult_t message(bool is_send, const void* data, size_t count, ncclDataType_t type, int peer,
                     ncclComm_t comm, cudaStream_t stream) {
  auto bytes = static_cast<char*>(const_cast<void*>(data));
  Message one{is_send, peer, bytes, count * size_of(type)};
  Pending pending{comm, stream, Call{messages, type, 0, 0, 0}};
  pending.messages = {one};
  return add(std::move(pending));
}

ncclComm_t new_comm(const std::string& name, int rank, int num_ranks) {
  auto comm = new ncclComm;
  comm->room = std::make_shared<Room>(name, rank, num_ranks, delays().rank);
  comm->device = current_device();
  return comm;
}

}  // namespace

// ---- communicators

EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "an error of the emulated NCCL";
  }
}
EXPORT const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  snprintf(id->internal, sizeof id->internal, "/asynchzp-%d-%lld", getpid(), (long long)now);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank) {
  *out = new_comm(id.internal, rank, num_ranks);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int num_ranks, ncclUniqueId id,
                                           int rank, ncclConfig_t*) {
  return ncclCommInitRank(out, num_ranks, id, rank);
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int num_ranks, int rank, int,
                                             ncclUniqueId* ids, ncclConfig_t*) {
  return ncclCommInitRank(out, num_ranks, ids[0], rank);
}

// Ranks of one color form a communicator, in the order of their keys.
EXPORT ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out,
                                  ncclConfig_t*) {
  Room& room = *parent->room;
  const std::string name =
      room.name + "." + std::to_string(parent->num_splits++) + "." + std::to_string(color);
  room.split(room.rank)[0] = color;
  room.split(room.rank)[1] = key;
  room.meet(room.of_hosts());
  std::vector<std::pair<int, int>> members;  // key and rank
  for (int rank = 0; rank < room.num_ranks; rank++)
    if (room.split(rank)[0] == color) members.push_back({room.split(rank)[1], rank});
  room.meet(room.of_hosts());
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  auto mine = std::find(members.begin(), members.end(), std::pair{key, room.rank});
  *out = new_comm(name, mine - members.begin(), members.size());
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->room->num_ranks;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->room->rank;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* index) {
  *index = comm->device;
  return ncclSuccess;
}

// ncclRemoteError: "possibly due to a network error or a remote process exiting prematurely" (NCCL,
// "Types"). Only where a kernel waits for that rank: one that has done its part of all may go. The
// kernel goes on waiting until the communicator is aborted.
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const int lost = comm->room->lost;
  *error = lost < 0 ? ncclSuccess : ncclRemoteError;
  if (lost >= 0) last_error = "rank " + std::to_string(lost) + " of the communicator is gone";
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  comm->last.wait();
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  comm->last.wait();
  comm->room->leave();
  comm->windows.drop_all();
  delete comm;
  return ncclSuccess;
}

// Kernels under way end without their result (NCCL, ncclCommAbort). Peers may still read a window:
// a communicator is to be aborted without (NCCL, "Window Registration").
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->windows.has_windows()) end("a communicator is aborted that has windows");
  comm->room->abort();
  comm->windows.drop_all();
  delete comm;
  return ncclSuccess;
}

// torch from 2.15 on registers every segment of its allocator with every communicator. It makes a
// collective faster and changes nothing else (NCCL, "User Buffer Registration").
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t size, void** out) {
  std::lock_guard lock(comm->mutex);
  *out = comm->windows.add(*comm->room, static_cast<const char*>(buffer), size, kPlain);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  std::lock_guard lock(comm->mutex);
  if (!comm->windows.remove(static_cast<ncclWindow_t>(handle), true))
    end("ncclCommDeregister of what ncclCommRegister did not return, or twice");
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t size,
                                           ncclWindow_t* out, int flags) {
  *out = comm->windows.add(*comm->room, static_cast<const char*>(buffer), size, flags);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  std::lock_guard lock(comm->mutex);
  if (window && !comm->windows.remove(window, false))
    end("ncclCommWindowDeregister of what is no window of the communicator, or twice");
  return ncclSuccess;
}

// Asked for a count of bytes by torch's memory report.
EXPORT ncclResult_t ncclCommMemStats(ncclComm_t, ncclCommMemStat_t, uint64_t* value) {
  *value = 0;
  return ncclSuccess;
}

// ---- groups

EXPORT ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}

// "The NCCL operation will only be started as a whole during the last call to ncclGroupEnd" (NCCL,
// "Group Calls").
EXPORT ncclResult_t ncclGroupEnd() {
  if (--group_depth) return ncclSuccess;
  std::vector<std::vector<Pending>> launches;  // by communicator, in the order of the calls
  for (Pending& pending : group) {
    auto same = std::find_if(launches.begin(), launches.end(),
                             [&](auto& calls) { return calls[0].comm == pending.comm; });
    if (same == launches.end()) same = launches.insert(same, std::vector<Pending>());
    same->push_back(std::move(pending));
  }
  group.clear();
  ncclResult_t result = ncclSuccess;
  for (auto& calls : launches)
    if (auto error = launch(std::move(calls))) result = error;
  return result;
}

// ---- reductions

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                             ncclScalarResidence_t residence, ncclComm_t comm) {
  std::lock_guard lock(comm->mutex);
  int free = ncclNumOps;
  while (comm->factors.count(free)) free++;
  const bool is_here = residence == ncclScalarHostImmediate;
  comm->factors[free] = {is_here ? number_of(scalar, type) : 1, is_here ? nullptr : scalar, type};
  *op = ncclRedOp_t(free);
  return ncclSuccess;
}

// What was called with it keeps its factor.
EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  std::lock_guard lock(comm->mutex);
  return comm->factors.erase(op) ? ncclSuccess : ncclInvalidArgument;
}

// ---- collectives

EXPORT ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
  return collective(all_gather, in, out, count, type, 0, 0, comm, stream);
}

EXPORT ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(reduce_scatter, in, out, count, type, op, 0, comm, stream);
}

EXPORT ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(all_reduce, in, out, count, type, op, 0, comm, stream);
}

EXPORT ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(reduce_to, in, out, count, type, op, root, comm, stream);
}

EXPORT ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type,
                                  int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(broadcast, in, out, count, type, 0, root, comm, stream);
}

EXPORT ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root,
                              ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream) {
  return collective(all_to_all, in, out, count, type, 0, 0, comm, stream);
}

EXPORT ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  return message(true, data, count, type, peer, comm, stream);
}

EXPORT ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  return message(false, data, count, type, peer, comm, stream);
}
