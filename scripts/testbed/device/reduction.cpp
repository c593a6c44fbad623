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

template <typename Stored, typename Sum>
void multiply_as(void* values, size_t count, double factor) {
  auto stored = static_cast<Stored*>(values);
  for (size_t i = 0; i < count; i++) stored[i] = Sum(Sum(stored[i]) * Sum(factor));
}

template <typename Stored, typename Sum>
double number_as(const void* value) {
  return Sum(*static_cast<const Stored*>(value));
}

struct Type {
  size_t size;
  const char* name;
  void (*reduce)(void*, const void* const*, int, size_t, ncclRedOp_t);
  void (*multiply)(void*, size_t, double);
  double (*number)(const void*);
};

template <typename Stored, typename Sum>
Type type_as(const char* name) {
  return {sizeof(Stored), name, reduce_as<Stored, Sum>, multiply_as<Stored, Sum>,
          number_as<Stored, Sum>};
}

// Moved, not added up.
Type moved_only(const char* name) {
  return {1, name, [](auto...) { end("sums of 8-bit floating point are not emulated"); }, nullptr,
          nullptr};
}

Type type_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return type_as<int8_t, int8_t>("int8");
    case ncclUint8: return type_as<uint8_t, uint8_t>("uint8");
    case ncclInt32: return type_as<int32_t, int32_t>("int32");
    case ncclUint32: return type_as<uint32_t, uint32_t>("uint32");
    case ncclInt64: return type_as<int64_t, int64_t>("int64");
    case ncclUint64: return type_as<uint64_t, uint64_t>("uint64");
    case ncclFloat16: return type_as<_Float16, float>("float16");
    case ncclBfloat16: return type_as<Bf16, float>("bfloat16");
    case ncclFloat32: return type_as<float, float>("float32");
    case ncclFloat64: return type_as<double, double>("float64");
    case ncclFloat8e4m3: return moved_only("float8_e4m3");
    case ncclFloat8e5m2: return moved_only("float8_e5m2");
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

void multiply(void* values, size_t count, ncclDataType_t type, double factor) {
  type_of(type).multiply(values, count, factor);
}

double number_of(const void* value, ncclDataType_t type) { return type_of(type).number(value); }

}  // namespace device
