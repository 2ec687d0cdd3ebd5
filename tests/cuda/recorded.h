// SPDX-License-Identifier: Apache-2.0
// A fake machine with CUDA devices, a driver and cuBLASLt, which answer as a test says and run
// nothing. It counts the calls of its functions (questions), reports which of CUDA's rules a launch
// or a tensor map breaks, and can make any one question fail. It allocates nothing.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "src/cuda/runtime/api.h"
#include "src/cuda/runtime/cublaslt.h"
#include "src/cuda/runtime/driver.h"

namespace logitless::cuda {

class RecordedCuda {
 public:
  struct Device {
    const char* name;
    int major, minor;
    bool answers = true;
    int multiprocessors = 132;
    size_t shared_bytes = 232448;
  };

  // Is called for each launch, with its arguments, in order. Its return values replace the objects
  // that a real machine would create.
  struct Listener {
    virtual ~Listener() = default;
    virtual void launch(const cudaLaunchConfig_t& config, const void* kernel, void** values,
                        const Parameter* parameters, int count) = 0;
    virtual void copy(void* to, const void* from, size_t bytes) = 0;
    struct Map {
      CUtensorMapDataType type;
      cuuint32_t rank;
      void* data;
      const cuuint64_t *sizes, *strides;
      const cuuint32_t* box;
      CUtensorMapSwizzle swizzle;
      CUtensorMapL2promotion promotion;
      CUtensorMapFloatOOBfill fill;
    };
    virtual void encode(const Map& from, CUtensorMap* map) = 0;
    virtual void* layout(int type, uint64_t rows, uint64_t columns, int64_t stride) = 0;
    virtual void* description(int compute_type, int scale_type) = 0;
    virtual void* preference() = 0;
    virtual void set(void* object, int attribute, const void* value, size_t bytes) = 0;
    struct Operands {
      void *description, *a, *b, *c, *d;
    };
    virtual void choose(const Operands&, void* preference, lt::Algorithm*) = 0;
    virtual void multiply(const Operands&, std::array<const void*, 6> alpha_a_b_beta_c_d,
                          const lt::Algorithm&, void* workspace, size_t bytes) = 0;
  };
  Listener* listener = nullptr;

  // Replaces CUDA until destroyed; only one may exist at a time.
  explicit RecordedCuda(std::vector<Device> devices) : devices_(std::move(devices)) {
    self = this;
    replace_api(&table);
  }
  ~RecordedCuda() {
    replace_api(nullptr);
    self = nullptr;
  }
  RecordedCuda(const RecordedCuda&) = delete;
  RecordedCuda& operator=(const RecordedCuda&) = delete;

  // The machine's properties, which a test may change at any time.
  int driver_version = 13000;  // 0: no driver
  std::vector<std::string_view> libraries{"libcuda.so.1", "libcublasLt.so.13"};
  std::vector<std::string_view> lacking;  // functions missing in the first library used
  std::string_view lacking_library;       // the library that lacks them; "": all
  int failing_creates = 0;                // calls of cublasLtCreate that fail from now on
  int most_launches = std::numeric_limits<int>::max();  // the next launch fails
  // The kernels that cuBLASLt proposes, in order, and the code it returns: `split` where it may
  // split the depth, otherwise `unsplit`.
  struct Proposal {
    int32_t tile = 0, parts = 0;
    size_t workspace_bytes = 0;
    int state = lt::success;
  };
  struct Proposals {
    std::vector<Proposal> all{{}};
    int code = lt::success;
  };
  Proposals unsplit, split;
  bool serves_others = true;  // whether cuBLASLt accepts an algorithm for another product
  std::vector<Device>& devices() { return devices_; }

