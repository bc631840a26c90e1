#include "bindings/memory.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <sstream>

#include "bindings/op.h"

namespace mla::bindings {
namespace {

constexpr int kMaxDims = 4;  // of an argument of any op

// The bytes of a tensor: runs of `run` bytes in up to `dims` dimensions.
struct Bytes {
  struct Dim {
    int64_t size, stride;  // of runs, in bytes; by rising stride, each of two runs or more
  };
  const char* begin = nullptr;
  int64_t run = 0;   // 0: no bytes
  int64_t span = 0;  // from the first byte to the last
  int dims = 0;
  std::array<Dim, kMaxDims> dim{};

  Bytes() = default;
  explicit Bytes(const Tensor& tensor) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    if (sizes.size() > kMaxDims) return;  // no op takes it
    const int64_t element = static_cast<int64_t>(tensor.element_size());
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;  // its strides may be any
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 1) continue;
      int at = dims++;
      for (; at > 0 && dim[at - 1].stride > strides[i] * element; --at) dim[at] = dim[at - 1];
      dim[at] = {sizes[i], strides[i] * element};
    }
    begin = static_cast<const char*>(tensor.data_ptr());
    run = element;
    int joined = 0;  // dimensions that lengthen the run
    while (joined < dims && dim[joined].stride == run) run *= dim[joined++].size;
    std::move(dim.begin() + joined, dim.begin() + dims, dim.begin());
    dims -= joined;
    span = run;
    for (int i = 0; i < dims; ++i) span += (dim[i].size - 1) * dim[i].stride;
  }
};

// Distances between the beginnings of two runs: sums of multiples of strides.
class Distances {
 public:
  // The multiples of `stride` from `least` to `most`; a stride that is there already gets more of them.
  void add(int64_t stride, int64_t least, int64_t most) {
    for (int i = 0; i < count_; ++i)
      if (term_[i].stride == stride) {
        term_[i].least += least, term_[i].most += most;
        return;
      }
    int at = count_++;
    for (; at > 0 && term_[at - 1].stride > stride; --at) term_[at] = term_[at - 1];
    term_[at] = {stride, least, most};
  }

  // Whether a sum lies between `above` and `below`, neither of them included. `other_than_zero`: not all multiples are
  // zero.
  bool reach(int64_t above, int64_t below, bool other_than_zero) {
    int64_t common = 0;
    for (int i = 0; i < count_; ++i) common = std::gcd(common, term_[i].stride);
    if (!other_than_zero && common > 0 && floor_of(below - 1, common) * common <= above) return false;
    steps_ = 0;
    return search(count_, above, below, other_than_zero);
  }

 private:
  struct Term {
    int64_t stride, least, most;
  };

  static int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0); }

  // Of the terms before `end`. Strides of a tensor mostly exceed what the smaller ones add up to, so that a multiple or
  // two can be right. Where there is too much to try, the sum is taken to be there.
  bool search(int end, int64_t above, int64_t below, bool other_than_zero) {
    if (++steps_ > kMostSteps) return true;
    if (end == 0) return above < 0 && 0 < below && !other_than_zero;
    const Term& term = term_[end - 1];
    if (term.stride == 0) return search(end - 1, above, below, false);
    int64_t least = 0, most = 0;  // that the smaller strides add
    for (int i = 0; i < end - 1; ++i)
      least += term_[i].least * term_[i].stride, most += term_[i].most * term_[i].stride;
    const int64_t first = std::max(term.least, floor_of(above - most, term.stride) + 1);
    const int64_t last = std::min(term.most, floor_of(below - least - 1, term.stride));
    for (int64_t n = first; n <= last; ++n)
      if (search(end - 1, above - n * term.stride, below - n * term.stride, other_than_zero && n == 0)) return true;
    return false;
  }

  static constexpr int kMostSteps = 1 << 14;
  std::array<Term, 2 * kMaxDims> term_;
  int count_ = 0;
  int steps_ = 0;
};

