#include "bindings/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace mla::bindings {
namespace {

// By torch's name in Python, for those that arguments commonly have.
const char* dtype_name(ScalarType type) {
  static constexpr std::pair<ScalarType, const char*> kNames[] = {{ScalarType::BFloat16, "bfloat16"},
                                                                  {ScalarType::Half, "float16"},
                                                                  {ScalarType::Float, "float32"},
                                                                  {ScalarType::Double, "float64"},
                                                                  {ScalarType::Byte, "uint8"},
                                                                  {ScalarType::Char, "int8"},
                                                                  {ScalarType::Short, "int16"},
                                                                  {ScalarType::Int, "int32"},
                                                                  {ScalarType::Long, "int64"},
                                                                  {ScalarType::Bool, "bool"},
                                                                  {ScalarType::Float8_e4m3fn, "float8_e4m3fn"}};
  for (const auto& [known, name] : kNames)
    if (known == type) return name;
  return torch::headeronly::toString(type);
}

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "a device that is neither cpu nor cuda";
}

std::string describe_dim(const Dim& dim) {
  if (!dim.label) return std::to_string(dim.size);
  return dim.size < 0 ? std::string(dim.label) : dim.label + ("=" + std::to_string(dim.size));
}

bool matches(const Tensor& tensor, Shape shape) {
  const auto sizes = tensor.sizes();
  return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(),
                    [](int64_t size, const Dim& dim) { return dim.size < 0 || size == dim.size; });
}

void expect_device(const Tensor& tensor, const char* name, const Tensor& first) {
  const bool same = tensor.is_cpu() == first.is_cpu() && tensor.is_cuda() == first.is_cuda() &&
                    (tensor.is_cpu() || tensor.get_device_index() == first.get_device_index());
  if (!same)
    reject(name, "on " + device_name(first) + " like the first argument", "a tensor on " + device_name(tensor));
}

void expect_dense_last(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  if (last >= 0 && tensor.size(last) > 1 && tensor.stride(last) != 1)
    reject(name, "dense in its last dimension (stride 1)", "stride " + std::to_string(tensor.stride(last)));
}

// That the dimensions from `first` on are dense.
void expect_dense(const Tensor& tensor, const char* name, int64_t first) {
  const int64_t dims = tensor.dim();
  if (first < dims) expect_dense_last(tensor, name);
  int64_t dense = 1;
  for (int64_t i = dims - 1; i >= first && tensor.numel() > 0; dense *= tensor.size(i--))
    if (tensor.size(i) > 1 && tensor.stride(i) != dense) reject(name, "contiguous", describe(tensor) + " that is not");
}

bool fits(const Tensor& cache, const CacheFormat& format) {
  const ScalarType dtype = cache.scalar_type();
  const bool right_type = format.element_bytes() == 1 ? dtype == ScalarType::Byte || dtype == ScalarType::Char ||
                                                            dtype == ScalarType::Float8_e4m3fn
                                                      : dtype == dtype_of(format);
  return right_type && cache.size(cache.dim() - 1) == format.token_bytes() / format.element_bytes();
}

std::string describe_cache(const CacheFormat* format) {
  const char* dtype = format->element_bytes() == 1 ? "bytes" : dtype_name(dtype_of(*format));
  return std::string(format->name) + " (" + std::to_string(format->token_bytes() / format->element_bytes()) + " " +
         dtype + ")";
}

std::string describe(double number) {
  char text[32];
  snprintf(text, sizeof(text), "%g", std::isnan(number) ? std::fabs(number) : number);
  return text;
}

}  // namespace

std::string describe(const Tensor& tensor) {
  if (!tensor.defined()) return "None";
  return std::string(dtype_name(tensor.scalar_type())) + " [" + join(tensor.sizes()) + "]";
}

void reject(const std::string& argument, const std::string& accepted, const std::string& given) {
  throw std::invalid_argument(argument + " must be " + accepted + "; got " + given);
}

void* expect_tensor(const Tensor& tensor, const char* name, Dtypes dtypes, Shape shape, const Tensor& same_device_as,
                    Strides strides) {
  const bool known_dtype =
      tensor.defined() && std::find(dtypes.begin(), dtypes.end(), tensor.scalar_type()) != dtypes.end();
  if (!known_dtype || !matches(tensor, shape))
    reject(name,
           join(dtypes, " or ", [](ScalarType t) { return std::string(dtype_name(t)); }) + " [" +
               join(shape, ", ", describe_dim) + "]",
           describe(tensor));
  expect_device(tensor, name, same_device_as);
  expect_dense(tensor, name, static_cast<int64_t>(strides.size()));
  int64_t dim = 0;
  for (int64_t* stride : strides) *stride = tensor.numel() > 0 ? tensor.stride(dim++) : 0;
  return tensor.data_ptr();
}

