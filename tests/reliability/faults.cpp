// SPDX-License-Identifier: Apache-2.0
// Injects a fault into a new process, in turn at every place where it can occur:
//   allocation  one allocation fails, or it and every later one: malloc etc., also under operator
//               new, fopen, dlopen and thread creation
//   thread      pthread_create fails, once or always from then on
//   fork        a child is forked while other threads are inside the library, and uses it
// The call with the fault returns its usual status and bits, or an error without writing anything;
// the next call works as usual. A sanitizer's own malloc cannot be made to fail, so such builds
// skip the allocations.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <thread>
#include <vector>

#include "tests/reliability/report.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace {

// The fault strikes at the `at`-th place, counted from 1, and at all later ones if it is lasting.
struct Fault {
  std::atomic<int64_t> at{0}, seen{0};
  std::atomic<bool> forever{false};

  bool strikes() {
    const int64_t place = at.load(std::memory_order_relaxed);
    if (place == 0) return false;
    const int64_t now = seen.fetch_add(1, std::memory_order_relaxed) + 1;
    return forever.load(std::memory_order_relaxed) ? now >= place : now == place;
  }
  void arm(int64_t place, bool all) {
    seen = 0;
    forever = all;
    at = place;
  }
  void disarm() { at = 0; }
};
Fault allocation_fault, thread_fault;

}  // namespace

// These replace the functions of the shared libraries too.
#pragma GCC visibility push(default)
extern "C" {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(LOGITLESS_SANITIZED)
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  if (!allocation_fault.strikes()) return __libc_malloc(bytes);
  errno = ENOMEM;
  return nullptr;
}
void* calloc(size_t count, size_t bytes) {
  if (!allocation_fault.strikes()) return __libc_calloc(count, bytes);
  errno = ENOMEM;
  return nullptr;
}
void* realloc(void* memory, size_t bytes) {
  if (!allocation_fault.strikes()) return __libc_realloc(memory, bytes);
  errno = ENOMEM;
  return nullptr;
}
void* memalign(size_t alignment, size_t bytes) {
  if (!allocation_fault.strikes()) return __libc_memalign(alignment, bytes);
  errno = ENOMEM;
  return nullptr;
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  void* made = memalign(alignment, bytes);
  if (made == nullptr) return ENOMEM;
  *memory = made;
  return 0;
}
#endif

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return thread_fault.strikes() ? EAGAIN : create(thread, attributes, start, argument);
}
}
#pragma GCC visibility pop

namespace logitless::reliability {
namespace {

constexpr size_t kScratchBytes = 8 << 20;

// One call of the library: its status, and what it wrote.
class Entry {
 public:
  virtual ~Entry() = default;
  virtual int32_t call() = 0;  // must not touch other memory
  virtual uint64_t written() const { return 0; }
  virtual void clear() {}
  std::string name;
};

template <class Op>
class Run final : public Entry {
 public:
  Run(conformance::OpKind kind, DeviceType device, bool ask)
      : problem_(conformance::build<Op>(make_case(kind, device))),
        c_(problem_.op),
        scratch_(kScratchBytes),
        device_(device),
        ask_(ask) {
    name = std::string(ask ? "workspace " : "run ") + conformance::name_of(kind) +
           (device == DeviceType::cpu ? " on cpu" : " on reference");
    clear();
  }
  int32_t call() override {
    logitless_execution execution = LOGITLESS_EXECUTION_INIT;
    execution.device_type = static_cast<int32_t>(device_);
    logitless_workspace_size size = LOGITLESS_WORKSPACE_SIZE_INIT;
    if (ask_) return logitless_workspace(&c_.op, &execution, &size, &status_);
    const logitless_workspace_buffer workspace{sizeof(workspace), 0, scratch_.data(), kScratchBytes,
                                               0};
    return logitless_run(&c_.op, &workspace, &execution, &status_);
  }
  uint64_t written() const override {
    Digest digest;
    each_output([&](std::byte* data, size_t bytes) { digest.add(data, bytes); });
    return digest.value();
  }
  void clear() override {
    each_output([](std::byte* data, size_t bytes) { std::memset(data, 0x77, bytes); });
  }

