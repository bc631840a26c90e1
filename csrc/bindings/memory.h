// An op and its arguments, and what every op refuses before it looks at anything else: to write into memory that two of
// an output's elements share, or that an output shares with another argument; and numbers at addresses that are no
// multiples of their size. All of it is arithmetic on addresses and strides.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bindings/check.h"

namespace mla::bindings {

// What an op writes into, and a number that torch.compile may trace.
using Written = Tensor;
using OptionalWritten = OptionalTensor;
using SymInt = int64_t;

struct Argument {
  std::string name;
  bool written;
};

// `tensors` are in the arguments' order; null for a None, and for what is no tensor.
void expect_memory(const std::vector<Argument>& arguments, const std::vector<const Tensor*>& tensors);

// An op, in a chain that each binding joins before main() begins.
struct Op {
  std::string name;
  std::string schema;  // as torch writes it: "cache_gather(Tensor cache, Tensor slots, Tensor(a!) out) -> ()"
  std::vector<Argument> arguments;
  const Op* next;
  static inline const Op* first = nullptr;

  // From C++ parameters: "Tensor cache, Tensor slots, Written out".
  Op(const char* name, const char* parameters);
};

inline const Tensor* tensor_of(const Tensor& tensor) { return &tensor; }
inline const Tensor* tensor_of(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }
template <typename Other>
const Tensor* tensor_of(const Other&) {
  return nullptr;
}

// What torch calls: the op, once its memory is checked.
template <auto* function, const Op& op>
struct WithMemoryChecked;
template <typename... Values, void (*function)(Values...), const Op& op>
struct WithMemoryChecked<function, op> {
  static void run(Values... values) {
    expect_memory(op.arguments, {tensor_of(values)...});
    function(std::move(values)...);
  }
};

}  // namespace mla::bindings
