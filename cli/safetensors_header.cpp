// SPDX-License-Identifier: Apache-2.0
// Reads the header by SAX events instead of a tree, so that nesting deeper than the format's three
// levels fails at once and a duplicate name is an error.
#include "cli/safetensors_header.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "cli/safetensors.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

constexpr size_t kMaxRank = 64;

class HeaderReader : public nlohmann::json_sax<json> {
 public:
  Header header;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_float(double, const std::string& text) override { return refuse(in_quotes(text)); }
  bool number_integer(int64_t value) override { return refuse(std::to_string(value)); }
  bool binary(json::binary_t&) override { return refuse("binary data"); }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::shape && place_ != Place::offsets) return refuse(std::to_string(value));
    if (place_ == Place::shape) {
      if (entry_.shape.size() == kMaxRank) fail("{} has more than 64 dimensions", where());
      entry_.shape.push_back(value);
      return true;
    }
    if (offsets_ == 2) fail("{} has more than two data_offsets", where());
    (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata) {
      if (!header.metadata.emplace(key_, value).second) fail("__metadata__ has {} twice", key());
      return true;
    }
    if (place_ != Place::entry || key_ != "dtype") return refuse(in_quotes(value));
    entry_.dtype = value;
    return true;
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::start:
        place_ = Place::top;
        return true;
      case Place::top:
        place_ = entry_.name == "__metadata__" ? Place::metadata : Place::entry;
        seen_ = {};
        offsets_ = 0;
        return true;
      default:
        return refuse("an object");
    }
  }

  bool key(std::string& name) override {
    key_ = name;
    if (place_ == Place::top) {
      if (!names_.insert(name).second) fail("tensor {} is named twice", in_quotes(name));
      entry_ = {};
      entry_.name = name;
    } else if (place_ == Place::entry) {
      const size_t index = name == "dtype"          ? 0
                           : name == "shape"        ? 1
                           : name == "data_offsets" ? 2
                                                    : 3;
      if (index == 3) fail("{} has an unknown field {}", where(), key());
      if (seen_[index]) fail("{} has {} twice", where(), name);
      seen_[index] = true;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::entry) {
      static constexpr const char* kFields[] = {"dtype", "shape", "data_offsets"};
      for (size_t i = 0; i < 3; ++i) {
        if (!seen_[i]) fail("{} has no {}", where(), kFields[i]);
      }
      header.entries.push_back(std::move(entry_));
    }
    place_ = place_ == Place::top ? Place::finished : Place::top;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::entry || key_ == "dtype") return refuse("an array");
    place_ = key_ == "shape" ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() override {
    if (place_ == Place::offsets && offsets_ != 2) {
      fail("{} has {} data_offsets; needs two", where(), offsets_);
    }
    place_ = Place::entry;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    fail("the header is not JSON (byte {} of it)", position);
  }

 private:
  enum class Place { start, top, metadata, entry, shape, offsets, finished };

  template <class... T>
  [[noreturn]] static void fail(fmt::format_string<T...> format, T&&... values) {
    throw SafetensorsError(fmt::format(format, std::forward<T>(values)...));
  }

  std::string key() const { return in_quotes(key_); }
  std::string where() const { return "tensor " + in_quotes(entry_.name); }

  // Reports a value that the format does not allow at this place.
  bool refuse(const std::string& what) {
    switch (place_) {
      case Place::shape:
        fail("{} has {} in its shape; allowed: integers >= 0", where(), what);
      case Place::offsets:
        fail("{} has {} in its data_offsets; allowed: integers >= 0", where(), what);
      case Place::metadata:
        fail("__metadata__ has {} for {}; allowed: strings", what, key());
      case Place::entry:
        fail("{} has {} for {}", where(), what, key());
      case Place::top:
        fail("{} is {}; allowed: an object", where(), what);
      default:
        fail("the header is {}; allowed: an object", what);
    }
  }

  Place place_ = Place::start;
  std::unordered_set<std::string> names_;
  std::string key_;
  HeaderEntry entry_;
  std::array<bool, 3> seen_{};
  int offsets_ = 0;
};

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 64;
  // Whether the byte continues a UTF-8 character.
  const auto continues = [](char c) { return (c & 0xC0) == 0x80; };
  size_t length = std::min(text.size(), kLongest);
  while (length > 0 && length < text.size() && continues(text[length])) --length;
  std::string out = "\"";
  for (const char c : text.substr(0, length)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (text.size() > length ? "\"..." : "\"");
}

Header parse_header(std::string_view text) {
  // The parser would treat a NUL as the end of its input.
  if (const size_t nul = text.find('\0'); nul != text.npos) {
    throw SafetensorsError(fmt::format("the header is not JSON (byte {} of it)", nul + 1));
  }
  HeaderReader reader;
  json::sax_parse(text.begin(), text.end(), &reader);
  return std::move(reader.header);
}

}  // namespace logitless::cli