 private:
  static conformance::Case make_case(conformance::OpKind kind, DeviceType device) {
    conformance::Case c{.op = kind, .shape = {70, 9, 400}, .statistics = true};
    // the reference allocates for each token
    if (device == DeviceType::reference) c.shape = {3, 2, 5};
    c.options.label_smoothing = 0.1f;
    c.bias = true;
    return c;
  }
  template <class F>
  void each_output(F&& f) const {
    const logitless_op unused{};
    for_each_tensor(
        problem_.op, unused, [&](const char*, Access access, const TensorView& view, const auto*) {
          if (access == Access::read || !view) return;
          f(view.as<std::byte>(),
            static_cast<size_t>(conformance::element_count(view) * size_of(view.dtype)));
        });
  }

  conformance::Problem<Op> problem_;
  detail::COp<Op> c_;
  conformance::Bytes scratch_;
  DeviceType device_;
  bool ask_;
  logitless_status status_ = LOGITLESS_STATUS_INIT;
};

class Other final : public Entry {
 public:
  Other(const std::string& what, std::function<int32_t()> f) : f_(std::move(f)) { name = what; }
  int32_t call() override { return f_(); }

 private:
  std::function<int32_t()> f_;
};

std::vector<std::unique_ptr<Entry>> entries() {
  std::vector<std::unique_ptr<Entry>> all;
  for (const DeviceType device : {DeviceType::cpu, DeviceType::reference}) {
    for (const conformance::OpKind kind : kOps) {
      for (const bool ask : {true, false}) {
        conformance::with_op(kind, [&](auto op) {
          all.push_back(std::make_unique<Run<decltype(op)>>(kind, device, ask));
        });
      }
    }
  }
  const auto add = [&](const std::string& name, std::function<int32_t()> f) {
    all.push_back(std::make_unique<Other>(name, std::move(f)));
  };
  for (int32_t device = LOGITLESS_CPU; device <= LOGITLESS_REFERENCE; ++device) {
    add("describe_backend " + std::to_string(device), [device] {
      char text[200];
      return logitless_describe_backend(device, text, sizeof(text), nullptr);
    });
    add("warmup " + std::to_string(device), [device] {
      logitless_execution execution = LOGITLESS_EXECUTION_INIT;
      execution.device_type = device;
      return logitless_warmup(&execution, nullptr);
    });
  }
  add("set_num_threads", [] { return logitless_set_num_threads(3) == 3 ? 0 : 1; });
  add("num_threads", [] { return logitless_num_threads() > 0 ? 0 : 1; });
  add("scale_each", [] { return logitless_scale_each(nullptr, 0, nullptr, nullptr, nullptr); });
  add("add", [] { return logitless_add(nullptr, 1, nullptr, nullptr, nullptr); });
  add("webgpu_device",
      [] { return logitless_webgpu_device(0, nullptr, nullptr, nullptr, nullptr); });
  add("webgpu_create_workspace", [] {
    void* made = nullptr;
    const int32_t code = logitless_webgpu_create_workspace(0, 1 << 20, &made, nullptr);
    logitless_webgpu_destroy_workspace(made);
    return code;
  });
  return all;
}

// The result that a child process reports to its parent.
struct Answer {
  int64_t seen = 0;  // places passed, including faulted ones
  int32_t code = 0, next_code = 0;
  uint64_t written = 0, untouched = 0, next_written = 0;
};

Answer in_child(const std::string& what, const std::function<Answer()>& f) {
  int ends[2];
  if (pipe(ends) != 0) broken("pipe: %s", std::strerror(errno));
  const pid_t child = fork();
  if (child < 0) broken("fork: %s", std::strerror(errno));
  if (child == 0) {
    alarm(60);  // ends a call that hangs
    const Answer answer = f();
    _exit(write(ends[1], &answer, sizeof(answer)) == sizeof(answer) ? 0 : 1);
  }
  close(ends[1]);
  Answer answer;
  const bool whole = read(ends[0], &answer, sizeof(answer)) == sizeof(answer);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0 || !whole) broken("%s: the process ended with status %d", what.c_str(), status);
  return answer;
}

Answer call_with(Entry& entry, Fault& fault, int64_t at, bool forever) {
  return in_child(entry.name + ", place " + std::to_string(at), [&] {
    Answer a;
    setenv("LOGITLESS_NUM_THREADS", "3", 1);
    a.untouched = entry.written();
    fault.arm(at, forever);
    a.code = entry.call();
    fault.disarm();
    a.seen = fault.seen;
    a.written = entry.written();
    entry.clear();
    a.next_code = entry.call();
    a.next_written = entry.written();
    return a;
  });
}

// Injects a fault at every place of one entry point; returns how many calls survived.
int64_t every_place(Entry& entry, Fault& fault, bool forever) {
  const Answer good = call_with(entry, fault, INT64_MAX, forever);
  if (good.code != good.next_code || good.written != good.next_written) {
    broken("%s: two calls differ", entry.name.c_str());
  }
  int64_t faults = 0;
  for (int64_t at = 1;; ++at) {
    const Answer a = call_with(entry, fault, at, forever);
    const std::string what = entry.name + ", place " + std::to_string(at);
    const bool error = a.code == LOGITLESS_INTERNAL || a.code == LOGITLESS_BACKEND_UNAVAILABLE;
    if (a.code != good.code && !error) broken("%s: code %d", what.c_str(), a.code);
    if (a.written != (a.code == LOGITLESS_OK ? good.written : a.untouched)) {
      broken("%s: code %d and %s", what.c_str(), a.code,
             a.code == LOGITLESS_OK ? "other bits" : "bytes written");
    }
    if (a.next_code != good.code || a.next_written != good.next_written) {
      broken("%s: the next call says %d, or writes other bits", what.c_str(), a.next_code);
    }
    if (a.seen < at) return faults;
    ++faults;
  }
}

// Forks children of a process whose other threads are always inside the library.
int64_t forks(int64_t count) {
  const conformance::Case c{.op = conformance::OpKind::linear_forward_backward,
                            .shape = {40, 16, 300},
                            .statistics = true};
  const conformance::TestDevice& cpu = conformance::device("cpu");
  logitless_set_num_threads(3);
  const conformance::Fields want = run_case(cpu, c).fields;
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      while (!stop) conformance::run_case(cpu, c);
    });
  }
  for (int64_t i = 0; i < count; ++i) {
    usleep(static_cast<useconds_t>(i % 7 * 100));  // forks at different times
    in_child("fork " + std::to_string(i), [&] {
      Answer a;
      for (int again = 0; again < 3; ++again) {
        if (!differing_bits(want, run_case(cpu, c).fields).empty()) _exit(2);
      }
      return a;
    });
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  return count;
}

