// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Sums, products and extremes of NCCL's types.
#pragma once
#include "nccl_api.hpp"

#include <cstddef>

namespace device {

size_t size_of(ncclDataType_t type);
const char* name_of(ncclDataType_t type);

// out[i] = the operation over sources[0][i] to sources[num_sources - 1][i], in that order; a sum of
// bf16 or fp16 is rounded once. NCCL states neither its order nor where it rounds.
void reduce(void* out, const void* const* sources, int num_sources, size_t count,
            ncclDataType_t type, ncclRedOp_t op);

// values[i] *= factor, rounded to the type.
void multiply(void* values, size_t count, ncclDataType_t type, double factor);
double number_of(const void* value, ncclDataType_t type);

}  // namespace device
