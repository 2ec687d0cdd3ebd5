// SPDX-License-Identifier: Apache-2.0
// The pool's default number of threads: LOGITLESS_NUM_THREADS, else OMP_NUM_THREADS, else the
// number of processors in this process's affinity mask, bounded by the CPU quota of its cgroup (v2
// or v1), which containers set.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "src/cpu/thread_pool.h"

namespace logitless::cpu {
namespace {

constexpr size_t kPathBytes = 4096;

// Returns the first number of "8" or, as OpenMP allows, of "8,4"; 0 if there is none.
int32_t threads_from_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return 0;
  char* end;
  const long value = std::strtol(text, &end, 10);
  while (*end == ' ') ++end;
  if (end == text || (*end != 0 && *end != ',') || value < 1) return 0;
  return static_cast<int32_t>(std::min<long>(value, kMaxThreads));
}

int32_t threads_from_affinity() {
#if defined(__linux__)
  cpu_set_t sets[16];  // 16384 processors
  if (sched_getaffinity(0, sizeof(sets), sets) == 0) return CPU_COUNT_S(sizeof(sets), sets);
#endif
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}

struct File {
  explicit File(const char* path) : file(std::fopen(path, "re")) {}
  ~File() {
    if (file != nullptr) std::fclose(file);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  std::FILE* file;
};

// Returns quota / period, both in microseconds, in whole threads, rounded up; 0 without a limit.
int32_t threads_of(double quota, double period) {
  if (!(quota > 0) || !(period > 0)) return 0;
  return static_cast<int32_t>(std::min((quota + period - 1) / period, 1.0 * kMaxThreads));
}

double read_number(const char* path) {
  const File f(path);
  double value;
  return f.file != nullptr && std::fscanf(f.file, "%lf", &value) == 1 ? value : 0;
}

int32_t smaller_limit(int32_t a, int32_t b) { return a == 0 || (b != 0 && b < a) ? b : a; }

int32_t directory_quota(bool v2, const char* directory) {
  char path[kPathBytes + 32];
  if (v2) {
    std::snprintf(path, sizeof(path), "%s/cpu.max", directory);
    const File f(path);
    double quota, period;  // "max 100000" does not begin with a number
    if (f.file == nullptr || std::fscanf(f.file, "%lf %lf", &quota, &period) != 2) return 0;
    return threads_of(quota, period);
  }
  std::snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", directory);
  const double quota = read_number(path);
  std::snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", directory);
  return threads_of(quota, read_number(path));
}

// Returns the smallest limit from `group` up to the mount: the limits of all ancestors apply.
int32_t group_quota(bool v2, const char* mount, const char* group) {
  char directory[kPathBytes];
  const int length = std::snprintf(directory, sizeof(directory), "%s%s", mount, group);
  if (length < 0 || length >= static_cast<int>(sizeof(directory))) return 0;
  const size_t mount_length = std::strlen(mount);
  int32_t limit = 0;
  for (;;) {
    limit = smaller_limit(limit, directory_quota(v2, directory));
    char* slash = std::strrchr(directory, '/');
    if (slash == nullptr || static_cast<size_t>(slash - directory) < mount_length) return limit;
    *slash = 0;
  }
}

// Whether the comma-separated list names the cpu controller.
bool names_cpu(const char* controllers) {
  for (const char* item = controllers; item != nullptr; item = std::strchr(item, ',')) {
    if (*item == ',') ++item;
    if (std::strncmp(item, "cpu", 3) == 0 && (item[3] == ',' || item[3] == 0)) return true;
  }
  return false;
}

}  // namespace

int32_t cgroup_num_threads(const char* membership, const char* mount) {
  const File f(membership);
  if (f.file == nullptr) return 0;
  int32_t limit = 0;
  char line[kPathBytes];
  while (std::fgets(line, sizeof(line), f.file) != nullptr) {
    line[std::strcspn(line, "\n")] = 0;
    // each line is hierarchy:controllers:path
    char* controllers = std::strchr(line, ':');
    char* path = controllers != nullptr ? std::strchr(++controllers, ':') : nullptr;
    if (path == nullptr) continue;
    *path++ = 0;
    const bool v2 = *controllers == 0;
    if (!v2 && !names_cpu(controllers)) continue;
    char base[kPathBytes];
    std::snprintf(base, sizeof(base), v2 ? "%s" : "%s/cpu", mount);
    limit = smaller_limit(limit, group_quota(v2, base, path));
  }
  return limit;
}

int32_t default_num_threads() {
  static const int32_t threads = [] {
    int32_t wanted = threads_from_environment("LOGITLESS_NUM_THREADS");
    if (wanted == 0) wanted = threads_from_environment("OMP_NUM_THREADS");
    if (wanted > 0) return wanted;
    wanted = threads_from_affinity();
    const int32_t quota = cgroup_num_threads("/proc/self/cgroup", "/sys/fs/cgroup");
    if (quota > 0) wanted = std::min(wanted, quota);
    return std::clamp(wanted, 1, kMaxThreads);
  }();
  return threads;
}

}  // namespace logitless::cpu