CacheView expect_cache(const Tensor& cache, const char* name, int64_t format, const char* format_name,
                       const Tensor& same_device_as, bool or_staged) {
  std::vector<const CacheFormat*> known(std::begin(kFormats), std::end(kFormats)), fitting;
  if (or_staged) known.push_back(&kStaged);
  if (format < -1 || format >= static_cast<int64_t>(known.size()))
    reject(format_name, "the number of a format or -1", std::to_string(format));
  if (format >= 0) known = {known[format]};
  const bool has_shape = cache.defined() && (cache.dim() == 3 || (cache.dim() == 4 && cache.size(2) == 1));
  if (has_shape)
    for (const CacheFormat* candidate : known)
      if (fits(cache, *candidate)) fitting.push_back(candidate);
  if (fitting.empty())
    reject(name,
           "[blocks, block_size, width], with or without a dimension of 1 before the last, of " +
               join(known, ", ", describe_cache) + ", where bytes are uint8, int8 or float8_e4m3fn",
           describe(cache));
  const auto quoted_name = [](const CacheFormat* fitting) { return std::string("\"") + fitting->name + '"'; };
  if (fitting.size() > 1)
    reject(format_name, join(fitting, " or ", quoted_name) + ", as " + name + " may be either", "nothing");
  const CacheFormat& found = *fitting.front();
  expect_device(cache, name, same_device_as);
  const int64_t block_size = cache.size(1), element = found.element_bytes();
  if (block_size == 0) reject(name, "of a block size of 1 or more", describe(cache));
  expect_dense_last(cache, name);
  if (block_size > 1 && cache.stride(1) < found.row_bytes() / element)
    reject(name,
           "of rows that do not overlap (stride " + std::to_string(cache.size(cache.dim() - 1)) +
               " or more in dimension 1)",
           "stride " + std::to_string(cache.stride(1)));
  const bool at_end = found.scales_at == ScalesAt::end_of_page;
  if (at_end && block_size > 1 && cache.stride(1) != found.token_bytes())
    reject(name, "in pages without gaps (stride " + std::to_string(found.token_bytes()) + " in dimension 1)",
           "stride " + std::to_string(cache.stride(1)));
  // a dimension of one may have any stride, and so may all of an empty tensor: neither is multiplied
  const int64_t blocks = cache.size(0);
  const int64_t row_stride = block_size > 1 && blocks > 0 && !at_end ? cache.stride(1) * element : found.row_bytes();
  const int64_t block_stride = blocks > 1 ? cache.stride(0) * element : blocks * block_size * row_stride;
  return {static_cast<uint8_t*>(cache.data_ptr()), blocks, block_size, block_stride, row_stride, found};
}

SlotTable expect_block_table(const Tensor& table, const char* name, int64_t block_size, const char* block_size_name,
                             const Tensor& same_device_as) {
  SlotTable slots{};
  slots.blocks = expect<int32_t>(table, name, {{"R"}, {"max_blocks"}}, same_device_as, {&slots.stride});
  slots.requests = table.size(0);
  slots.max_blocks = expect_int32(table.size(1), name, "blocks a request");
  slots.block_size = expect_range(block_size, block_size_name, 1, kMaxSize);
  return slots;
}

int32_t expect_heads(const Tensor& tensor, const char* name, int64_t least, int64_t most, int64_t dim) {
  const int64_t heads = tensor.size(dim);
  if (heads < least || heads > most)
    reject(name, "of " + (least > 0 ? std::to_string(least) : "up") + " to " + std::to_string(most) + " heads",
           describe(tensor));
  return static_cast<int32_t>(heads);
}

ScalarType dtype_of(const CacheFormat& format) {
  return format.tile() == TileType::f16_576 ? ScalarType::Half : ScalarType::BFloat16;
}

float expect_finite(double number, const char* name) {
  const float narrow = static_cast<float>(number);
  if (std::isfinite(narrow)) return narrow;
  reject(name, "a finite number", describe(number));
}

float expect_cache_scale(double scale, const char* name, const CacheFormat& format) {
  const float own = expect_finite(scale, name);
  if (own != 1.0f && format.scale != Scale::tensor)
    reject(name, "1 with " + std::string(format.name) + " rows", describe(scale));
  if (own == 0.0f) reject(name, "other than 0", describe(scale));
  return own;
}

int32_t expect_range(int64_t number, const char* name, int64_t least, int64_t most) {
  if (number < least || number > most)
    reject(name, std::to_string(least) + " to " + std::to_string(most), std::to_string(number));
  return static_cast<int32_t>(number);
}

Launch expect_launch(const std::vector<int64_t>& numbers, const Tensor& table) {
  const auto in_range = [](int64_t number, int64_t least, int64_t most) { return least <= number && number <= most; };
  const std::string wanted = "a Launch for a table of " + std::to_string(table.size(0)) + " CTAs";
  if (numbers.size() != kLaunchNumbers || !in_range(numbers[0], 0, kKernelCount - 1))
    reject("plan.launch", wanted, "[" + join(numbers) + "]");
  const auto at = [&](int i) { return static_cast<int32_t>(std::clamp<int64_t>(numbers[i], INT32_MIN, INT32_MAX)); };
  const Launch launch{static_cast<Kernel>(at(0)), at(1), at(2), at(3), at(4), at(5)};
  if (!in_range(numbers[1], 1, kMaxSize) || !in_range(numbers[2], 0, kMaxSize) ||
      !in_range(numbers[3], 1, kMaxCluster) || !in_range(numbers[4], 0, kMaxSize) || numbers[5] != table.size(0))
    reject("plan.launch", wanted, describe(launch));
  return launch;
}

int32_t expect_int32(int64_t size, const char* name, const char* what) {
  if (size > kMaxSize) reject(name, "of at most " + std::to_string(kMaxSize) + " " + what, std::to_string(size));
  return static_cast<int32_t>(size);
}

}  // namespace mla::bindings
