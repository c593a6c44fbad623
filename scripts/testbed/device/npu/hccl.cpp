// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// HCCL's interface on the emulated device's collectives: kernels of a stream that meet in shared
// memory. Implemented anew for tests from the signatures; see acl.cpp.
#include <cuda_runtime_api.h>
#include "nccl_api.hpp"  // the emulated device's own interface; hidden in this library

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "report.hpp"

using Result = int;
namespace {

constexpr Result kSuccess = 0, kInternal = 4, kRemote = 21;

struct Type {
  ncclDataType_t type;
  size_t size;
  bool is_summed;  // what HCCL adds up on Atlas A2: no fp64, no unsigned
};

Type type_of(int type) {
  switch (type) {
    case 0: return {ncclInt8, 1, true};
    case 1: return {ncclUint8, 2, false};  // int16: HCCL adds it up, the emulated device does not
    case 2: return {ncclInt32, 4, true};
    case 3: return {ncclFloat16, 2, true};
    case 4: return {ncclFloat32, 4, true};
    case 5: return {ncclInt64, 8, true};
    case 6: return {ncclUint64, 8, false};
    case 7: return {ncclUint8, 1, false};
    case 8: return {ncclUint8, 2, false};
    case 9: return {ncclUint32, 4, false};
    case 10: return {ncclFloat64, 8, false};
    case 11: return {ncclBfloat16, 2, true};
    case 14:
    case 15:
    case 16:
    case 17: return {ncclUint8, 1, false};
    default: device::end("HCCL's type %d is not emulated", type);
  }
}

ncclDataType_t summed(int type) {
  const Type found = type_of(type);
  if (!found.is_summed) device::end("HCCL adds up no values of type %d on Atlas A2", type);
  return found.type;
}

ncclRedOp_t op_of(int op) {
  if (op < 0 || op > 3) device::end("HCCL's operation %d is not emulated", op);
  return ncclRedOp_t(op);  // sum, product, largest, smallest: the same numbers
}

Result of(ncclResult_t result) { return result == ncclSuccess ? kSuccess : kInternal; }
ncclComm_t C(void* comm) { return static_cast<ncclComm_t>(comm); }
cudaStream_t S(void* stream) { return static_cast<cudaStream_t>(stream); }

std::mutex mutex;
auto& names = *new std::unordered_map<void*, std::string>;

}  // namespace

// ---- communicators

struct RootInfo {
  char internal[4108];
};
EXPORT Result HcclGetRootInfo(RootInfo* info) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  *info = {};
  static_assert(sizeof id < sizeof *info);
  memcpy(info, &id, sizeof id);
  return kSuccess;
}
EXPORT Result HcclCommInitRootInfo(uint32_t num_ranks, const RootInfo* info, uint32_t rank,
                                   void** out) {
  ncclUniqueId id;
  memcpy(&id, info, sizeof id);
  ncclComm_t comm;
  if (auto error = ncclCommInitRank(&comm, num_ranks, id, rank)) return of(error);
  *out = comm;
  std::lock_guard lock(mutex);
  names[*out] = std::string(id.internal);
  return kSuccess;
}
EXPORT Result HcclCommInitRootInfoConfig(uint32_t num_ranks, const RootInfo* info, uint32_t rank,
                                         void*, void** out) {
  return HcclCommInitRootInfo(num_ranks, info, rank, out);
}
// Buffer, deterministic, name, expansion.
EXPORT uint32_t HcclGetCommConfigCapability() { return 4; }
EXPORT Result HcclSetConfig(int, int) { return kSuccess; }
EXPORT Result HcclGetCommName(void* comm, char* name) {
  std::lock_guard lock(mutex);
  snprintf(name, 128, "%s", names[comm].c_str());
  return kSuccess;
}
EXPORT Result HcclGetCommAsyncError(void* comm, int* error) {
  ncclResult_t found;
  ncclCommGetAsyncError(C(comm), &found);
  *error = found == ncclSuccess ? kSuccess : kRemote;
  return kSuccess;
}
EXPORT Result HcclCommDestroy(void* comm) {
  {
    std::lock_guard lock(mutex);
    names.erase(comm);
  }
  return of(ncclCommDestroy(C(comm)));
}

// ---- collectives

