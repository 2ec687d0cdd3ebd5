// SPDX-License-Identifier: Apache-2.0
// Every bad call gives its own status on the CPU, on the reference and by the rules for CUDA; its
// message names the field, and nothing is written. The calls are those of the tables in rejects.h
// and rejects_memory.h, plus the mistakes that every field can have.
#include "rejects.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "messages.h"
#include "rejects_memory.h"
#include "src/validate.h"

namespace logitless::testing {
namespace {

// Returns whether `word` occurs in `text` as a whole identifier.
bool mentions(const std::string& text, const std::string& word) {
  const auto part_of_name = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !part_of_name(text[at - 1])) &&
        (end == text.size() || !part_of_name(text[end]))) {
      return true;
    }
  }
  return false;
}

void expect_status(const Status& status, StatusCode code, const std::string& field) {
  EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(code)) << status.message();
  EXPECT_TRUE(mentions(status.message(), field))
      << "'" << status.message() << "' does not name " << field;
  EXPECT_EQ(number_for_a_name(status.message(), status.code()), "") << status.message();
}

void expect_reject(Subject& s, StatusCode code, const std::string& field, Seen seen) {
  WorkspaceSize size{1, 2, 3};
  const Status planned = s.ask_workspace(&size);
  if (seen == Seen::by_both) {
    expect_status(planned, code, field);
    EXPECT_TRUE(size.minimum == 1 && size.recommended == 2 && size.alignment == 3);
  } else {
    EXPECT_TRUE(planned.ok()) << planned.message();
  }
  const auto before = s.snapshot();
  expect_status(s.call_run(), code, field);
  EXPECT_TRUE(before == s.snapshot()) << "something was written";
  if (s.by_the_rules_alone()) return;
  const Status by_plan = s.call_plan();
  EXPECT_EQ(static_cast<int>(by_plan.code()), static_cast<int>(code)) << by_plan.message();
  EXPECT_TRUE(before == s.snapshot()) << "something was written by a plan";
}

// The calls are valid before the tests below break them, so the refusals come of the one change.
TEST(Rejects, UnbrokenCallsAreAccepted) {
  for_each_judged_subject([](Subject& s) {
    SCOPED_TRACE(describe(s));
    const Status status = s.call_run();
    EXPECT_TRUE(status.ok()) << status.message();
    if (s.by_the_rules_alone()) return;
    const Status by_plan = s.call_plan();
    EXPECT_TRUE(by_plan.ok()) << by_plan.message();
  });
}

class RejectTable : public ::testing::TestWithParam<Reject> {};

TEST_P(RejectTable, OwnStatusNamesTheFieldWritesNothing) {
  const Reject& reject = GetParam();
  int made = 0;
  for_each_judged_subject([&](Subject& s) {
    SCOPED_TRACE(describe(s));
    if (!reject.make(s)) return;
    ++made;
    expect_reject(s, reject.code, reject.field, reject.seen);
  });
  EXPECT_GT(made, 0) << "no op can make this mistake: the row tests nothing";
}

std::string row_name(const ::testing::TestParamInfo<Reject>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return std::to_string(info.index) + "_" + name;
}

INSTANTIATE_TEST_SUITE_P(Op, RejectTable, ::testing::ValuesIn(kOpRejects), row_name);
INSTANTIATE_TEST_SUITE_P(Chosen, RejectTable, ::testing::ValuesIn(kChosenRejects), row_name);
INSTANTIATE_TEST_SUITE_P(Lists, RejectTable, ::testing::ValuesIn(kListRejects), row_name);
INSTANTIATE_TEST_SUITE_P(Divergences, RejectTable, ::testing::ValuesIn(kDivergenceRejects),
                         row_name);
INSTANTIATE_TEST_SUITE_P(Fields, RejectTable, ::testing::ValuesIn(kFieldRejects), row_name);
INSTANTIATE_TEST_SUITE_P(Memory, RejectTable, ::testing::ValuesIn(kMemoryRejects), row_name);

// Breaks every field of every op in one way. `how` returns false if a field cannot be broken this
// way.
void break_every_field(StatusCode code, Seen seen,
                       const std::function<bool(Subject&, const std::string&)>& how) {
  int made = 0;
  for_each_judged_subject([&](Subject& whole) {
    for (const auto& [name, view] : whole.views) {
      with_subject(whole.kind, whole.execution.device.type, [&, field = name](Subject& s) {
        SCOPED_TRACE(describe(s) + ", " + field);
        if (!s[field]) s.give(field);
        if (!how(s, field)) return;
        ++made;
        expect_reject(s, code, field, seen);
      });
    }
  });
  EXPECT_GT(made, 0);
}

