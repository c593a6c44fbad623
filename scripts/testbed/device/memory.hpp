// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Which addresses are memory of a device.
#pragma once

namespace device {

bool is_on_device(const void* address);

}  // namespace device
