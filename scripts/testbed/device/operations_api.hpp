// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// What the library of operations, which needs torch, asks of the device below it.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "watch.hpp"

extern "C" {
void asynchzp_device_launch(void* stream, std::function<void()>* run);
void asynchzp_device_submit(void* stream, device::watch::Kind kind, const std::string& name,
                            const device::Access* accesses, size_t count);
bool asynchzp_device_is_pinned(const void* address);
void* asynchzp_device_for_kernels(const void* address);
void asynchzp_device_carry(void* stream, size_t size, bool is_to_host);
void asynchzp_device_keep_tracebacks(std::shared_ptr<void> (*gather)(bool may_wait),
                                     std::string (*text_of)(const std::shared_ptr<void>&));
__attribute__((weak)) int PyGILState_Check();
void asynchzp_device_synchronize(void* stream);
void asynchzp_device_freed(void* start, size_t size, void* stream);
void asynchzp_device_poison(void* start, size_t size, void* stream);
unsigned long long asynchzp_device_capture(void* stream);
}