// Subject leaves the field out, because no such call is valid.
TEST(Rejects, ClassWeightsOfADivergence) {
  const auto refused = [](auto op) {
    const auto s = make_subject(op, DeviceType::cpu);
    float weights[Subject::v] = {};
    op.weights.vocab = subject_view("vocab_weight");
    op.weights.vocab.data = weights;
    expect_reject(*s, invalid_argument, "vocab_weight", Seen::by_both);
  };
  refused(LinearDivergenceForward{});
  refused(LinearDivergenceBackward{});
  refused(LinearDivergenceForwardBackward{});
}

// N, V, D and P are read from these fields. If one of them changes, the message names another
// field.
bool sets_sizes(const Subject& s, const std::string& name) {
  if (s.combines()) return name == "target" || name == "shard_row_reference";
  return name == "logits" || name == "input" || name == "weight" || name == "teacher_input";
}

int64_t contiguous_bytes(const TensorView& v) {
  int64_t bytes = size_of(v.dtype);
  for (int d = 0; d < v.rank; ++d) bytes *= v.shape[d];
  return bytes;
}

TEST(Rejects, UnknownDtypeOfAnyField) {
  for (int dtype : {-1, 5, 1 << 30}) {
    break_every_field(unknown_enum, Seen::by_both, [=](Subject& s, const std::string& name) {
      s[name].dtype = DType(dtype);
      return true;
    });
  }
}

TEST(Rejects, UnknownDeviceOfAnyField) {
  for (int type : {-1, 4}) {
    break_every_field(unknown_enum, Seen::by_both, [=](Subject& s, const std::string& name) {
      s[name].device.type = DeviceType(type);
      return true;
    });
  }
}

// The CPU and the reference take tensors on the CPU; CUDA takes those of its own device.
TEST(Rejects, WrongDeviceOfAnyField) {
  for (Device device : {Device{DeviceType::cuda, 0}, Device{DeviceType::webgpu, 0},
                        Device{DeviceType::reference, 0}, Device{DeviceType::cpu, 1},
                        Device{DeviceType::cpu, 0}, Device{DeviceType::cuda, 1}}) {
    break_every_field(wrong_device, Seen::by_both, [=](Subject& s, const std::string& name) {
      if (s[name].device == device) return false;
      s[name].device = device;
      return true;
    });
  }
}

TEST(Rejects, WrongDtypeOfAnyField) {
  break_every_field(wrong_dtype, Seen::by_both, [](Subject& s, const std::string& name) {
    const bool integer = name == "target" || name == "argmax" || name == "rank" ||
                         name == "fault" || name == "shard_argmax" || name.ends_with("ids") ||
                         name == "id_offsets";
    s[name].dtype = integer ? DType::f32 : DType::i32;
    return true;
  });
}

// Statistics, weights and losses are f32 alone.
TEST(Rejects, HalfPrecisionWhereF32IsTheOnlyDtype) {
  break_every_field(wrong_dtype, Seen::by_both, [](Subject& s, const std::string& name) {
    const bool any_float =
        (s[name].rank == 2 && !s.combines()) || name == "bias" || name == "grad_bias";
    s[name].dtype = DType::f16;
    return !any_float;
  });
}

TEST(Rejects, WrongRankOfAnyField) {
  for (int rank : {-2, 0, 1, 2, 3}) {
    break_every_field(wrong_shape, Seen::by_both, [=](Subject& s, const std::string& name) {
      const bool one_too = s[name].rank == 0 && rank == 1;  // [1] is accepted for []
      if (s[name].rank == rank || one_too) return false;
      s[name].rank = rank;
      return true;
    });
  }
}

// The view has the right number of elements, but one dimension too many.
TEST(Rejects, OneDimensionTooManyOfAnyField) {
  break_every_field(wrong_shape, Seen::by_both, [](Subject& s, const std::string& name) {
    TensorView& v = s[name];
    if (v.rank == 2) return false;
    v.shape = {v.rank == 0 ? 1 : v.shape[0], 1};
    v.stride = {1, 1};
    v.rank = 2;
    return true;
  });
}

TEST(Rejects, TwoElementsWhereOneIsMeant) {
  break_every_field(wrong_shape, Seen::by_both, [](Subject& s, const std::string& name) {
    TensorView& v = s[name];
    if (v.rank != 0) return false;
    v.shape = {2, 0};
    v.stride = {1, 0};
    v.rank = 1;
    return true;
  });
}

