// SPDX-License-Identifier: Apache-2.0
// Commands read and print this: sizes in bytes, dtypes, devices, tables, JSON.
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
// Adds --memory, which takes bytes in those words.
void add_memory_option(CLI::App& command, std::optional<uint64_t>& bytes);
// Throws BadInput where a workspace of `bytes` is less than the op's minimum.
void check_memory(uint64_t bytes, const WorkspaceSize& size);
// Takes decimal integers that fit, because CLI11 alone takes octal and bends what is too large.
CLI::Validator integer(int64_t least = INT64_MIN, int64_t most = INT64_MAX);
// Takes numbers that f32 holds, because CLI11 alone makes 0 of those below and infinity of those
// above, and lets NaN pass a range. Without a range the library says of its options what is
// allowed.
CLI::Validator number();
CLI::Validator number(double least, double most);
std::string format_bytes(uint64_t bytes);                   // it returns "64.0 MiB", for example
std::string joined(const std::vector<std::string>& names);  // it returns "a, b, c", for example
// Returns what people type as --memory for at least `bytes`, such as "414KiB".
std::string memory_argument(uint64_t bytes);
// Where a workspace is no smaller than the logits, this line tells what would be: "nothing is saved
// at this size; --memory 414KiB would do". `held` counts the bytes that a plain implementation
// holds.
std::string nothing_saved(uint64_t held, const WorkspaceSize& size);

inline const std::vector<std::string> kFloatDtypes{"f32", "f16", "bf16"};
const char* name_of(DType dtype);
DType parse_dtype(const std::string& name);  // it takes a name of kFloatDtypes

// Reads cpu, cuda, webgpu or reference. It throws BadInput for other names, and Failure with the
// reason where this library or machine lacks the device.
DeviceType parse_device(const std::string& name);
// Returns the devices that a command takes as --device, by the command's name.
std::vector<std::string> devices_of(const std::string& command);
// Takes one of them; for another device the sentence says which commands take it.
CLI::Validator device_of(const std::string& command);
const char* name_of(DeviceType device);

// Turns an error of the library into an exit code: what the caller gave is BadInput, the rest
// Failure.
void check(const Status& status);

// Prints numbers to the right and the first column to the left; the first row is the head.
void print_table(const std::vector<std::vector<std::string>>& rows);

// Prints one line. Text that is not UTF-8 (a path) is mended, and NaN and infinities become null.
void print_json(const nlohmann::json& value);

}  // namespace logitless::cli
