// The one argument checker. A rejected argument becomes a ValueError in Python (torch passes
// std::invalid_argument on as that) whose text names the argument, what it has to be and what was given.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "mla/problem.h"

namespace mla::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A dimension as an argument's shape names it: a number, or a letter that stands for one.
struct Dim {
  const char* label;  // null: the number speaks for itself
  int64_t size;       // -1: any
  Dim(int64_t size) : label(nullptr), size(size) {}
  Dim(const char* label, int64_t size = -1) : label(label), size(size) {}
};

std::string describe(const Tensor& tensor);

[[noreturn]] void reject(const std::string& argument, const std::string& accepted, const std::string& given);

enum class Strides { dense_last, any };

// Dtype, shape and device of a tensor, and (unless any strides will do) that its last dimension is dense.
void expect(const Tensor& tensor, const char* name, std::initializer_list<ScalarType> dtypes,
            std::initializer_list<Dim> shape, const Tensor& same_device_as, Strides strides = Strides::dense_last);

// The same for an argument that may be left out; returns its data or null.
template <typename T>
const T* optional_data(const OptionalTensor& tensor, const char* name, ScalarType dtype,
                       std::initializer_list<Dim> shape, const Tensor& same_device_as) {
  if (!tensor) return nullptr;
  expect(*tensor, name, {dtype}, shape, same_device_as);
  return static_cast<const T*>(tensor->data_ptr());
}

// The cache behind a tensor [blocks, block_size, row] or [blocks, block_size, 1, row]. `format` is one of kFormats by
// number, or -1: then it follows from the tensor's dtype and row length.
// Only some ops take staged rows too, whose number is the one after.
CacheView expect_cache(const Tensor& cache, const char* name, int64_t format, const char* format_name,
                       const Tensor& same_device_as, bool or_staged = false);

// Of queries, outputs and dequantised rows.
ScalarType dtype_of(const CacheFormat& format);

// A number that fp32 holds and that is neither infinite nor NaN.
float expect_finite(double number, const char* name);
// A cache's own scale: not 0, and 1 unless the format has such a scale.
float expect_cache_scale(double scale, const char* name, const CacheFormat& format);

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Elements from one to the next of a dimension. Those of an empty tensor may be any number, and would overflow.
inline int64_t stride_of(const Tensor& tensor, int64_t dim) { return tensor.numel() > 0 ? tensor.stride(dim) : 0; }

// A number from `least` to `most`, which kernels hold in 32 bits.
int32_t expect_range(int64_t number, const char* name, int64_t least, int64_t most);

// How attention is launched with a plan of this table: the numbers of struct Launch.
Launch expect_launch(const std::vector<int64_t>& numbers, const Tensor& table);

// A size that kernels hold in 32 bits.
int32_t expect_int32(int64_t size, const char* name, const char* what);

}  // namespace mla::bindings
