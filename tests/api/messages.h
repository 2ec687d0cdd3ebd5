// SPDX-License-Identifier: Apache-2.0
// Messages of the library use names instead of numbers: a reader of "reduction 1" would have to
// look up what 1 is. A number is used only for a value that has no name.
#pragma once

#include <regex>
#include <string>

#include "logitless/status.h"

namespace logitless::testing {

// Returns the number used in a message in place of an enumerator's name, or "".
inline std::string number_for_a_name(const std::string& message, StatusCode code) {
  // Always wrong: "2 (mean)" and "device 1:0". Right only if 3 is unknown: "reduction is 3".
  static const std::regex explained(
      R"(\b\d+ \((sum|mean|error|ignore|zero|nan|logits|probabilities|)"
      R"(cpu|cuda|webgpu|reference|b?f\d\d|i\d\d|[A-Z]\w+)\))");
  static const std::regex device(R"(\bdevice -?\d+:)");
  static const std::regex value(
      R"(\b(kind|type|dtype|reduction|out_of_range|empty_mean|input_kind|layout)( is)? -?\d+)");
  static const std::regex allowed(R"(allowed: (.*[ ,])?-?\d+\b.*)");
  std::smatch found;
  const bool unknown = code == StatusCode::unknown_enum;
  for (const std::regex* rule : {&explained, &device, unknown ? &allowed : &value}) {
    if (std::regex_search(message, found, *rule)) return found.str();
  }
  return "";
}

}  // namespace logitless::testing