TEST(Rejects, WrongSizeOfAnyField) {
  for (int dimension : {0, 1}) {
    for (int64_t change : {-1, 1}) {
      break_every_field(wrong_shape, Seen::by_both, [=](Subject& s, const std::string& name) {
        if (sets_sizes(s, name) || s[name].rank <= dimension) return false;
        // These two define K and k.
        if ((name == "ids" || name == "top_logits") && dimension == 1) return false;
        s[name].shape[dimension] += change;
        return true;
      });
    }
  }
}

// A weight of shape [D, V] gets a message that asks whether it was transposed, a common mistake.
TEST(Rejects, ATransposedWeightIsSaidToBeOne) {
  int made = 0;
  for_each_judged_subject([&](Subject& s) {
    if (!s.linear()) return;
    ++made;
    SCOPED_TRACE(describe(s));
    s["weight"].shape = {Subject::d, Subject::v};
    EXPECT_STREQ(s.call_run().message(),
                 "weight has shape [4, 5]; allowed: [V, 4]; its first dimension is 4: transposed?");
    s["weight"].shape = {Subject::v, Subject::d + 1};
    EXPECT_STREQ(s.call_run().message(), "weight has shape [5, 5]; allowed: [V, 4]");
  });
  EXPECT_GT(made, 0);
}

TEST(Rejects, NegativeSizeOrStrideOfAnyField) {
  for (int dimension : {0, 1}) {
    for (bool size : {false, true}) {
      break_every_field(invalid_argument, Seen::by_both, [=](Subject& s, const std::string& name) {
        if (s[name].rank <= dimension) return false;
        (size ? s[name].shape : s[name].stride)[dimension] = -1;
        return true;
      });
    }
  }
}

TEST(Rejects, BytesBeyondInt64OfAnyField) {
  break_every_field(invalid_argument, Seen::by_both, [](Subject& s, const std::string& name) {
    s[name].byte_offset = uint64_t{1} << 63;
    return true;
  });
  for (int64_t stride : {int64_t{1} << 61, std::numeric_limits<int64_t>::max()}) {
    break_every_field(invalid_argument, Seen::by_both, [=](Subject& s, const std::string& name) {
      if (s[name].rank == 0 || s[name].shape[0] == 1) return false;
      s[name].stride[0] = stride;
      return true;
    });
  }
}

// Broadcast inputs of little memory have sizes whose product overflows a plan's arithmetic.
TEST(Rejects, ProductsOfSizesBeyond2To56) {
  for_each_judged_subject([](Subject& s) {
    if (s.kind == kind_of<Softmax> || s.linear() || s.gradients()) return;
    SCOPED_TRACE(describe(s));
    if (s.combines()) {
      s.options->vocab_total = int64_t{1} << 55;
      return expect_reject(s, invalid_argument, "vocab_total", Seen::by_both);
    }
    s["logits"].shape = {int64_t{1} << 40, int64_t{1} << 40};
    s["logits"].stride = {0, 0};
    expect_reject(s, invalid_argument, "logits", Seen::by_both);
  });
}

TEST(Rejects, OverlappingElementsOfAnyOutput) {
  for (int64_t second : {0, 1, 2}) {
    break_every_field(invalid_argument, Seen::by_both, [=](Subject& s, const std::string& name) {
      TensorView& v = s[name];
      if (!s.written(name) || v.rank == 0 || v.shape[0] == 1) return false;
      if (v.rank == 1 && second != 0) return false;
      v.stride = {v.rank == 1 ? 0 : 2,
                  second};  // rows lie at 0, 2, 4; columns at 0, 0, ... or 0, 1, ...
      return true;
    });
  }
}

TEST(Rejects, NullDataOfAnyField) {
  break_every_field(invalid_argument, Seen::by_run, [](Subject& s, const std::string& name) {
    s[name].data = nullptr;
    return true;
  });
}

TEST(Rejects, AddressesBelowTheElementOfAnyField) {
  break_every_field(misaligned, Seen::by_run, [](Subject& s, const std::string& name) {
    s[name].byte_offset = s[name].dtype == DType::i64 ? 4 : 2;
    return true;
  });
  break_every_field(misaligned, Seen::by_run, [](Subject& s, const std::string& name) {
    s[name].data = static_cast<char*>(s[name].data) + 1;
    return true;
  });
}

TEST(Rejects, AddressesPastTheEndOfMemoryOfAnyField) {
  break_every_field(invalid_argument, Seen::by_run, [](Subject& s, const std::string& name) {
    const uint64_t before_end = s[name].dtype == DType::i64 ? 8 : 4;
    s[name].data = reinterpret_cast<void*>(~uintptr_t{0} - before_end + 1);
    s[name].byte_offset = before_end;
    return true;
  });
}

