// SPDX-License-Identifier: Apache-2.0
// The declarations of XLA's foreign function interface that are used, so that building needs no
// header of it: version 0.1 (jaxlib 0.6.1), the oldest that XLA still accepts. Later minor versions
// only add. Layouts and values are documented in xla/ffi/api/c_api.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace logitless::xla {

constexpr int version_major = 0, version_minor = 1;
constexpr int extension_metadata = 1;
constexpr int stage_execute = 3;
constexpr int kind_buffer = 1;                           // kind of arguments and results
constexpr int attribute_scalar = 3, attribute_text = 4;  // kinds of attributes
constexpr int error_invalid_argument = 3, error_out_of_range = 11, error_unimplemented = 12,
              error_internal = 13, error_unavailable = 14;
constexpr int type_s32 = 4, type_s64 = 5, type_u8 = 6, type_f16 = 10, type_f32 = 11, type_f64 = 12,
              type_bf16 = 16;

struct Error;
struct Context;

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extension;
  int major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  size_t struct_size;
  Extension* extension;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* shape;
};

struct Text {
  const char* data;
  size_t size;
};

struct Scalar {
  int dtype;
  void* value;
};

struct Values {  // a call frame's arguments, or its results
  size_t struct_size;
  Extension* extension;
  int64_t size;
  int* kinds;
  void** values;
};

struct Attributes {
  size_t struct_size;
  Extension* extension;
  int64_t size;
  int* kinds;
  Text** names;
  void** values;
};

struct ErrorCreate {
  size_t struct_size;
  Extension* extension;
  const char* message;
  int code;
};

struct StreamGet {
  size_t struct_size;
  Extension* extension;
  Context* context;
  void* stream;
};

struct DeviceOrdinalGet {
  size_t struct_size;
  Extension* extension;
  Context* context;
  int32_t ordinal;
};

struct Api {
  size_t struct_size;
  Extension* extension;
  Version version;
  void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* unused_1[3];
  Error* (*stream_get)(StreamGet*);
  void* unused_2[12];
  Error* (*device_ordinal_get)(DeviceOrdinalGet*);
};

struct CallFrame {
  size_t struct_size;
  Extension* extension;
  const Api* api;
  Context* context;
  int stage;
  Values arguments, results;
  Attributes attributes;
};

}  // namespace logitless::xla
