// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "reduction.hpp"

#include <cstdint>
#include <cstring>

#include "report.hpp"

namespace device {
namespace {

struct Bf16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bf16& operator=(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return *this;
  }
};

template <typename Stored, typename Sum>
void reduce_as(void* out, const void* const* sources, int num_sources, size_t count,
               ncclRedOp_t op) {
  for (size_t i = 0; i < count; i++) {
    Sum result = static_cast<const Stored*>(sources[0])[i];
    for (int source = 1; source < num_sources; source++) {
      Sum value = static_cast<const Stored*>(sources[source])[i];
      switch (op) {
        case ncclSum:
        case ncclAvg: result = result + value; break;
        case ncclProd: result = result * value; break;
        // A NaN stays one, wherever it comes from.
        case ncclMax: result = value > result || value != value ? value : result; break;
        case ncclMin: result = value < result || value != value ? value : result; break;
        default: end("reduction %d is not emulated", op);
      }
    }
    if (op == ncclAvg) result = result / Sum(num_sources);
    static_cast<Stored*>(out)[i] = result;
  }
}

struct Type {
  size_t size;
  const char* name;
  void (*reduce)(void*, const void* const*, int, size_t, ncclRedOp_t);
};

Type type_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return {1, "int8", reduce_as<int8_t, int8_t>};
    case ncclUint8: return {1, "uint8", reduce_as<uint8_t, uint8_t>};
    case ncclInt32: return {4, "int32", reduce_as<int32_t, int32_t>};
    case ncclUint32: return {4, "uint32", reduce_as<uint32_t, uint32_t>};
    case ncclInt64: return {8, "int64", reduce_as<int64_t, int64_t>};
    case ncclUint64: return {8, "uint64", reduce_as<uint64_t, uint64_t>};
    case ncclFloat16: return {2, "float16", reduce_as<_Float16, float>};
    case ncclBfloat16: return {2, "bfloat16", reduce_as<Bf16, float>};
    case ncclFloat32: return {4, "float32", reduce_as<float, float>};
    case ncclFloat64: return {8, "float64", reduce_as<double, double>};
    default: end("NCCL's type %d is not emulated", type);
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) { return type_of(type).size; }
const char* name_of(ncclDataType_t type) { return type_of(type).name; }

void reduce(void* out, const void* const* sources, int num_sources, size_t count,
            ncclDataType_t type, ncclRedOp_t op) {
  type_of(type).reduce(out, sources, num_sources, count, op);
}

}  // namespace device
