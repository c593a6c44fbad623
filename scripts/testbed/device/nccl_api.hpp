// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// NCCL's header without the types of device code that it includes and does not use; some of their
// headers are in no wheel.
#pragma once
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
