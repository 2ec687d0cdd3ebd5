// SPDX-License-Identifier: Apache-2.0
#include "cli/text.h"

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "cli/commands.h"
#include "src/numbers.h"

namespace logitless::cli {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};

constexpr Unit kUnits[] = {{"", 1},         {"B", 1},        {"KiB", 0x1p10}, {"K", 0x1p10},
                           {"kB", 1e3},     {"KB", 1e3},     {"MiB", 0x1p20}, {"M", 0x1p20},
                           {"MB", 1e6},     {"GiB", 0x1p30}, {"G", 0x1p30},   {"GB", 1e9},
                           {"TiB", 0x1p40}, {"T", 0x1p40},   {"TB", 1e12}};

constexpr DeviceType kDevices[] = {DeviceType::cpu, DeviceType::cuda, DeviceType::webgpu,
                                   DeviceType::reference};

// Which commands accept which --device; info, without this option, shows all devices.
struct DeviceOfCommands {
  const char* device;
  std::vector<std::string> commands;
};
const DeviceOfCommands kDeviceTable[] = {{"cpu", {"plan", "check", "bench", "loss", "score"}},
                                         {"cuda", {"plan", "check", "bench"}},
                                         {"webgpu", {"plan", "bench"}},
                                         {"reference", {"check", "loss", "score"}}};

// The names used in JSON, in the order of StatusCode.
constexpr const char* kStatusNames[] = {"ok",
                                        "invalid_argument",
                                        "wrong_shape",
                                        "wrong_dtype",
                                        "wrong_device",
                                        "misaligned",
                                        "unknown_enum",
                                        "workspace_too_small",
                                        "target_out_of_range",
                                        "backend_unavailable",
                                        "not_supported",
                                        "device_error",
                                        "internal"};

// The number of terminal columns of UTF-8 text.
size_t width(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::optional<uint64_t> bytes_of(std::string_view text) {
  double number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  const auto* known = std::find_if(std::begin(kUnits), std::end(kUnits),
                                   [&](const Unit& u) { return u.name == unit; });
  if (problem != std::errc{} || known == std::end(kUnits)) return {};
  // A double is not exact for integers above 2^53, so whole numbers are read as integers.
  int64_t whole = 0;
  const auto integer = std::from_chars(text.data(), end, whole);
  if (integer.ec == std::errc{} && integer.ptr == end) {
    const auto one = static_cast<int64_t>(known->bytes);
    if (whole < 0 || whole > INT64_MAX / one) return {};
    return static_cast<uint64_t>(whole * one);
  }
  if (!(number >= 0) || !(number * known->bytes < 0x1p63)) return {};
  return static_cast<uint64_t>(number * known->bytes);
}

}  // namespace

uint64_t parse_bytes(std::string_view text, std::string_view option) {
  if (const std::optional<uint64_t> bytes = bytes_of(text)) return *bytes;
  throw BadInput(
      fmt::format("{}: \"{}\" is no size; allowed: bytes, or a number with KiB, MiB, "
                  "GiB, TiB, kB, MB, GB or TB",
                  option, text));
}

void add_memory_option(CLI::App& command, std::optional<uint64_t>& bytes) {
  command
      .add_option_function<std::string>(
          "--memory", [&bytes](const std::string& text) { bytes = parse_bytes(text, "--memory"); },
          "workspace, e.g. 64MiB; default: the recommended")
      ->type_name("SIZE");
}

void check_memory(uint64_t bytes, const WorkspaceSize& size) {
  if (bytes >= size.minimum) return;
  throw BadInput(
      fmt::format("--memory: {} bytes; this op needs at least {} ({}); {} are recommended", bytes,
                  size.minimum, format_bytes(size.minimum), format_bytes(size.recommended)));
}

CLI::Validator integer(int64_t least, int64_t most) {
  return CLI::Validator(
      [least, most](const std::string& text) -> std::string {
        int64_t value = 0;
        const char* last = text.data() + text.size();
        const auto [end, problem] = std::from_chars(text.data(), last, value);
        const char* digits = text.data() + text.starts_with('-');
        const bool octal = last - digits > 1 && *digits == '0';
        if (problem != std::errc{} || end != last || octal) return "\"" + text + "\" is no integer";
        if (value < least) return fmt::format("{}; allowed: >= {}", text, least);
        return value > most ? fmt::format("{}; allowed: <= {}", text, most) : "";
      },
      "");
}

