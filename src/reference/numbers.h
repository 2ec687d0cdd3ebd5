// SPDX-License-Identifier: Apache-2.0
// Elements of any dtype from and to double: the reference reads a view once into a dense row-major
// vector, and rounds every result once, to nearest, ties to even.
#pragma once

#include <cstdint>
#include <vector>

#include "logitless/tensor.h"

namespace logitless::reference {

double f16_to_double(uint16_t bits);
double bf16_to_double(uint16_t bits);
// Round straight from double: going through f32 would round twice.
uint16_t round_to_f16(double value);
uint16_t round_to_bf16(double value);

int64_t element_count(const TensorView& view);
std::vector<double> read(const TensorView& view);
std::vector<double> read_row(const TensorView& matrix, int64_t row);
std::vector<int64_t> read_indices(const TensorView& view);
void write(const std::vector<double>& values, const TensorView& view);

// The relative error of rounding to normal numbers of the dtype.
double unit_roundoff(DType dtype);
// The magnitude below which values of the dtype may be lost: f32 and bf16 may be flushed to 0 below
// the smallest normal number; f16 always rounds to its subnormals.
double least(DType dtype);
// A bound of one rounding's error.
double rounding_error(DType dtype, double value);

}  // namespace logitless::reference
