// SPDX-License-Identifier: Apache-2.0
// logitless info: the version, the backends and why one is absent, the devices of CUDA, the
// instruction set chosen, and the number of threads and why.
#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <string_view>

#include "cli/commands.h"
#include "cli/text.h"
#include "logitless/logitless.h"
#include "src/cpu/dispatch.h"
#include "src/cpu/thread_pool.h"
#ifdef LOGITLESS_WITH_CUDA
#include "src/cuda/linear/engines.h"
#include "src/cuda/promises.h"
#endif

namespace logitless::cli {
namespace {

using nlohmann::json;

// Describes which rule of src/cpu/default_threads.cpp set the number of threads.
std::string thread_reason() {
  for (const char* name : {"LOGITLESS_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::atoi(value) == logitless_num_threads()) {
      return fmt::format("{}={}", name, value);
    }
  }
  const int quota = cpu::cgroup_num_threads("/proc/self/cgroup", "/sys/fs/cgroup");
  return quota > 0 && quota == logitless_num_threads() ? "the CPU quota of this process's cgroup"
                                                       : "the processors this process may run on";
}

json backend_info(const char* name, DeviceType type) {
  char text[512];
  Status status;
  logitless_describe_backend(static_cast<int32_t>(type), text, sizeof(text), status.c());
  json backend = {{"name", name}, {"available", status.ok()}};
  backend[status.ok() ? "description" : "reason"] = status.ok() ? text : status.message();
  return backend;
}

#ifdef LOGITLESS_WITH_CUDA
std::string cuda_version(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// What row_reference is if no statistic needs the maximum, by the dtype of a linear forward's
// inputs.
json row_references(const cuda::DeviceInfo& device) {
  json out;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    out[name_of(dtype)] =
        cuda::reference_is_maximum(device, dtype) ? "maximum" : "near the maximum";
  }
  return out;
}

json cuda_devices() {
  json devices = json::array();
  int count;
  // the line on the backend gives the reason
  if (!cuda::count_devices(&count).ok()) return devices;
  for (int i = 0; i < count; ++i) {
    const cuda::DeviceInfo* device;
    Status status = cuda::find_device(i, &device);
    if (status.ok()) status = cuda::check_named_engine(*device);
    if (!status.ok()) {
      devices.push_back({{"available", false}, {"reason", status.message()}});
      continue;
    }
    devices.push_back(
        {{"available", true},
         {"name", device->name},
         {"compute_capability", fmt::format("{}.{}", device->major, device->minor)},
         {"multiprocessors", device->multiprocessors},
         {"kernels", cuda::engine_for(*device).name()},
         {"batch_invariant_linear_ops", false},  // for f32, on every device: promises.h
         {"batch_invariant_16_bit_linear_ops", cuda::half_linear_ops_are_batch_invariant(*device)},
         {"row_reference_of_linear_ops", row_references(*device)}});
  }
  return devices;
}
#endif

json gather(const CLI::App& app) {
  const int version = logitless_version();
  json info = {
      {"version", fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)}};
  info["backends"] = {backend_info("cpu", DeviceType::cpu), backend_info("cuda", DeviceType::cuda),
                      backend_info("webgpu", DeviceType::webgpu),
                      backend_info("reference", DeviceType::reference)};
#ifdef LOGITLESS_WITH_CUDA
  info["cuda"] = {{"built_with", cuda_version(CUDART_VERSION)},
                  {"driver_floor", cuda_version(cuda::driver_floor)},
                  {"devices", cuda_devices()}};
#endif
  for (const CLI::App* command : app.get_subcommands({})) {
    info["commands"].push_back(command->get_name());
  }
  info["cpu"] = {{"isa", cpu::target_name()},
                 {"isas", CLI::detail::split(cpu::target_names(), ' ')},
                 {"threads", logitless_num_threads()},
                 {"threads_from", thread_reason()}};
  return info;
}

void print(const json& info) {
  fmt::print("logitless {}\n\n", info["version"].get<std::string>());
  for (const json& b : info["backends"]) {
    const auto name = b["name"].get<std::string>();
    std::string text = b[b["available"] ? "description" : "reason"].get<std::string>();
    if (text.starts_with(name + ": ")) text.erase(0, name.size() + 2);
    fmt::print("{:<11}{}{}\n", name, b["available"] ? "" : "absent: ", text);
  }
  if (info.contains("cuda")) {
    const json& cuda = info["cuda"];
    fmt::print("\nCUDA       built with {}; driver floor: one for CUDA {}\n",
               cuda["built_with"].get<std::string>(), cuda["driver_floor"].get<std::string>());
    int index = 0;
    for (const json& device : cuda["devices"]) {
      if (!device["available"]) {
        fmt::print("device {:<4}absent: {}\n", index++, device["reason"].get<std::string>());
        continue;
      }
      fmt::print("device {:<4}{}, compute capability {}, {} multiprocessors, kernels {}\n", index++,
                 device["name"].get<std::string>(), device["compute_capability"].get<std::string>(),
                 device["multiprocessors"].get<int>(), device["kernels"].get<std::string>());
    }
  }
  const json& cpu = info["cpu"];
  fmt::print("\nISA        {} of: {}\n", cpu["isa"].get<std::string>(), cpu::target_names());
  fmt::print("threads    {} from {}\n", cpu["threads"].get<int>(),
             cpu["threads_from"].get<std::string>());
}

}  // namespace

void add_info(CLI::App& app, Context& context) {
  add_command(app, context, "info", "version, backends, instruction set and threads")
      ->callback([&app, &context] {
        const json info = gather(app);
        if (context.json) {
          print_json(info);
        } else {
          print(info);
        }
      });
}

}  // namespace logitless::cli
