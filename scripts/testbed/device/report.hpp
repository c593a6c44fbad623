// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// How the emulated device ends a process: one line that says why, with the seed of its delays.
#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace device {

// A line before the one that ends it.
void report(const char* format, ...) __attribute__((format(printf, 1, 2), visibility("default")));

[[noreturn]] void end(const char* format, ...)
    __attribute__((format(printf, 1, 2), visibility("default")));

}  // namespace device