  // Makes the n-th query from now on fail, counted from 1; 0: none.
  void fail_question(int n) {
    asked_ = 0;
    failing_ = n;
    failed_ = nullptr;
  }
  const char* failed() const { return failed_; }  // nullptr if fewer were asked
  int launches_before_failure() const { return launches_before_failure_; }
  // Returns a question, not in `expected`, that was asked more often since the first launch than
  // before it, so that it may not have been asked before; or "".
  template <class Set>
  std::string first_asked_late(const Set& expected) const {
    for (const Question& q : questions_) {
      if (q.what != nullptr && q.late > q.early && !expected.contains(q.what)) return q.what;
    }
    return "";
  }

  int launches() const { return launches_; }  // kernels, copies and products
  int heuristics() const { return heuristics_; }
  // The kernel and memory with which the last product was launched.
  struct Multiplied {
    int32_t tile = 0, parts = 0;
    void* memory = nullptr;
    size_t bytes = 0;
  };
  const Multiplied& multiplied() const { return multiplied_; }
  int split_products() const { return split_products_; }  // launched so far
  int opened() const { return opened_; }                  // minus those closed
  // Descriptions of cuBLASLt that were created and not destroyed.
  int live() const { return live_; }
  int current() const { return current_; }
  void set_current(int device) { current_ = device; }
  cudaError_t last_error() const { return last_error_; }
  // The first rule broken, or "".
  const char* fault() const { return fault_; }

 private:
  static inline RecordedCuda* self = nullptr;

  static bool fails(const char* what) {
    for (Question& q : self->questions_) {
      if (q.what != nullptr && std::strcmp(q.what, what) != 0) continue;
      q.what = what;
      ++(self->launches_ == 0 ? q.early : q.late);
      break;
    }
    if (++self->asked_ != self->failing_) return false;
    self->failed_ = what;
    self->launches_before_failure_ = self->launches_;
    return true;
  }
  static cudaError_t report(cudaError_t code) {
    if (code != cudaSuccess) self->last_error_ = code;
    return code;
  }
  template <class... Arguments>
  static void fault(const char* format, Arguments... arguments) {
    if (self->fault_[0] == 0) std::snprintf(self->fault_, sizeof(fault_), format, arguments...);
  }
#define LOGITLESS_ASKED(name) \
  if (fails(name)) return report(cudaErrorUnknown)