EXPORT Result HcclAllReduce(void* in, void* out, uint64_t count, int type, int op, void* comm,
                            void* stream) {
  return of(ncclAllReduce(in, out, count, summed(type), op_of(op), C(comm), S(stream)));
}
EXPORT Result HcclReduceScatter(void* in, void* out, uint64_t count, int type, int op, void* comm,
                                void* stream) {
  return of(ncclReduceScatter(in, out, count, summed(type), op_of(op), C(comm), S(stream)));
}
EXPORT Result HcclReduce(void* in, void* out, uint64_t count, int type, int op, uint32_t root,
                         void* comm, void* stream) {
  return of(ncclReduce(in, out, count, summed(type), op_of(op), root, C(comm), S(stream)));
}
EXPORT Result HcclAllGather(void* in, void* out, uint64_t count, int type, void* comm,
                            void* stream) {
  const size_t nbytes = count * type_of(type).size;
  return of(ncclAllGather(in, out, nbytes, ncclUint8, C(comm), S(stream)));
}
EXPORT Result HcclBroadcast(void* data, uint64_t count, int type, uint32_t root, void* comm,
                            void* stream) {
  const size_t nbytes = count * type_of(type).size;
  return of(ncclBroadcast(data, data, nbytes, ncclUint8, root, C(comm), S(stream)));
}
EXPORT Result HcclScatter(void* in, void* out, uint64_t count, int type, uint32_t root, void* comm,
                          void* stream) {
  int num_ranks, rank;
  ncclCommCount(C(comm), &num_ranks);
  ncclCommUserRank(C(comm), &rank);
  const size_t nbytes = count * type_of(type).size;
  ncclGroupStart();
  if (rank == int(root))
    for (int other = 0; other < num_ranks; other++)
      ncclSend(static_cast<char*>(in) + other * nbytes, nbytes, ncclUint8, other, C(comm),
               S(stream));
  ncclRecv(out, nbytes, ncclUint8, root, C(comm), S(stream));
  return of(ncclGroupEnd());
}
EXPORT Result HcclAlltoAll(const void* in, uint64_t count, int type, const void* out, uint64_t, int,
                           void* comm, void* stream) {
  const size_t nbytes = count * type_of(type).size;
  return of(ncclAlltoAll(in, const_cast<void*>(out), nbytes, ncclUint8, C(comm), S(stream)));
}
EXPORT Result HcclAlltoAllV(const void* in, const void* sent, const void* sent_at, int type,
                            const void* out, const void* received, const void* received_at, int,
                            void* comm, void* stream) {
  int num_ranks;
  ncclCommCount(C(comm), &num_ranks);
  const size_t size = type_of(type).size;
  auto at = [&](const void* list, int i) { return static_cast<const uint64_t*>(list)[i] * size; };
  ncclGroupStart();
  for (int other = 0; other < num_ranks; other++) {
    if (at(sent, other))
      ncclSend(static_cast<const char*>(in) + at(sent_at, other), at(sent, other), ncclUint8, other,
               C(comm), S(stream));
    if (at(received, other))
      ncclRecv(static_cast<char*>(const_cast<void*>(out)) + at(received_at, other),
               at(received, other), ncclUint8, other, C(comm), S(stream));
  }
  return of(ncclGroupEnd());
}

// ---- messages

EXPORT Result HcclSend(void* data, uint64_t count, int type, uint32_t peer, void* comm,
                       void* stream) {
  return of(ncclSend(data, count * type_of(type).size, ncclUint8, peer, C(comm), S(stream)));
}
EXPORT Result HcclRecv(void* data, uint64_t count, int type, uint32_t peer, void* comm,
                       void* stream) {
  return of(ncclRecv(data, count * type_of(type).size, ncclUint8, peer, C(comm), S(stream)));
}
struct SendRecvItem {
  int is_receive;
  void* data;
  uint64_t count;
  int type;
  uint32_t peer;
};
EXPORT Result HcclBatchSendRecv(SendRecvItem* items, uint32_t count, void* comm, void* stream) {
  ncclGroupStart();
  for (uint32_t i = 0; i < count; i++) {
    auto& item = items[i];
    (item.is_receive ? HcclRecv : HcclSend)(item.data, item.count, item.type, item.peer, comm,
                                            stream);
  }
  return of(ncclGroupEnd());
}
EXPORT Result HcclGroupStart() { return of(ncclGroupStart()); }
EXPORT Result HcclGroupEnd() { return of(ncclGroupEnd()); }
