// SPDX-License-Identifier: Apache-2.0
// Elements of any dtype are read to double and written from it here: the reference reads a view
// once into a dense row-major vector and rounds every result once, to nearest, ties to even.
#pragma once

#include <cstdint>
#include <vector>

#include "logitless/tensor.h"

namespace logitless::reference {

double f16_to_double(uint16_t bits);
double bf16_to_double(uint16_t bits);
// These round once, straight from double; going through f32 would round twice.
uint16_t round_to_f16(double value);
uint16_t round_to_bf16(double value);

int64_t element_count(const TensorView& view);
std::vector<double> read(const TensorView& view);
std::vector<double> read_row(const TensorView& matrix, int64_t row);
std::vector<int64_t> read_indices(const TensorView& view);
void write(const std::vector<double>& values, const TensorView& view);

// Bounds the rounding of the dtype's normal numbers.
double unit_roundoff(DType dtype);
// Bounds what is too small for the dtype: f32 and bf16 values below the least normal may be flushed
// to 0; f16 rounds to its subnormals everywhere.
double least(DType dtype);
// Bounds the error of one rounding to the dtype.
double rounding_error(DType dtype, double value);

}  // namespace logitless::reference