  static cudaError_t get_driver_version(int* version) {
    LOGITLESS_ASKED("cudaDriverGetVersion");
    *version = self->driver_version;
    return cudaSuccess;
  }
  static cudaError_t get_device_count(int* count) {
    LOGITLESS_ASKED("cudaGetDeviceCount");
    if (self->driver_version < CUDART_VERSION / 1000 * 1000) {
      return report(cudaErrorInsufficientDriver);
    }
    *count = static_cast<int>(self->devices_.size());
    return cudaSuccess;
  }
  static cudaError_t get_properties(cudaDeviceProp* p, int device) {
    LOGITLESS_ASKED("cudaGetDeviceProperties");
    const Device& d = self->devices_.at(static_cast<size_t>(device));
    if (!d.answers) return report(cudaErrorDevicesUnavailable);
    std::memset(p, 0, sizeof(*p));
    std::snprintf(p->name, sizeof(p->name), "%s", d.name);
    p->major = d.major;
    p->minor = d.minor;
    p->multiProcessorCount = d.multiprocessors;
    p->sharedMemPerBlockOptin = d.shared_bytes;
    return cudaSuccess;
  }
  static cudaError_t get_current(int* device) {
    LOGITLESS_ASKED("cudaGetDevice");
    *device = self->current_;
    return cudaSuccess;
  }
  static cudaError_t make_current(int device) {
    LOGITLESS_ASKED("cudaSetDevice");
    self->bound_ = true;
    self->current_ = device;
    return cudaSuccess;
  }
  static cudaError_t take_error() {
    const cudaError_t code = self->last_error_;
    self->last_error_ = cudaSuccess;
    return code;
  }
  // A kernel is its own function here.
  static cudaError_t function_of(cudaFunction_t* function, const void* kernel) {
    LOGITLESS_ASKED("cudaGetFuncBySymbol");
    self->bound_ = true;
    *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(kernel));
    return cudaSuccess;
  }
  static cudaError_t attributes_of(cudaFuncAttributes* attributes, const void*) {
    LOGITLESS_ASKED("cudaFuncGetAttributes");
    self->bound_ = true;
    *attributes = {};
    const Device& d = self->devices_.at(static_cast<size_t>(self->current_));
    attributes->ptxVersion = attributes->binaryVersion = 10 * d.major + d.minor;
    return cudaSuccess;
  }
  static cudaError_t launch(const cudaLaunchConfig_t* c, const void* kernel, void** values,
                            const Parameter* parameters, int count) {
    LOGITLESS_ASKED("cudaLaunchKernelExC");
    if (self->launches_ >= self->most_launches) return report(cudaErrorUnknown);
    self->bound_ = true;
    ++self->launches_;
    if (self->listener != nullptr) self->listener->launch(*c, kernel, values, parameters, count);
    const Device& d = self->devices_.at(static_cast<size_t>(self->current_));
    const auto threads = c->blockDim.x * c->blockDim.y * c->blockDim.z;
    if (threads == 0 || threads > 1024) fault("a block of %u threads", threads);
    const dim3 grid = c->gridDim;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 ||
        grid.z > 65535) {
      fault("a grid of %u x %u x %u", grid.x, grid.y, grid.z);
    }
    if (c->dynamicSmemBytes > d.shared_bytes) fault("%zu bytes shared", c->dynamicSmemBytes);
    if (c->dynamicSmemBytes > size_t{48} << 10 &&
        c->dynamicSmemBytes > static_cast<size_t>(*allowed(kernel))) {
      fault("%zu bytes shared that were not allowed", c->dynamicSmemBytes);
    }
    for (unsigned i = 0; i < c->numAttrs; ++i) {
      if (d.major < 9) fault("a launch attribute below sm_90");
      if (c->attrs[i].id == cudaLaunchAttributeClusterDimension &&
          grid.x % c->attrs[i].val.clusterDim.x != 0) {
        fault("a grid of %u in clusters of %u", grid.x, c->attrs[i].val.clusterDim.x);
      }
    }
    return cudaSuccess;
  }
  static cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    LOGITLESS_ASKED("cudaMemcpyAsync");
    if (self->launches_ >= self->most_launches) return report(cudaErrorUnknown);
    self->bound_ = true;
    ++self->launches_;
    if (self->listener != nullptr) self->listener->copy(to, from, bytes);
    return cudaSuccess;
  }
#undef LOGITLESS_ASKED

  // Functions of the loader.

  struct Symbol {
    std::string_view name;
    void* function;
  };

  static void* open(const char* name, int) {
    if (fails("dlopen")) return nullptr;
    const auto found = std::find(self->libraries.begin(), self->libraries.end(), name);
    if (found == self->libraries.end()) return nullptr;
    ++self->opened_;
    return const_cast<char*>(found->data());
  }
  static int close(void*) {
    --self->opened_;
    return 0;
  }
  static void* find_symbol(void* library, const char* name) {
    if (fails("dlsym")) return nullptr;
    const bool from =
        self->lacking_library.empty() || self->lacking_library == static_cast<char*>(library);
    if (from &&
        std::find(self->lacking.begin(), self->lacking.end(), name) != self->lacking.end()) {
      return nullptr;
    }
    for (const auto& [symbol, function] : symbols()) {
      if (symbol == name) return function;
    }
    return nullptr;
  }

  // Functions of the driver.