bool overlaps_itself(const Bytes& a) {
  int64_t reach = a.run;
  bool nested = true;  // each dimension's stride exceeds what the smaller ones span
  for (int i = 0; i < a.dims; ++i) nested &= a.dim[i].stride >= reach, reach += (a.dim[i].size - 1) * a.dim[i].stride;
  if (nested) return false;
  for (int i = 1; i < a.dims; ++i)
    if (a.dim[i].stride == a.dim[i - 1].stride) return true;
  Distances distances;
  for (int i = 0; i < a.dims; ++i) distances.add(a.dim[i].stride, 1 - a.dim[i].size, a.dim[i].size - 1);
  return distances.reach(-a.run, a.run, true);
}

bool overlap(const Bytes& a, const Bytes& b) {
  const int64_t offset = b.begin - a.begin;
  if (offset >= a.span || -offset >= b.span) return false;
  Distances distances;
  for (int i = 0; i < a.dims; ++i) distances.add(a.dim[i].stride, 1 - a.dim[i].size, 0);
  for (int i = 0; i < b.dims; ++i) distances.add(b.dim[i].stride, 0, b.dim[i].size - 1);
  return distances.reach(-b.run - offset, a.run - offset, false);
}

// The type of a parameter in a schema. Whatever is written has a letter of its own there.
std::string schema_type(const std::string& type, char letter) {
  if (type == "Written") return std::string("Tensor(") + letter + "!)";
  if (type == "OptionalWritten") return std::string("Tensor(") + letter + "!)?";
  static const std::map<std::string, std::string> known{{"Tensor", "Tensor"},
                                                        {"OptionalTensor", "Tensor?"},
                                                        {"std::vector<Tensor>", "Tensor[]"},
                                                        {"bool", "bool"},
                                                        {"int64_t", "int"},
                                                        {"std::vector<int64_t>", "int[]"},
                                                        {"SymInt", "SymInt"},
                                                        {"double", "float"},
                                                        {"std::string", "str"}};
  return known.at(type);
}

}  // namespace

Op::Op(const char* name, const char* parameters) : name(name), next(first) {
  first = this;
  std::istringstream words(parameters);
  char letter = 'a';
  for (std::string type, argument; words >> type >> argument;) {
    if (argument.back() == ',') argument.pop_back();
    schema += (schema.empty() ? "(" : ", ") + schema_type(type, letter) + " " + argument;
    arguments.push_back({argument, type == "Written" || type == "OptionalWritten"});
    letter += arguments.back().written;
  }
  schema = this->name + schema + ") -> ()";
}

void expect_memory(const std::vector<Argument>& arguments, const std::vector<const Tensor*>& tensor) {
  constexpr size_t kMaxArguments = 24;
  std::array<Bytes, kMaxArguments> bytes;
  if (tensor.size() > kMaxArguments) throw std::logic_error("mla_backend: an op of too many arguments");
  for (size_t i = 0; i < tensor.size(); ++i) {
    if (!tensor[i] || !tensor[i]->defined()) continue;
    bytes[i] = Bytes(*tensor[i]);
    if (bytes[i].run > 0 && reinterpret_cast<uintptr_t>(bytes[i].begin) % tensor[i]->element_size() != 0)
      reject(arguments[i].name, "aligned to its elements", describe(*tensor[i]) + " that begins between");
  }
  for (size_t i = 0; i < tensor.size(); ++i) {
    if (!arguments[i].written || bytes[i].run == 0) continue;
    if (overlaps_itself(bytes[i]))
      reject(arguments[i].name, "without elements that share memory",
             describe(*tensor[i]) + " of strides [" + join(tensor[i]->strides()) + "]");
    for (size_t j = 0; j < tensor.size(); ++j)
      if (j != i && bytes[j].run > 0 && overlap(bytes[i], bytes[j]))
        reject(arguments[i].name, "in memory that no other argument uses", "memory of " + arguments[j].name);
  }
}

// The same for functions that give ops copies of their arguments. `names` are those of `written` and the others, with
// commas between them.
MLA_OP(own_memory, Tensor written, std::vector<Tensor> others, std::string names) {
  std::vector<Argument> arguments;
  std::istringstream listed(names);
  for (std::string name; std::getline(listed, name, ',');) arguments.push_back({name, arguments.empty()});
  std::vector<const Tensor*> tensors{&written};
  for (const Tensor& other : others) tensors.push_back(&other);
  if (arguments.size() != tensors.size()) reject("names", "one for each tensor", names);
  expect_memory(arguments, tensors);
}

}  // namespace mla::bindings
