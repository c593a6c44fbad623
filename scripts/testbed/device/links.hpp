// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// How long collectives take by the device's clock: rings over the links that a NetworkProfile
// (scripts/testbed/profile.py) describes.
#pragma once
#include <cstdint>
#include <vector>

namespace device {

// Of a node, as NetworkProfile has them: bytes a second, infinite where not modelled.
struct Links {
  double inter_nbytes_per_s, intra_nbytes_per_s, inter_latency_s, intra_latency_s;
  int ranks_per_node;
  double host_nbytes_per_s;  // between a device and its host, each way

  // Of a message among all that the ranks of a node send at the same time, each one of `nbytes`.
  // inter_share: the part of them that leaves the node.
  double message_s(double nbytes, double inter_share) const;
};

Links& links();

// A way through the ranks of a communicator, each of which sends `num_steps` messages of `nbytes`.
// The ranks of a node do the same at the same time, each in its own communicator; what other
// communicators do does not slow it down.
double ring_s(const std::vector<int>& global_ranks, int num_steps, double nbytes);

// Pairs in turn: each rank sends `nbytes` to each other one.
double pairs_s(const std::vector<int>& global_ranks, double nbytes);

// One message between two ranks, which has all of the link.
double between_s(int from, int to, double nbytes);

}  // namespace device