#define LOGITLESS_ASKED(name) \
  if (fails(name)) return CUDA_ERROR_UNKNOWN
  static CUresult get_attribute(int* value, CUfunction_attribute a, CUfunction f) {
    LOGITLESS_ASKED("cuFuncGetAttribute");
    *value = a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? *allowed(f) : 0;
    return CUDA_SUCCESS;
  }
  static CUresult set_attribute(CUfunction f, CUfunction_attribute a, int value) {
    LOGITLESS_ASKED("cuFuncSetAttribute");
    if (a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) *allowed(f) = value;
    return CUDA_SUCCESS;
  }
  static CUresult context_id(CUcontext, unsigned long long* id) {
    LOGITLESS_ASKED("cuCtxGetId");
    if (!self->bound_) return CUDA_ERROR_INVALID_CONTEXT;
    *id = self->context_ + static_cast<unsigned>(self->current_);
    return CUDA_SUCCESS;
  }
  static CUresult current_context(CUcontext* context) {
    LOGITLESS_ASKED("cuCtxGetCurrent");
    *context = self->bound_ ? reinterpret_cast<CUcontext>(self) : nullptr;
    return CUDA_SUCCESS;
  }
  static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                         const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                         const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                         CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    LOGITLESS_ASKED("cuTensorMapEncodeTiled");
    if (!self->bound_) return CUDA_ERROR_INVALID_CONTEXT;
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) fault("a tensor map at %p", data);
    if (box[0] * 2 > 128) fault("a box of %u wide", box[0]);
    for (cuuint32_t i = 0; i < rank; ++i) {
      if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32) fault("a tensor map's extent");
      if (box[i] == 0 || box[i] > 256 || steps[i] != 1) fault("a box of %u", box[i]);
      if (i + 1 < rank && (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40)) {
        fault("a tensor map's stride");
      }
    }
    std::memset(map, 1, sizeof(*map));
    if (self->listener != nullptr) {
      self->listener->encode({type, rank, data, sizes, strides, box, swizzle, promotion, fill},
                             map);
    }
    return CUDA_SUCCESS;
  }
  static CUresult module_of(CUmodule* module, CUfunction f) {
    LOGITLESS_ASKED("cuFuncGetModule");
    *module = reinterpret_cast<CUmodule>(f);
    return CUDA_SUCCESS;
  }
  static CUresult count_functions(unsigned* count, CUmodule) {
    LOGITLESS_ASKED("cuModuleGetFunctionCount");
    *count = 3;
    return CUDA_SUCCESS;
  }
  static CUresult enumerate_functions(CUfunction* functions, unsigned count, CUmodule module) {
    LOGITLESS_ASKED("cuModuleEnumerateFunctions");
    std::fill_n(functions, count, reinterpret_cast<CUfunction>(module));
    return CUDA_SUCCESS;
  }
  static CUresult load_function(CUfunction) {
    LOGITLESS_ASKED("cuFuncLoad");
    return CUDA_SUCCESS;
  }
#undef LOGITLESS_ASKED

  // Functions of cuBLASLt.

