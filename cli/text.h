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

// "67108864", "64MiB", "1.5 GiB", "2GB"; BadInput names `option`.
uint64_t parse_bytes(std::string_view text, std::string_view option);
// --memory, in those words.
void add_memory_option(CLI::App& command, std::optional<uint64_t>& bytes);
// BadInput where a workspace of `bytes` is less than the op's minimum.
void check_memory(uint64_t bytes, const WorkspaceSize& size);
// Decimal integers that fit: CLI11 alone takes octal and bends what is too large.
CLI::Validator integer(int64_t least = INT64_MIN, int64_t most = INT64_MAX);
std::string format_bytes(uint64_t bytes);                   // "64.0 MiB"
std::string joined(const std::vector<std::string>& names);  // "a, b, c"
// For --memory: what people type for at least `bytes`, "414KiB".
std::string memory_argument(uint64_t bytes);
// The line tells, beside a workspace that is no smaller than the logits, what would be: "nothing is
// saved at this size; --memory 414KiB would do". `held`: bytes of what a plain implementation
// holds.
std::string nothing_saved(uint64_t held, const WorkspaceSize& size);

inline const std::vector<std::string> kFloatDtypes{"f32", "f16", "bf16"};
const char* name_of(DType dtype);
DType parse_dtype(const std::string& name);  // a name of kFloatDtypes

// cpu, cuda, webgpu, reference; BadInput for other names, Failure with the reason where this
// library or machine lacks it.
DeviceType parse_device(const std::string& name);
// The devices that a command takes as --device, by its name.
std::vector<std::string> devices_of(const std::string& command);
// One of them; for another device the sentence says which commands take it.
CLI::Validator device_of(const std::string& command);
const char* name_of(DeviceType device);

// An error of the library as an exit code: what the caller gave is BadInput, the rest Failure.
void check(const Status& status);

// Numbers to the right, the first column to the left; the first row is the head.
void print_table(const std::vector<std::vector<std::string>>& rows);

// One line. Text that is not UTF-8 (a path) is mended, NaN and infinities are null.
void print_json(const nlohmann::json& value);

}  // namespace logitless::cli
