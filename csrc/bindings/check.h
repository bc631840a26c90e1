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
#include <type_traits>
#include <vector>

#include "mla/limits.h"
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

template <typename Range, typename Render>
std::string join(const Range& range, const char* separator, Render render) {
  std::string text;
  for (const auto& item : range) text += (text.empty() ? "" : separator) + render(item);
  return text;
}
inline std::string join(torch::headeronly::IntHeaderOnlyArrayRef numbers) {
  return join(numbers, ", ", [](int64_t number) { return std::to_string(number); });
}

std::string describe(const Tensor& tensor);

// The number of the GPU that has it, or -1.
inline int gpu_of(const Tensor& tensor) { return tensor.is_cuda() ? tensor.get_device_index() : -1; }

[[noreturn]] void reject(const std::string& argument, const std::string& accepted, const std::string& given);

using Dtypes = std::initializer_list<ScalarType>;
using Shape = std::initializer_list<Dim>;
// Where to write the strides of the first dimensions, in elements. Those of an empty tensor may be any number, and
// would overflow: 0 is written.
using Strides = std::initializer_list<int64_t*>;

// Dtype, shape and device of a tensor, and that dimensions whose strides nobody asks for are dense. Returns its data.
void* expect_tensor(const Tensor& tensor, const char* name, Dtypes dtypes, Shape shape, const Tensor& same_device_as,
                    Strides strides);

template <typename T = void>
T* expect(const Tensor& tensor, const char* name, Dtypes dtypes, Shape shape, const Tensor& same_device_as,
          Strides strides = {}) {
  return static_cast<T*>(expect_tensor(tensor, name, dtypes, shape, same_device_as, strides));
}

// The same of the dtype that T is; uint16_t stands for bf16.
template <typename T>
T* expect(const Tensor& tensor, const char* name, Shape shape, const Tensor& same_device_as, Strides strides = {}) {
  constexpr ScalarType dtype =
      std::is_same_v<T, uint16_t> ? ScalarType::BFloat16 : torch::headeronly::CppTypeToScalarType<T>::value;
  return expect<T>(tensor, name, {dtype}, shape, same_device_as, strides);
}

// The same for an argument that may be left out: then it returns null.
template <typename T>
T* expect(const OptionalTensor& tensor, const char* name, Shape shape, const Tensor& same_device_as,
          Strides strides = {}) {
  return tensor ? expect<T>(*tensor, name, shape, same_device_as, strides) : nullptr;
}

// The cache behind a tensor [blocks, block_size, row] or [blocks, block_size, 1, row]. `format` is one of kFormats by
// number, or -1: then it follows from the tensor's dtype and row length.
// Only some ops take staged rows too, whose number is the one after.
CacheView expect_cache(const Tensor& cache, const char* name, int64_t format, const char* format_name,
                       const Tensor& same_device_as, bool or_staged = false);

// The blocks of each request, [requests, max_blocks], and how many positions a block has.
SlotTable expect_block_table(const Tensor& table, const char* name, int64_t block_size, const char* block_size_name,
                             const Tensor& same_device_as);

// The heads of queries [tokens, heads, ...], or of whatever else has heads in dimension `dim`.
int32_t expect_heads(const Tensor& tensor, const char* name, int64_t least, int64_t most, int64_t dim = 1);

// Of queries, outputs and dequantised rows.
ScalarType dtype_of(const CacheFormat& format);

// A number that fp32 holds and that is neither infinite nor NaN.
float expect_finite(double number, const char* name);
// A cache's own scale: not 0, and 1 unless the format has such a scale.
float expect_cache_scale(double scale, const char* name, const CacheFormat& format);

// A number from `least` to `most`, which kernels hold in 32 bits.
int32_t expect_range(int64_t number, const char* name, int64_t least, int64_t most);

// A size that kernels hold in 32 bits.
int32_t expect_int32(int64_t size, const char* name, const char* what);

// How attention is launched with a plan of this table: the numbers of struct Launch.
Launch expect_launch(const std::vector<int64_t>& numbers, const Tensor& table);

}  // namespace mla::bindings