#define LOGITLESS_ASKED(name) \
  if (fails(name)) return 14  // CUBLAS_STATUS_INTERNAL_ERROR
  static int create(lt::Handle* handle) {
    LOGITLESS_ASKED("cublasLtCreate");
    if (self->failing_creates > 0) {
      --self->failing_creates;
      return 3;
    }
    *handle = self;
    return 0;
  }
  static size_t version() { return 130100; }
  // Stores the object that f(listener) returns, or a placeholder without a listener.
  template <class F>
  static int make(void** object, F&& f) {
    ++self->live_;
    *object = self->listener != nullptr ? f(*self->listener) : self;
    return 0;
  }
  static int set(void* object, int attribute, const void* value, size_t bytes) {
    if (self->listener != nullptr) self->listener->set(object, attribute, value, bytes);
    return 0;
  }
  static int destroy(void*) {
    --self->live_;
    return 0;
  }
  static int layout_create(lt::Layout* l, int type, uint64_t rows, uint64_t columns,
                           int64_t stride) {
    LOGITLESS_ASKED("cublasLtMatrixLayoutCreate");
    return make(l, [&](Listener& one) { return one.layout(type, rows, columns, stride); });
  }
  static int description_create(lt::Description* d, int compute_type, int scale_type) {
    LOGITLESS_ASKED("cublasLtMatmulDescCreate");
    return make(d, [&](Listener& one) { return one.description(compute_type, scale_type); });
  }
  static int description_set(lt::Description d, int attribute, const void* value, size_t bytes) {
    LOGITLESS_ASKED("cublasLtMatmulDescSetAttribute");
    return set(d, attribute, value, bytes);
  }
  static int preference_create(lt::Preference* p) {
    LOGITLESS_ASKED("cublasLtMatmulPreferenceCreate");
    self->may_split_ = false;
    self->may_use_ = 0;
    return make(p, [](Listener& one) { return one.preference(); });
  }
  static int preference_set(lt::Preference p, int attribute, const void* value, size_t bytes) {
    LOGITLESS_ASKED("cublasLtMatmulPreferenceSetAttribute");
    if (attribute == lt::preference_reduction_mask) {
      self->may_split_ = *static_cast<const uint32_t*>(value) == lt::reduction_in_compute_type;
    } else if (attribute == lt::preference_workspace_bytes) {
      self->may_use_ = *static_cast<const uint64_t*>(value);
    }
    return set(p, attribute, value, bytes);
  }
  static int heuristic(lt::Handle, lt::Description description, lt::Layout a, lt::Layout b,
                       lt::Layout c, lt::Layout d, lt::Preference preference, int most,
                       lt::HeuristicResult* results, int* found) {
    LOGITLESS_ASKED("cublasLtMatmulAlgoGetHeuristic");
    ++self->heuristics_;
    const Proposals& proposals = self->may_split_ ? self->split : self->unsplit;
    *found = 0;
    for (const Proposal& p : proposals.all) {
      if (*found == most || p.workspace_bytes > self->may_use_) continue;
      lt::HeuristicResult& result = results[(*found)++];
      result = {};
      result.workspace_bytes = p.workspace_bytes;
      result.state = p.state;
      result.algorithm.data[tile_at] = static_cast<uint64_t>(p.tile);
      result.algorithm.data[parts_at] = static_cast<uint64_t>(p.parts);
    }
    if (self->listener != nullptr) {
      self->listener->choose({description, a, b, c, d}, preference, &results[0].algorithm);
    }
    return proposals.code;
  }
  static int check(lt::Handle, lt::Description, lt::Layout, lt::Layout, lt::Layout, lt::Layout,
                   const lt::Algorithm*, lt::HeuristicResult*) {
    LOGITLESS_ASKED("cublasLtMatmulAlgoCheck");
    return self->serves_others ? 0 : lt::not_supported;
  }
  static int algorithm_get(const lt::Algorithm* algorithm, int attribute, void* value, size_t bytes,
                           size_t* written) {
    LOGITLESS_ASKED("cublasLtMatmulAlgoConfigGetAttribute");
    const auto number =
        static_cast<int32_t>(algorithm->data[attribute == lt::algorithm_tile ? tile_at : parts_at]);
    if (bytes != sizeof(number)) fault("an attribute of %zu bytes", bytes);
    std::memcpy(value, &number, sizeof(number));
    *written = sizeof(number);
    return 0;
  }
  static int multiply(lt::Handle, lt::Description description, const void* alpha, const void* a,
                      lt::Layout of_a, const void* b, lt::Layout of_b, const void* beta,
                      const void* c, lt::Layout of_c, void* d, lt::Layout of_d,
                      const lt::Algorithm* algorithm, void* workspace, size_t bytes, cudaStream_t) {
    LOGITLESS_ASKED("cublasLtMatmul");
    if (self->launches_ >= self->most_launches) return 14;
    ++self->launches_;
    self->multiplied_ = {static_cast<int32_t>(algorithm->data[tile_at]),
                         static_cast<int32_t>(algorithm->data[parts_at]), workspace, bytes};
    self->split_products_ += self->multiplied_.parts > 1;
    if (self->listener != nullptr) {
      self->listener->multiply({description, of_a, of_b, of_c, of_d}, {alpha, a, b, beta, c, d},
                               *algorithm, workspace, bytes);
    }
    return 0;
  }
