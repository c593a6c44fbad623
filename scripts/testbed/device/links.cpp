// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "links.hpp"

#include <algorithm>
#include <limits>

namespace device {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

bool is_inter(int from, int to) {
  return from / links().ranks_per_node != to / links().ranks_per_node;
}

}  // namespace

Links& links() {
  static Links known = {kNoLimit, kNoLimit, 0, 0, 1, kNoLimit};
  return known;
}

double Links::message_s(double nbytes, double inter_share) const {
  const double whole = ranks_per_node * nbytes;
  double seconds = 0;
  if (inter_share < 1) seconds = whole * (1 - inter_share) / intra_nbytes_per_s + intra_latency_s;
  if (inter_share > 0)
    seconds = std::max(seconds, whole * inter_share / inter_nbytes_per_s + inter_latency_s);
  return seconds;
}

double ring_s(const std::vector<int>& global_ranks, int num_steps, double nbytes) {
  const int n = global_ranks.size();
  double num_inter = 0;
  for (int i = 0; i < n; i++) num_inter += is_inter(global_ranks[i], global_ranks[(i + 1) % n]);
  return num_steps * links().message_s(nbytes, num_inter / n);
}

double pairs_s(const std::vector<int>& global_ranks, double nbytes) {
  const int n = global_ranks.size();
  double seconds = 0;
  for (int distance = 1; distance < n; distance++) {
    double num_inter = 0;
    for (int i = 0; i < n; i++)
      num_inter += is_inter(global_ranks[i], global_ranks[(i + distance) % n]);
    seconds += links().message_s(nbytes, num_inter / n);
  }
  return seconds;
}

double between_s(int from, int to, double nbytes) {
  if (from == to) return 0;
  const Links& known = links();
  return is_inter(from, to) ? nbytes / known.inter_nbytes_per_s + known.inter_latency_s
                            : nbytes / known.intra_nbytes_per_s + known.intra_latency_s;
}

}  // namespace device
