// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/runtime/blas.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <mutex>

#include "src/cuda/ops.h"
#include "src/cuda/runtime/cublaslt.h"
#include "src/cuda/runtime/remembered.h"
#include "src/rounding.h"

namespace logitless::cuda {
namespace {

constexpr const char* names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

struct Key {
  int device, in, out, tf32;
  int64_t rows, columns, depth, a_row, a_column, b_row, b_column, c, parts_bytes;
  uint32_t a_alignment, b_alignment, c_alignment;
  bool operator==(const Key&) const = default;
};
struct Choice {
  Key key;
  lt::Algorithm algorithm;
};

constexpr int most_devices = 64;
// cuBLASLt, loaded until the process ends, and its cached answers.
struct Library {
  lt::Functions call{};
  std::mutex mutex;
  std::array<lt::Handle, most_devices> handles{};  // one for each device
  std::array<Choice, 64> choices;
  size_t chosen = 0;
};

Remembered<Library>& remembered_library() {
  static auto& library = *new Remembered<Library>;
  return library;
}

// Returns the name of the first function that the library lacks, or nullptr.
const char* find_functions(void* library, lt::Functions* f) {
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    void* symbol = api().symbol(library, name);
    if (symbol == nullptr && missing == nullptr) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find(f->create, "cublasLtCreate");
  find(f->version, "cublasLtGetVersion");
  find(f->layout_create, "cublasLtMatrixLayoutCreate");
  find(f->layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(f->description_create, "cublasLtMatmulDescCreate");
  find(f->description_destroy, "cublasLtMatmulDescDestroy");
  find(f->description_set, "cublasLtMatmulDescSetAttribute");
  find(f->preference_create, "cublasLtMatmulPreferenceCreate");
  find(f->preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(f->preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(f->heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(f->check, "cublasLtMatmulAlgoCheck");
  find(f->algorithm_get, "cublasLtMatmulAlgoConfigGetAttribute");
  find(f->multiply, "cublasLtMatmul");
  return missing;
}

// Prefers a copy that the process already uses: two copies would cost half a gigabyte.
Status load_library(Library* loaded) {
  Status status =
      error(StatusCode::backend_unavailable,
            "cuda: the linear ops need cuBLASLt; neither %s nor %s was found", names[0], names[1]);
  for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* name : names) {
      void* library = api().open(name, mode);
      if (library == nullptr) continue;
      const char* missing = find_functions(library, &loaded->call);
      if (missing == nullptr) return {};
      status = error(StatusCode::backend_unavailable, "cuda: %s has no function %s", name, missing);
      (void)api().close(library);
    }
  }
  return status;
}

Status find_library(Library** library) { return remembered_library().get(library, load_library); }

Status handle_of(const DeviceInfo& device, Library* library, lt::Handle* handle) {
  if (device.index >= most_devices) {
    return error(StatusCode::not_supported, "execution.device.index is %d; allowed: 0 to %d",
                 device.index, most_devices - 1);
  }
  const std::lock_guard lock(library->mutex);
  lt::Handle& own = library->handles[device.index];
  if (own == nullptr) {
    const int code = library->call.create(&own);
    if (code != lt::success) {
      own = nullptr;
      return error(StatusCode::device_error, "cuda: cublasLtCreate returned %d", code);
    }
  }
  *handle = own;
  return {};
}

int type_of(DType dtype) {
  return dtype == DType::f32 ? lt::type_f32 : dtype == DType::f16 ? lt::type_f16 : lt::type_bf16;
}

// cuBLASLt's description of a product, which is column-major:
//   c' [columns, rows] = b' [columns, depth] a' [depth, rows].
class Descriptors {
 public:
  Descriptors(const lt::Functions& call, const Product& p) : call_(call) {
    const int in = type_of(p.in), out = type_of(p.out);
    const int compute = p.in == DType::f32 && p.tf32 ? lt::compute_tf32 : lt::compute_f32;
    expect(call.description_create(&description, compute, lt::type_f32));
    const bool b_along = p.b.column_stride == 1, a_along = p.a.column_stride == 1;
    set(lt::description_pointer_mode, lt::pointers_on_device);
    set(lt::description_transpose_a, b_along ? 0 : 1);
    set(lt::description_transpose_b, a_along ? 0 : 1);
    layout(&first, in, b_along ? p.columns : p.depth, b_along ? p.depth : p.columns,
           b_along ? p.b.row_stride : p.b.column_stride);
    layout(&second, in, a_along ? p.depth : p.rows, a_along ? p.rows : p.depth,
           a_along ? p.a.row_stride : p.a.column_stride);
    layout(&result, out, p.columns, p.rows, p.c_stride);
  }
  ~Descriptors() {
    for (const lt::Layout l : {first, second, result}) {
      if (l != nullptr) call_.layout_destroy(l);
    }
    if (description != nullptr) call_.description_destroy(description);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  bool ok() const { return ok_; }
  lt::Description description = nullptr;
  lt::Layout first = nullptr, second = nullptr, result = nullptr;

 private:
  void expect(int code) { ok_ = ok_ && code == lt::success; }
  void set(int attribute, int32_t value) {
    if (ok_) expect(call_.description_set(description, attribute, &value, sizeof(value)));
  }
  void layout(lt::Layout* l, int type, int64_t rows, int64_t columns, int64_t stride) {
    // A matrix of one column may have any stride; cuBLASLt requires at least its rows.
    if (ok_) expect(call_.layout_create(l, type, rows, columns, std::max(stride, rows)));
  }
  const lt::Functions& call_;
  bool ok_ = true;
};

// The alignment of an address and a stride, up to 16 bytes: calls whose tensors are aligned alike
// up to there take the same algorithm, and give the same bits.
uint32_t alignment_of(const void* data, int64_t stride, DType dtype) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(stride * size_of(dtype)) | 16;
  return static_cast<uint32_t>(bits & ~(bits - 1));
}

Key key_of(const Product& p, int device) {
  const int64_t a_stride = p.a.column_stride == 1 ? p.a.row_stride : p.a.column_stride;
  const int64_t b_stride = p.b.column_stride == 1 ? p.b.row_stride : p.b.column_stride;
  return {device,
          static_cast<int>(p.in),
          static_cast<int>(p.out),
          p.tf32,
          p.rows,
          p.columns,
          p.depth,
          p.a.row_stride,
          p.a.column_stride,
          p.b.row_stride,
          p.b.column_stride,
          p.c_stride,
          p.parts_bytes,
          alignment_of(p.a.data, a_stride, p.in),
          alignment_of(p.b.data, b_stride, p.in),
          alignment_of(p.c, p.c_stride, p.out)};
}

// The kernels that cuBLASLt proposes, in its order of preference.
struct Proposals {
  static constexpr int most = 8;
  lt::HeuristicResult results[most];
  int found = 0;
  bool ok;  // cuBLASLt has answered, even if with no kernel

  Proposals(const lt::Functions& call, lt::Handle handle, const Descriptors& d, const Key& key,
            uint32_t reductions, int64_t workspace_bytes) {
    lt::Preference preference = nullptr;
    ok = d.ok() && call.preference_create(&preference) == lt::success;
    const auto set = [&](int attribute, auto value) {
      ok = ok && call.preference_set(preference, attribute, &value, sizeof(value)) == lt::success;
    };
    set(lt::preference_workspace_bytes, static_cast<uint64_t>(workspace_bytes));
    set(lt::preference_reduction_mask, reductions);
    set(lt::preference_alignment_a, key.b_alignment);
    set(lt::preference_alignment_b, key.a_alignment);
    set(lt::preference_alignment_c, key.c_alignment);
    set(lt::preference_alignment_d, key.c_alignment);
    const int code = !ok ? lt::success
                         : call.heuristic(handle, d.description, d.first, d.second, d.result,
                                          d.result, preference, most, results, &found);
    if (preference != nullptr) call.preference_destroy(preference);
    ok = ok && (code == lt::success || code == lt::not_supported);
    if (!ok || code != lt::success) found = 0;
  }
};

int32_t attribute_of(const lt::Functions& call, const lt::Algorithm& algorithm, int attribute,
                     int32_t otherwise) {
  int32_t value = 0;
  size_t written = 0;
  const int code = call.algorithm_get(&algorithm, attribute, &value, sizeof(value), &written);
  return code == lt::success ? value : otherwise;
}

// The number of tiles of 256 x 128 or 128 x 256 on the busiest multiprocessor; 0 for other tiles.
int64_t large_rounds(const Product& p, int32_t tile, int multiprocessors) {
  const auto rounds = [&](int64_t columns, int64_t rows) {
    return divide_up(divide_up(p.columns, columns) * divide_up(p.rows, rows), multiprocessors);
  };
  if (tile == lt::tile_128x256) return rounds(128, 256);
  return tile == lt::tile_256x128 ? rounds(256, 128) : 0;
}

// Chooses among proposals that do not split the depth. In f32 cuBLASLt prefers tiles of 256 x 128,
// but those of 128 x 128, in at most twice as many rounds, take 7 % less time if there are few
// rounds (docs/kernels/cuda.md).
const lt::Algorithm* choose_unsplit(const lt::Functions& call, const Proposals& proposals,
                                    const Product& p, int multiprocessors) {
  const lt::Algorithm* best = nullptr;
  for (int i = 0; i < proposals.found; ++i) {
    const auto& [algorithm, bytes, state, waves, reserved] = proposals.results[i];
    if (state != lt::success) continue;
    if (attribute_of(call, algorithm, lt::algorithm_split, 1) > 1) continue;
    const int32_t tile = attribute_of(call, algorithm, lt::algorithm_tile, 0);
    if (best == nullptr) {
      best = &algorithm;
      constexpr int64_t few = 2;
      const int64_t rounds = large_rounds(p, tile, multiprocessors);
      if (p.in != DType::f32 || p.tf32 || rounds == 0 || rounds > few) return best;
    } else if (tile == lt::tile_128x128) {
      return &algorithm;
    }
  }
  return best;
}

Status ask_heuristic(const lt::Functions& call, lt::Handle handle, const Product& p, const Key& key,
                     int multiprocessors, lt::Algorithm* algorithm) {
  const Descriptors d(call, p);
  const auto failed = [&] {
    return error(StatusCode::device_error,
                 "cuda: cuBLASLt has no product [%lld, %lld] x [%lld, %lld] of these types",
                 static_cast<long long>(p.rows), static_cast<long long>(p.depth),
                 static_cast<long long>(p.depth), static_cast<long long>(p.columns));
  };
  if (p.parts_bytes > 0) {
    // cuBLASLt considers splitting if it may use this many bytes, however many it then uses.
    constexpr int64_t thinks_from = int64_t{32} << 20;
    const Proposals proposals(call, handle, d, key, lt::reduction_in_compute_type, thinks_from);
    if (!proposals.ok) return failed();
    const auto& best = proposals.results[0];
    if (proposals.found > 0 && best.state == lt::success &&
        best.workspace_bytes <= static_cast<size_t>(p.parts_bytes) &&
        attribute_of(call, best.algorithm, lt::algorithm_split, 1) > 1) {
      *algorithm = best.algorithm;
      return {};
    }
  }
  const Proposals proposals(call, handle, d, key, 0, matrix_library_bytes);
  if (const auto* chosen = choose_unsplit(call, proposals, p, multiprocessors)) {
    *algorithm = *chosen;
    return {};
  }
  return failed();
}

// cuBLASLt's choice for the largest product of its kind, cached because asking takes longer than
// launching.
Status choose(Library* library, lt::Handle handle, const Product& largest, const DeviceInfo& device,
              lt::Algorithm* algorithm) {
  const Key key = key_of(largest, device.index);
  auto& choices = library->choices;
  const std::lock_guard lock(library->mutex);
  for (size_t i = 0; i < std::min(library->chosen, choices.size()); ++i) {
    if (choices[i].key == key) {
      *algorithm = choices[i].algorithm;
      return {};
    }
  }
  const Status status =
      ask_heuristic(library->call, handle, largest, key, device.multiprocessors, algorithm);
  if (status.ok()) choices[library->chosen++ % choices.size()] = {key, *algorithm};
  return status;
}

// Takes the algorithm of the largest product if it can run this product too.
Status choose_for(const Product& p, const Descriptors& d, Library* library, lt::Handle handle,
                  const DeviceInfo& device, lt::Algorithm* algorithm) {
  Product largest = p;
  largest.rows = std::max(p.rows, p.most_rows);
  largest.columns = std::max(p.columns, p.most_columns);
  const Status status = choose(library, handle, largest, device, algorithm);
  lt::HeuristicResult checked;
  if (!status.ok() || library->call.check(handle, d.description, d.first, d.second, d.result,
                                          d.result, algorithm, &checked) == lt::success) {
    return status;
  }
  return choose(library, handle, p, device, algorithm);
}

}  // namespace

void multiply(const Product& p, const DeviceInfo& device, void* library_memory, Stream* stream) {
  if (!stream->ok() || p.rows == 0 || p.columns == 0) return;
  Library* library;
  lt::Handle handle = nullptr;
  Status status = find_library(&library);
  if (status.ok()) status = handle_of(device, library, &handle);
  if (!status.ok()) return stream->fail(status);
  const Descriptors d(library->call, p);
  if (!d.ok()) {
    return stream->fail(error(StatusCode::internal, "cuda: cuBLASLt refused a layout"));
  }
  const auto algorithm = stream->answer<lt::Algorithm>([&] {
    lt::Algorithm chosen{};
    stream->fail(choose_for(p, d, library, handle, device, &chosen));
    return chosen;
  });
  if (!stream->ok() || stream->preparing()) return;
  const bool lends = p.parts_bytes > 0;
  const auto bytes = static_cast<size_t>(lends ? p.parts_bytes : matrix_library_bytes);
  const int code = library->call.multiply(
      handle, d.description, p.alpha, p.b.data, d.first, p.a.data, d.second, p.beta, p.c, d.result,
      p.c, d.result, &algorithm, lends ? p.parts : library_memory, bytes, stream->get());
  if (code != lt::success) {
    stream->fail(error(StatusCode::device_error, "cuda: cublasLtMatmul returned %d", code));
  }
}

bool serves_product(const TensorView& v) {
  const int64_t size = size_of(v.dtype), rows = v.shape[0], columns = v.shape[1];
  const bool along = v.stride[1] == 1 || columns == 1, across = v.stride[0] == 1 || rows == 1;
  const int64_t stride = along ? v.stride[0] : v.stride[1];
  const int64_t length = along ? columns : rows;
  return (along || across) && stride >= length && stride * size % 16 == 0 &&
         length * size % 16 == 0;
}

Status find_matrix_library() {
  Library* library;
  return find_library(&library);
}

Status warmup_matrix_library(const DeviceInfo& device) {
  Library* library;
  lt::Handle handle = nullptr;
  const Status status = find_library(&library);
  return status.ok() ? handle_of(device, library, &handle) : status;
}

Status describe_matrix_library(char* text, size_t bytes) {
  Library* library;
  const Status status = find_library(&library);
  if (!status.ok()) {
    std::snprintf(text, bytes, "%s", status.message());
    return status;
  }
  const int version = static_cast<int>(library->call.version());
  // 13.1.0 is encoded as 130100, 12.9.5 as 120905.
  std::snprintf(text, bytes, "cuBLASLt %d.%d.%d", version / 10000, version / 100 % 100,
                version % 100);
  return {};
}

void forget_matrix_library() { remembered_library().forget(); }

}  // namespace logitless::cuda
