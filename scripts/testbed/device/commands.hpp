// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// What the hosts of this process ask of its device, in the order of their calls, one JSON object a
// line, while somebody records it. A command is named by its stream and its number there.
//
//   {"on": [3, 17]}                                   a kernel, a copy or the record of an event
//   {"on": [3, 18], "after": [5, 2]}                  a wait of the stream for what 5 has so far
//   {"on": [3, 19], "group": "A", "ranks": [0, 2]}    a collective of these ranks of the world
//   {"on": [3, 20], "group": "A", "messages": [[0, 2], [2, 0]]}     from and to
//   {"after": [3, 19]}                                a wait of the host
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace device::commands {

bool are_recorded();

// of_collective: what the line says of it beside its name.
void note(int stream, int64_t number, const std::string& of_collective);
void note_wait(int stream, int64_t number, int other, int64_t other_number);
void note_host_wait(int other, int64_t other_number);

std::string of_ranks(const std::string& group, const std::vector<int>& ranks);
std::string of_messages(const std::string& group, const std::vector<std::pair<int, int>>& messages);

}  // namespace device::commands
