// SPDX-License-Identifier: Apache-2.0
// Makes random calls of the C interface with one to three mistakes, none of which can undo another.
// Every call must be refused with a status and a message, without writing an output or a guard
// byte.
//   --calls 100000
//   --seed 1
#include <array>
#include <cmath>
#include <limits>
#include <set>

#include "tests/api/rejects_memory.h"
#include "tests/api/subject.h"
#include "tests/reliability/report.h"

namespace logitless::reliability {
namespace {

using testing::Subject;

// The structs of one call, valid until a mistake is made.
template <class Op>
struct Structs {
  explicit Structs(const Op& source, const Subject& subject)
      : c(source),
        execution(detail::to_c(subject.execution)),
        workspace{sizeof(workspace), 0, subject.workspace.data, subject.workspace.bytes,
                  subject.workspace.byte_offset} {
    logitless_op unused{};
    for_each_tensor(source, unused,
                    [&](const char* name, Access access, const TensorView& view, const auto*) {
                      if (view) fields.push_back({name, access});
                    });
  }
  struct Named {
    std::string name;
    Access access;
  };
  detail::COp<Op> c;
  logitless_execution execution;
  logitless_workspace_buffer workspace;
  logitless_executor executor = LOGITLESS_EXECUTOR_INIT;
  std::vector<Named> fields;  // of c.tensors, in order
};

int32_t outside(Random& random, int32_t least, int32_t most) {
  for (;;) {
    const auto value = random.below(2) == 0 ? static_cast<int32_t>(random.bits())
                                            : static_cast<int32_t>(random.between(-3, most + 3));
    if (value < least || value > most) return value;
  }
}

uint32_t bad_struct_size(Random& random) {
  const uint32_t bad[] = {0, 1, 3, 4097, UINT32_MAX, static_cast<uint32_t>(random.bits()) | 1};
  return random.pick(bad);
}

int32_t wrong_dtype(Random& random, const std::string& name) {
  const int32_t floats[] = {LOGITLESS_F32, LOGITLESS_F16, LOGITLESS_BF16};
  const int32_t integers[] = {LOGITLESS_I32, LOGITLESS_I64};
  const std::set<std::string> counted{"target", "argmax", "shard_argmax", "rank", "fault"};
  if (counted.contains(name)) return random.pick(floats);
  return name == "normalizer" ? LOGITLESS_F16 : random.pick(integers);
}

// Breaks one tensor in a way that no other tensor can make valid.
void spoil_tensor(Random& random, const std::string& name, Access access, logitless_tensor* t) {
  const int64_t sizes[] = {INT64_MAX, (int64_t{1} << 56) + 1, int64_t{1} << 61};
  const int64_t strides[] = {INT64_MAX, int64_t{1} << 62, int64_t{1} << 61};
  const int axis = t->rank == 2 ? static_cast<int>(random.below(2)) : 0;
  const auto element = std::max<int64_t>(size_of(static_cast<DType>(t->dtype)), 4);
  switch (random.below(t->rank == 0 ? 8 : 11)) {
    case 0:
      t->struct_size = bad_struct_size(random);
      return;
    case 1:
      t->reserved = outside(random, 0, 0);
      return;
    case 2:
      t->rank = outside(random, 0, 2);
      return;
    case 3:
      t->dtype = outside(random, 0, 4);
      return;
    case 4:
      t->dtype = wrong_dtype(random, name);
      return;
    case 5:
      t->device_type = outside(random, LOGITLESS_CPU, LOGITLESS_CPU);
      return;
    case 6:
      t->device_index = outside(random, 0, 0);
      return;
    case 7:
      t->byte_offset = static_cast<uint64_t>(random.between(1, element - 1)) |
                       (random.below(2) == 0 ? uint64_t{1} << 63 : 0);
      return;
    case 8:
      t->shape[axis] = random.below(2) == 0 ? -random.between(1, 9) : random.pick(sizes);
      return;
    case 9:  // output elements that overlap, or a negative stride
      t->stride[axis] = access != Access::read && t->shape[axis] > 1 && random.below(2) == 0
                            ? 0
                            : -random.between(1, 99);
      return;
    default:  // past the end of the address space
      t->stride[axis] = t->shape[axis] > 1 ? random.pick(strides) : -1;
  }
}

void spoil_options(Random& random, logitless_loss_options* o) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float inf = std::numeric_limits<float>::infinity();
  const float never[] = {nan, inf, -inf}, negative[] = {nan, inf, -inf, -1e-30f, -1, -1e30f};
  switch (random.below(12)) {
    case 0:
      o->struct_size = bad_struct_size(random);
      return;
    case 1:
      o->reduction = outside(random, 0, 2);
      return;
    case 2:
      o->out_of_range = outside(random, 0, 1);
      return;
    case 3:
      o->empty_mean = outside(random, 0, 1);
      return;
    case 4:
      o->input_kind = outside(random, 0, 1);
      return;
    case 5:
      o->label_smoothing = random.below(2) == 0 ? random.pick(negative) : 1.001f;
      return;
    case 6:
      o->z_loss = random.pick(negative);
      return;
    case 7:
      o->logit_scale = random.pick(never);
      return;
    case 8:
      o->softcap = random.pick(negative);
      return;
    case 9:
      o->temperature = random.below(2) == 0 ? random.pick(negative) : 0;
      return;
    case 10:
      o->probability_floor = random.pick(negative);
      return;
    default:
      o->vocab_total = -random.between(1, INT64_MAX);
  }
}

template <class Op>
void spoil_op(Random& random, Structs<Op>& s) {
  static const logitless_tensor foreign = LOGITLESS_TENSOR_INIT;
  switch (random.below(4)) {
    case 0:
      s.c.op.struct_size = bad_struct_size(random);
      return;
    case 1:
      s.c.op.kind = outside(random, 0, 7);
      return;
    case 2:
      s.c.op.reserved = outside(random, 0, 0);
      return;
    default:  // a field of other ops is set
      (LinearOp<Op> ? s.c.op.logits : s.c.op.input) = &foreign;
  }
}

template <class Op>
void spoil_execution(Random& random, Structs<Op>& s) {
  s.execution.executor = nullptr;
  switch (random.below(5)) {
    case 0:
      s.execution.struct_size = bad_struct_size(random);
      return;
    case 1:
      s.execution.reserved = outside(random, 0, 0);
      return;
    case 2:
      s.execution.device_type = outside(random, LOGITLESS_CPU, LOGITLESS_REFERENCE);
      return;
    case 3:
      s.execution.device_index = outside(random, 0, 0);
      return;
    default:
      s.executor.num_threads = static_cast<int32_t>(random.between(-5, 3));
      s.execution.executor = &s.executor;  // the executor has no function
  }
}

template <class Op>
void spoil_workspace(Random& random, Structs<Op>& s, const WorkspaceSize& size) {
  switch (random.below(5)) {
    case 0:
      s.workspace.struct_size = bad_struct_size(random);
      return;
    case 1:
      s.workspace.reserved = static_cast<uint32_t>(outside(random, 0, 0));
      return;
    case 2:
      s.workspace.data = nullptr;
      return;
    case 3:
      if (size.alignment < 32) return spoil_op(random, s);
      s.workspace.byte_offset = static_cast<uint64_t>(random.between(1, 31));
      return;
    default:
      if (size.minimum == 0) {
        s.workspace.data = nullptr;
      } else {
        s.workspace.bytes = static_cast<uint64_t>(random.below(static_cast<int64_t>(size.minimum)));
      }
  }
}

// Makes one mistake that only `run` can see; the rest of the call must be right.
template <class Op>
void spoil_memory(Random& random, Structs<Op>& s, Subject& subject) {
  const size_t at = random.below(s.fields.size());
  logitless_tensor& t = s.c.tensors[at];
  const int64_t element = size_of(static_cast<DType>(t.dtype));
  switch (random.below(4)) {
    case 0:
      t.data = nullptr;
      return;
    case 1:
      t.data = static_cast<char*>(t.data) + random.between(1, element - 1);
      return;
    case 2:
      for (size_t i = 0; i < s.fields.size(); ++i) {  // an output overlaps another tensor
        if (i == at || s.fields[i].access == Access::read) continue;
        // Exactly equal memory of one dtype could be a call in place, so the tensor is moved.
        s.c.tensors[i].data = static_cast<char*>(t.data) + (t.rank == 2 ? 4 : 0);
        return;
      }
      t.data = nullptr;
      return;
    default:
      if (!subject.has("target")) return spoil_workspace(random, s, subject.size);
      int64_t target =
          random.below(2) == 0 ? Subject::v + random.below(1000) : -1 - random.below(99);
      std::memcpy(subject["target"].as<char>() + 8 * random.below(Subject::n), &target, 8);
  }
}

template <class Op>
void spoil(Random& random, Structs<Op>& s, Subject& subject) {
  const int64_t kind = random.below(10);
  if (kind == 0) return spoil_memory(random, s, subject);
  const int64_t count = random.between(1, 3);
  for (int64_t i = 0; i < count; ++i) {
    switch (i == 0 ? kind : random.between(1, 9)) {
      case 1:
        spoil_op(random, s);
        break;
      case 2:
        spoil_execution(random, s);
        break;
      case 3:
        spoil_workspace(random, s, subject.size);
        break;
      case 4:
      case 5:
        if constexpr (LossOp<Op>) {
          spoil_options(random, &s.c.options);
          break;
        }
        [[fallthrough]];
      default: {
        // Takes another tensor each time, because two mistakes in one tensor may undo each other.
        const size_t at = (random.below(s.fields.size()) + i) % s.fields.size();
        if (s.c.tensors[at].struct_size != sizeof(logitless_tensor)) break;
        spoil_tensor(random, s.fields[at].name, s.fields[at].access, &s.c.tensors[at]);
      }
    }
  }
}

struct Count {
  int64_t refused = 0;
  std::set<int32_t> codes;
};

void check(const logitless_status& status, int32_t returned, uint64_t call, Count* count) {
  if (returned == LOGITLESS_OK) broken("malformed call %" PRIu64 " ran", call);
  if (status.code != returned || returned < 0 || returned >= LOGITLESS_INTERNAL) {
    broken("malformed call %" PRIu64 ": code %d, in the struct %d: %s", call, returned, status.code,
           status.message);
  }
  if (std::memchr(status.message, 0, sizeof(status.message)) == nullptr || status.message[0] == 0) {
    broken("malformed call %" PRIu64 ": code %d without a message", call, returned);
  }
  count->codes.insert(returned);
  ++count->refused;
}

// Returns every byte except the workspace, which belongs to the library during a call.
std::map<std::string, std::vector<char>> outside_the_workspace(const Subject& subject) {
  auto bytes = subject.snapshot();
  bytes.erase("workspace");
  return bytes;
}

template <class Op>
void make_calls(DeviceType device, uint64_t seed, int64_t calls, Count* count) {
  Op op;
  const auto subject = testing::make_subject(op, device);
  const auto good = outside_the_workspace(*subject);
  for (int64_t i = 0; i < calls; ++i) {
    const uint64_t number = seed * 0x100000000 + static_cast<uint64_t>(i);
    Random random(number);
    Structs<Op> s(op, *subject);
    spoil(random, s, *subject);
    const auto before = outside_the_workspace(*subject);
    logitless_status status = LOGITLESS_STATUS_INIT;
    const int32_t code = logitless_run(&s.c.op, &s.workspace, &s.execution, &status);
    check(status, code, number, count);
    if (outside_the_workspace(*subject) != before) {
      broken("malformed call %" PRIu64 " wrote, code %d: %s", number, code, status.message);
    }
    if (before != good) {
      for (auto& [name, bytes] : good) subject->memory[name]->content = bytes;
    }
  }
}

int malformed(int64_t calls, uint64_t seed) {
  Count count;
  const int64_t each = calls / 16 + 1;
  for (const DeviceType device : {DeviceType::cpu, DeviceType::reference}) {
    make_calls<Softmax>(device, ++seed, each, &count);
    make_calls<CrossEntropyForward>(device, ++seed, each, &count);
    make_calls<CrossEntropyBackward>(device, ++seed, each, &count);
    make_calls<CrossEntropyForwardBackward>(device, ++seed, each, &count);
    make_calls<LinearCrossEntropyForward>(device, ++seed, each, &count);
    make_calls<LinearCrossEntropyBackward>(device, ++seed, each, &count);
    make_calls<LinearCrossEntropyForwardBackward>(device, ++seed, each, &count);
    make_calls<Combine>(device, ++seed, each, &count);
  }
  figure("calls", 16 * each);
  figure("refused", count.refused);
  figure("kinds of status", static_cast<int64_t>(count.codes.size()));
  return 0;
}

}  // namespace
}  // namespace logitless::reliability

int main(int argc, char** argv) {
  using logitless::reliability::option;
  return logitless::reliability::malformed(
      option(argc, argv, "--calls", 100000),
      static_cast<uint64_t>(option(argc, argv, "--seed", 1)) * 1000);
}
