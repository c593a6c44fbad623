// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Which addresses are memory of a device, and which are page-locked memory of the host.
#pragma once

namespace device {

bool is_on_device(const void* address);
bool is_pinned(const void* address);

}  // namespace device