#undef LOGITLESS_ASKED

  static const std::array<Symbol, 23>& symbols() {
    const auto address = [](auto* function) { return reinterpret_cast<void*>(function); };
    static const std::array<Symbol, 23> all{
        Symbol{"cuFuncGetAttribute", address(get_attribute)},
        Symbol{"cuFuncSetAttribute", address(set_attribute)},
        Symbol{"cuCtxGetId", address(context_id)},
        Symbol{"cuCtxGetCurrent", address(current_context)},
        Symbol{"cuTensorMapEncodeTiled", address(encode)},
        Symbol{"cuFuncGetModule", address(module_of)},
        Symbol{"cuModuleGetFunctionCount", address(count_functions)},
        Symbol{"cuModuleEnumerateFunctions", address(enumerate_functions)},
        Symbol{"cuFuncLoad", address(load_function)},
        Symbol{"cublasLtCreate", address(create)},
        Symbol{"cublasLtGetVersion", address(version)},
        Symbol{"cublasLtMatrixLayoutCreate", address(layout_create)},
        Symbol{"cublasLtMatrixLayoutDestroy", address(destroy)},
        Symbol{"cublasLtMatmulDescCreate", address(description_create)},
        Symbol{"cublasLtMatmulDescDestroy", address(destroy)},
        Symbol{"cublasLtMatmulDescSetAttribute", address(description_set)},
        Symbol{"cublasLtMatmulPreferenceCreate", address(preference_create)},
        Symbol{"cublasLtMatmulPreferenceDestroy", address(destroy)},
        Symbol{"cublasLtMatmulPreferenceSetAttribute", address(preference_set)},
        Symbol{"cublasLtMatmulAlgoGetHeuristic", address(heuristic)},
        Symbol{"cublasLtMatmulAlgoCheck", address(check)},
        Symbol{"cublasLtMatmulAlgoConfigGetAttribute", address(algorithm_get)},
        Symbol{"cublasLtMatmul", address(multiply)}};
    return all;
  }

  // The bytes of shared memory that were allowed for a kernel.
  static int* allowed(const void* kernel) {
    for (auto& [known, bytes] : self->allowed_) {
      if (known == nullptr) known = kernel;
      if (known == kernel) return &bytes;
    }
    fault("more kernels than are counted");
    return &self->allowed_[0].second;
  }

  static constexpr Api table{.driver_version = get_driver_version,
                             .device_count = get_device_count,
                             .device_properties = get_properties,
                             .current_device = get_current,
                             .set_device = make_current,
                             .take_error = take_error,
                             .function = function_of,
                             .attributes = attributes_of,
                             .launch = launch,
                             .copy = copy,
                             .open = open,
                             .symbol = find_symbol,
                             .close = close};
  // Each machine has ids of its own, because the driver never gives an id twice.
  static inline unsigned long long next_context = 1ull << 60;

  std::vector<Device> devices_;
  const unsigned long long context_ = next_context += 1 << 20;
  int asked_ = 0, failing_ = 0, launches_ = 0, heuristics_ = 0, opened_ = 0, live_ = 0,
      current_ = 0;
  const char* failed_ = nullptr;
  // Whether the thread has a context. Only calls of the runtime create one, and the driver's
  // functions need one.
  bool bound_ = false;
  int launches_before_failure_ = 0;
  // What the current preference allows.
  bool may_split_ = false;
  uint64_t may_use_ = 0;
  // Where an algorithm's words hold its attributes; listeners do not use these words.
  static constexpr int tile_at = 6, parts_at = 7;
  Multiplied multiplied_;
  int split_products_ = 0;
  struct Question {
    const char* what = nullptr;
    int early = 0, late = 0;  // how often asked before and since the first launch
  };
  Question questions_[64];
  cudaError_t last_error_ = cudaSuccess;
  char fault_[128] = {};
  std::array<std::pair<const void*, int>, 256> allowed_{};
};

}  // namespace logitless::cuda