namespace {

// Returns what is wrong with the text of an f32 number, or "".
std::string wrong_with(const std::string& text, double* value) {
  char* end = nullptr;
  errno = 0;
  *value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != 0) return "\"" + text + "\" is no number";
  // ERANGE: too small or too large even for a double.
  const bool lost = errno == ERANGE && (*value == 0 || std::isinf(*value));
  if (lost || !held_by_f32(*value)) return fmt::format("{}; allowed: {}", text, what_f32_holds);
  return "";
}

}  // namespace

CLI::Validator number() {
  return CLI::Validator(
      [](const std::string& text) {
        double value = 0;
        return wrong_with(text, &value);
      },
      "");
}

CLI::Validator number(double least, double most) {
  const std::string range = fmt::format("{} to {}", least, most);
  return CLI::Validator(
      [least, most, range](const std::string& text) {
        double value = 0;
        const std::string wrong = wrong_with(text, &value);
        if (!wrong.empty() || (value >= least && value <= most)) return wrong;
        return fmt::format("{}; allowed: {}", text, range);
      },
      range);
}

std::string format_bytes(uint64_t bytes) {
  static constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double number = static_cast<double>(bytes);
  size_t unit = 0;
  for (; number >= 1024 && unit + 1 < std::size(kNames); ++unit) number /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", number, kNames[unit]);
}

std::string joined(const std::vector<std::string>& names) { return CLI::detail::join(names, ", "); }

std::string memory_argument(uint64_t bytes) {
  const bool large = bytes >= uint64_t{64} << 20;
  const int shift = large ? 20 : 10;
  return fmt::format("{}{}", (bytes + (uint64_t{1} << shift) - 1) >> shift, large ? "MiB" : "KiB");
}

std::string nothing_saved(uint64_t held, const WorkspaceSize& size) {
  const std::string text = "nothing is saved at this size";
  if (size.minimum >= held) return text;
  return text + "; --memory " + memory_argument(size.minimum) + " would do";
}

const char* name_of(DType dtype) {
  static constexpr const char* kNames[] = {"f32", "f16", "bf16", "i32", "i64"};
  return kNames[static_cast<int>(dtype)];
}

DType parse_dtype(const std::string& name) {
  const auto at = std::find(kFloatDtypes.begin(), kFloatDtypes.end(), name);
  if (at == kFloatDtypes.end()) {
    throw BadInput(fmt::format("dtype \"{}\"; allowed: f32, f16, bf16", name));
  }
  return static_cast<DType>(at - kFloatDtypes.begin());
}

const char* name_of(DeviceType device) {
  static constexpr const char* kNames[] = {"cpu", "cuda", "webgpu", "reference"};
  return kNames[static_cast<int>(device)];
}

DeviceType parse_device(const std::string& name) {
  for (const DeviceType device : kDevices) {
    if (name != name_of(device)) continue;
    Status status;
    logitless_describe_backend(static_cast<int32_t>(device), nullptr, 0, status.c());
    check(status);
    return device;
  }
  throw BadInput(fmt::format("--device: \"{}\"; allowed: cpu, cuda, webgpu, reference", name));
}

std::vector<std::string> devices_of(const std::string& command) {
  std::vector<std::string> devices;
  for (const auto& [device, commands] : kDeviceTable) {
    if (CLI::detail::find_member(command, commands) >= 0) devices.emplace_back(device);
  }
  return devices;
}

CLI::Validator device_of(const std::string& command) {
  const std::vector<std::string> devices = devices_of(command);
  return CLI::Validator(
      [command, devices](const std::string& text) -> std::string {
        if (CLI::detail::find_member(text, devices) >= 0) return "";
        for (const auto& [device, commands] : kDeviceTable) {
          if (text != device) continue;
          return fmt::format("{} does not take {} ({} do); allowed: {}", command, text,
                             joined(commands), joined(devices));
        }
        return fmt::format("\"{}\" is no device; allowed: {}", text, joined(devices));
      },
      "{" + joined(devices) + "}");
}

void check(const Status& status) {
  const auto index = static_cast<size_t>(status.code());
  const char* code = index < std::size(kStatusNames) ? kStatusNames[index] : "internal";
  const std::string message = status.message();
  switch (status.code()) {
    case StatusCode::ok:
      return;
    case StatusCode::backend_unavailable:
    case StatusCode::not_supported:
    case StatusCode::device_error:
    case StatusCode::internal:
      throw Failure(message, code);
    default:  // the message already begins with the field
      throw BadInput(message,
                     message.substr(0, message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_.")),
                     code);
  }
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - width(row[i]), ' ');
      line += (i == 0 ? "" : "  ") + (i == 0 ? row[i] + space : space + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  }
}

void print_json(const nlohmann::json& value) {
  fmt::print("{}\n", value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace logitless::cli
