// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// Page-locked memory of the host. It is mapped twice: what kernels use is always there, and the
// host's view can be closed while it has not waited for them.
#pragma once
#include <cstddef>

namespace device {

enum class Allowed { everything, reading, nothing };  // for the host

struct HostBlock {
  char* start = nullptr;  // null: not page-locked
  size_t size = 0;
  int device = 0;
  char* for_kernels = nullptr;  // null: registered, mapped once

  static HostBlock holder(const void* address);
  static size_t in_pages(size_t size);
  void add() const;
  void remove() const;
  void allow(Allowed what) const;
  bool operator<(const HostBlock& other) const { return start < other.start; }
};

bool is_pinned(const void* address);
void* for_kernels(const void* address);  // any address: where kernels find the same bytes

}  // namespace device