// The first element of one tensor lies in the last bytes of the other. Exactly equal memory would
// be allowed for logits and an output in place.
TEST(Rejects, AnyOutputOnAnyOtherField) {
  int made = 0;
  for_each_judged_subject([&](Subject& whole) {
    for (const auto& [first, view] : whole.views) {
      for (const auto& [second, other] : whole.views) {
        if (first == second || (!whole.written(first) && !whole.written(second))) continue;
        if (!*view || !*other) continue;
        // `kept` at the end of another field would reach beyond that field's memory. The reverse
        // pair is tried.
        if (first == "kept") continue;
        ++made;
        with_subject(whole.kind, whole.execution.device.type,
                     [&, a = first, b = second](Subject& s) {
                       SCOPED_TRACE(describe(s) + ", " + a + " on " + b);
                       const int64_t bytes = contiguous_bytes(s[b]);
                       s[a].data = static_cast<char*>(s[b].data) +
                                   (bytes - 1) / size_of(s[a].dtype) * size_of(s[a].dtype);
                       expect_reject(s, invalid_argument, a, Seen::by_run);
                       expect_reject(s, invalid_argument, b, Seen::by_run);
                     });
      }
    }
  });
  EXPECT_GT(made, 0);
}

TEST(Rejects, AnyFieldOnTheWorkspace) {
  break_every_field(invalid_argument, Seen::by_run, [](Subject& s, const std::string& name) {
    s[name].data = static_cast<char*>(s.workspace.data) + s.workspace.bytes - 8;
    return true;
  });
}

// `workspace` and `run` find an unknown device when they look for its backend; validate() alone
// must find it too.
TEST(Rejects, UnknownDeviceByTheRulesAlone) {
  const Softmax op{.logits = subject_view("logits"),
                   .probabilities = subject_view("probabilities")};
  expect_status(validate(Call(op, {.device = {DeviceType(4), 0}})), unknown_enum, "device");
}

// A library without CUDA says so, as does a machine without a driver or a device. Where there is a
// device, CUDA refuses tensors in memory that it cannot reach.
TEST(Rejects, AnAbsentCudaSaysWhy) {
  char text[256];
  Status present;
  logitless_describe_backend(LOGITLESS_CUDA, text, sizeof(text), present.c());
  for_each_subject([&](Subject& s) {
    SCOPED_TRACE(describe(s));
    s.execution.device.type = DeviceType::cuda;
    if (!present.ok()) {
      expect_reject(s, backend_unavailable, "cuda", Seen::by_both);
      EXPECT_GT(std::strlen(present.message()), 20u) << present.message();
    } else {
      expect_reject(s, wrong_device, "cuda", Seen::by_both);
      s.execution.device.index = 4096;
      for (auto& [name, view] : s.views) view->device = s.execution.device;
      expect_reject(s, wrong_device, "device", Seen::by_both);
    }
  });
}

TEST(Rejects, NoPlaceForTheSize) {
  for_each_subject([](Subject& s) {
    SCOPED_TRACE(describe(s));
    expect_status(s.ask_workspace(nullptr), invalid_argument, "size");
  });
}

// No exception crosses the C boundary, not even one that the caller's executor throws.
TEST(Rejects, AnExceptionOfTheExecutorIsAStatus) {
  constexpr int64_t rows = 64, columns = 2048;
  std::vector<float> logits(rows * columns, 1.f), probabilities(rows * columns);
  const Executor executor{sizeof(Executor), 4, nullptr, [](void*, int64_t, auto, void*) {
                            throw std::runtime_error("the pool is closed");
                          }};
  const Softmax op{.logits = matrix_view(logits.data(), DType::f32, rows, columns),
                   .probabilities = matrix_view(probabilities.data(), DType::f32, rows, columns)};
  WorkspaceSize size;
  const Execution execution{.executor = &executor};
  ASSERT_TRUE(workspace(op, execution, &size).ok());
  Memory memory(size.recommended);
  expect_status(run(op, {memory.data(), size.recommended}, execution), internal, "closed");
}

TEST(Rejects, TargetOutOfRangeBeforeAnyOutputIsWritten) {
  for (int64_t target : {int64_t{-1}, int64_t{-99}, int64_t{5}, int64_t{1} << 40}) {
    for_each_subject([&](Subject& s) {
      if (!s.has("target")) return;
      SCOPED_TRACE(describe(s) + ", " + std::to_string(target));
      s["target"].as<int64_t>()[2] = target;
      auto before = s.snapshot();
      expect_status(s.call_run(), target_out_of_range, "target");
      auto after = s.snapshot();
      before.erase("workspace");  // the targets are read while the tokens are compacted into it
      after.erase("workspace");
      EXPECT_TRUE(before == after) << "something was written";
    });
  }
}

}  // namespace
}  // namespace logitless::testing
