// What every op refuses before it looks at anything else: to write into memory that two of an output's elements share,
// or that an output shares with another argument; and numbers at addresses that are no multiples of their size. All of
// it is arithmetic on addresses and strides.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bindings/check.h"

namespace mla::bindings {

// The arguments of an op, as its schema lists them.
class Arguments {
 public:
  struct Argument {
    std::string name;
    bool written;
  };
  explicit Arguments(const char* schema);
  explicit Arguments(std::vector<Argument> arguments) : arguments_(std::move(arguments)) {}

  // `tensors` are in the same order; null for a None, and for what is no tensor.
  void expect_memory(const std::vector<const Tensor*>& tensors) const;

 private:
  std::vector<Argument> arguments_;
};

inline const Tensor* tensor_of(const Tensor& tensor) { return &tensor; }
inline const Tensor* tensor_of(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }
template <typename Other>
const Tensor* tensor_of(const Other&) {
  return nullptr;
}

// An op that is reached only if that is so.
template <auto* op, const Arguments& arguments>
struct WithMemoryChecked;
template <typename... Values, void (*op)(Values...), const Arguments& arguments>
struct WithMemoryChecked<op, arguments> {
  static void run(Values... values) {
    arguments.expect_memory({tensor_of(values)...});
    op(std::move(values)...);
  }
};

}  // namespace mla::bindings
