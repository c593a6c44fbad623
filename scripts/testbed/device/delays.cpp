// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
#include "delays.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "report.hpp"

namespace device {
namespace {

const char* const kNames[] = {"none", "uniform", "slow-stream", "slow-rank", "on-demand"};
// Of how many streams the slow one is chosen: a rank of the engine uses about so many.
constexpr int kStreams = 6;

int number_of(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text ? atoi(text) : otherwise;
}

// "LAW SEED LONGEST_US", of a process that nobody tells otherwise.
Delays from_environment() {
  Delays found;
  const char* text = getenv("ASYNCHZP_DEVICE_DELAYS");
  if (!text) return found;
  char law[32] = {};
  unsigned long long seed = 0;
  if (sscanf(text, "%31s %llu %d", law, &seed, &found.longest_us) != 3)
    end("ASYNCHZP_DEVICE_DELAYS is not LAW SEED MICROSECONDS: %s", text);
  int number = 0;
  while (number < int(std::size(kNames)) && strcmp(law, kNames[number])) number++;
  if (number == int(std::size(kNames))) end("there is no law of delay %s", law);
  found.law = Law(number);
  found.seed = seed;
  found.rank = number_of("RANK", 0);
  found.world_size = number_of("WORLD_SIZE", 1);
  return found;
}

Delays chosen = from_environment();
std::atomic<int64_t> num_kernels{0};
std::atomic<uint64_t> digest{0};

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

const Delays& delays() { return chosen; }

void set_delays(const Delays& delays) {
  chosen = delays;
  num_kernels = 0;
  digest = 0;
}

int delay_us(int ordinal, int64_t index) {
  uint64_t draw = mixed(chosen.seed);
  for (uint64_t part : {uint64_t(chosen.rank), uint64_t(ordinal), uint64_t(index)})
    draw = mixed(draw ^ part);
  int us = 0;
  if (chosen.law == Law::uniform) us = draw % (chosen.longest_us + 1);
  if (chosen.law == Law::slow_stream && ordinal == int(chosen.seed % kStreams))
    us = chosen.longest_us;
  if (chosen.law == Law::slow_rank && chosen.rank == int(chosen.seed % chosen.world_size))
    us = chosen.longest_us;
  num_kernels++;
  digest += mixed(draw ^ uint64_t(us));  // a sum: streams may come in any order
  return us;
}

void report(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  char line[1280];
  int size = snprintf(line, sizeof line, "emulated device: %s\n", text);
  (void)!write(STDERR_FILENO, line, size);
}

void end(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  char line[1280];
  int size = snprintf(line, sizeof line, "emulated device: %s (rank %d, law %s, seed %llu)\n", text,
                      chosen.rank, kNames[int(chosen.law)], (unsigned long long)chosen.seed);
  (void)!write(STDERR_FILENO, line, size);
  _exit(70);
}

}  // namespace device

using namespace device;

EXPORT int64_t asynchzp_device_num_kernels() { return num_kernels; }
EXPORT uint64_t asynchzp_device_digest() { return digest; }
