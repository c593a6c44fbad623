// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "commands.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "report.hpp"

namespace device::commands {
namespace {

// Never destroyed: threads outlive main().
auto& mutex = *new std::mutex;
auto& lines = *new std::string;

// From the first command on, where ASYNCHZP_DEVICE_COMMANDS names the file.
FILE* file_of_process() {
  const char* path = getenv("ASYNCHZP_DEVICE_COMMANDS");
  if (!path || !*path) return nullptr;
  FILE* opened = fopen(path, "w");
  if (!opened) end("ASYNCHZP_DEVICE_COMMANDS: cannot write to %s", path);
  return opened;
}
FILE* file = nullptr;
std::atomic<bool> is_on{false};

// A thread that launches nothing, such as a watchdog, holds up no launch by what it waits for.
thread_local bool has_launched = false;

std::string pair_of(int64_t first, int64_t second) {
  return "[" + std::to_string(first) + ", " + std::to_string(second) + "]";
}

template <typename Items, typename Text>
std::string list_of(const Items& items, const Text& text) {
  std::string joined;
  for (const auto& item : items) joined += (joined.empty() ? "" : ", ") + text(item);
  return "[" + joined + "]";
}

void add(const std::string& line) {
  std::lock_guard lock(mutex);
  if (!file) {
    lines += line + "\n";
    return;
  }
  fprintf(file, "%s\n", line.c_str());
  fflush(file);  // a process may be ended at any time
}

}  // namespace

bool are_recorded() {
  static std::once_flag once;
  std::call_once(once, [] {
    if ((file = file_of_process())) is_on = true;
  });
  return is_on;
}

void note(int stream, int64_t number, const std::string& of_collective) {
  has_launched = true;
  if (are_recorded()) add("{\"on\": " + pair_of(stream, number) + of_collective + "}");
}

void note_wait(int stream, int64_t number, int other, int64_t other_number) {
  note(stream, number, ", \"after\": " + pair_of(other, other_number));
}

void note_host_wait(int other, int64_t other_number) {
  if (has_launched && are_recorded()) add("{\"after\": " + pair_of(other, other_number) + "}");
}

std::string of_ranks(const std::string& group, const std::vector<int>& ranks) {
  auto text = [](int rank) { return std::to_string(rank); };
  return ", \"group\": \"" + group + "\", \"ranks\": " + list_of(ranks, text);
}

std::string of_messages(const std::string& group,
                        const std::vector<std::pair<int, int>>& messages) {
  auto text = [](const std::pair<int, int>& way) { return pair_of(way.first, way.second); };
  return ", \"group\": \"" + group + "\", \"messages\": " + list_of(messages, text);
}

}  // namespace device::commands

using namespace device::commands;

// From here on, in memory.
EXPORT void asynchzp_device_record_commands(bool is_asked) { is_on = is_asked; }

// What has been recorded since the last call.
EXPORT const char* asynchzp_device_commands() {
  static std::string text;
  std::lock_guard lock(mutex);
  text = std::exchange(lines, {});
  return text.c_str();
}
