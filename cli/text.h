// SPDX-License-Identifier: Apache-2.0
// What commands read and print: sizes in bytes, dtypes, devices, tables, JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "logitless/logitless.h"

namespace logitless::cli {

// Reads "67108864", "64MiB", "1.5 GiB" or "2GB"; BadInput names `option`.
uint64_t parse_bytes(std::string_view text, std::string_view option);
// Adds --memory, which accepts what parse_bytes does.
void add_memory_option(CLI::App& command, std::optional<uint64_t>& bytes);
// Throws BadInput if a workspace of `bytes` is less than the op's minimum.
void check_memory(uint64_t bytes, const WorkspaceSize& size);
// Accepts decimal integers within range: CLI11 alone accepts octal and clamps large numbers.
CLI::Validator integer(int64_t least = INT64_MIN, int64_t most = INT64_MAX);
// Accepts numbers within f32's range: CLI11 alone turns smaller ones into 0 and larger ones into
// infinity, and lets NaN pass a range. Without a range, the library's validation decides.
CLI::Validator number();
CLI::Validator number(double least, double most);
std::string format_bytes(uint64_t bytes);                   // "64.0 MiB", for example
std::string joined(const std::vector<std::string>& names);  // "a, b, c", for example
// Returns a short --memory argument for at least `bytes`, such as "414KiB".
std::string memory_argument(uint64_t bytes);
// The line for a workspace that is no smaller than the logits: "nothing is saved at this size;
// --memory 414KiB would do". `held` is the bytes of an implementation that stores logits.
std::string nothing_saved(uint64_t held, const WorkspaceSize& size);

inline const std::vector<std::string> kFloatDtypes{"f32", "f16", "bf16"};
const char* name_of(DType dtype);
DType parse_dtype(const std::string& name);  // one of kFloatDtypes

// Reads cpu, cuda, webgpu or reference. Throws BadInput for other names, and Failure with the
// reason if this library or machine lacks the device.
DeviceType parse_device(const std::string& name);
// The values of --device that the named command accepts.
std::vector<std::string> devices_of(const std::string& command);
// Accepts one of devices_of(command); the error for another lists the commands that accept it.
CLI::Validator device_of(const std::string& command);
const char* name_of(DeviceType device);

// Throws an error of the library: BadInput for the caller's errors, Failure for others.
void check(const Status& status);

// Pads columns to equal widths; the first is aligned left, the others right.
void print_table(const std::vector<std::vector<std::string>>& rows);

// Prints one line. Text that is not UTF-8 (a path) is repaired; NaN and infinities become null.
void print_json(const nlohmann::json& value);

}  // namespace logitless::cli