// Backends that report their absence on this machine: no driver, or no library.
int64_t absent_backends() {
  int64_t absent = 0;
  for (const int32_t device : {LOGITLESS_CUDA, LOGITLESS_WEBGPU}) {
    char text[200];
    logitless_status status = LOGITLESS_STATUS_INIT;
    logitless_describe_backend(device, text, sizeof(text), &status);
    if (status.code == LOGITLESS_OK) continue;
    if (status.code != LOGITLESS_BACKEND_UNAVAILABLE || status.message[0] == 0) {
      broken("backend %d is absent with code %d: %s", device, status.code, status.message);
    }
    ++absent;
  }
  return absent;
}

int faults(int64_t forked) {
  int64_t allocations = 0, threads = 0;
  const auto all = entries();
  for (const auto& entry : all) {
    for (const bool forever : {false, true}) {
      if (!conformance::kSanitized) allocations += every_place(*entry, allocation_fault, forever);
      threads += every_place(*entry, thread_fault, forever);
    }
  }
  figure("entry points", static_cast<int64_t>(all.size()));
  figure("allocation failures", allocations);
  figure("thread failures", threads);
  figure("forks", forks(forked));
  figure("absent backends", absent_backends());
  if (allocations == 0 && !conformance::kSanitized) broken("no allocation was seen");
  if (threads == 0) broken("no thread was started");
  return 0;
}

}  // namespace
}  // namespace logitless::reliability

int main(int argc, char** argv) {
  return logitless::reliability::faults(logitless::reliability::option(argc, argv, "--forks", 200));
}
