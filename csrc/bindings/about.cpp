// What this library is, for mla_backend/library.py: read through ctypes, because it must answer before and
// without any tensor.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "bindings/op.h"
#include "build_info.h"  // written by setup.py
#include "cpu/common/features.h"
#include "cuda/ops.h"
#include "mla/format.h"
#include "mla/index.h"
#include "mla/limits.h"
#include "mla/plan.h"
#include "mla/schedule/cost.h"
#include "mla/workspace.h"

namespace mla {
namespace {

// Text as JSON has it. Control characters become blanks.
std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return json + '"';
}

// Members of an object, each after a comma.
std::string member(const char* name, const std::string& json) { return ",\"" + std::string(name) + "\":" + json; }
std::string text(const char* name, const std::string& value) { return member(name, quoted(value)); }
std::string truth(const char* name, bool value) { return member(name, value ? "true" : "false"); }
template <typename Number>
std::string number(const char* name, Number value) {
  return member(name, std::to_string(value));
}

std::string object(const std::string& members) { return "{" + members.substr(1) + "}"; }

std::string list(const std::vector<std::string>& items) {
  return "[" + bindings::join(items, ",", [](const std::string& item) { return item; }) + "]";
}

// In the order of Code, Scale and ScalesAt.
constexpr const char* kCodeNames[] = {"bf16", "f16", "e4m3", "e2m1"};
constexpr const char* kScaleNames[] = {"none", "fp32", "ue8m0", "tensor", "power", "e4m3"};
constexpr const char* kScalesAtNames[] = {"nowhere", "in_row", "end_of_page", "end_of_row"};

// By its number; staged rows come last.
const CacheFormat& format_of(int number) { return number < kFormatCount ? *kFormats[number] : kStaged; }

std::string describe(const CacheFormat& f) {
  return object(text("name", f.name) + text("code", kCodeNames[static_cast<int>(f.code)]) + number("latent", f.latent) +
                text("rope_code", kCodeNames[static_cast<int>(f.rope_code)]) + number("rope", f.rope) +
                number("value_dim", kValueDim) + text("scale", kScaleNames[static_cast<int>(f.scale)]) +
                number("group", f.group) + text("scales_at", kScalesAtNames[static_cast<int>(f.scales_at)]) +
                number("scale_bytes", f.scale_bytes()) + number("scale_offset", f.scale_offset()) +
                number("rope_offset", f.rope_offset()) + number("row_bytes", f.row_bytes()) +
                number("token_bytes", f.token_bytes()) + number("page_alignment", f.page_alignment));
}

std::string describe(const cpu::KernelChoice& choice) {
  const cpu::AttentionKernel* kernel = choice.attention;
  return object(text("name", kernel->name) + text("needs", kernel->needs) + truth("usable", choice.usable) +
                truth("active", kernel == cpu::active_kernels().attention));
}

}  // namespace

// The strings stay valid until the next call on the same thread.
MLA_EXPORT const char* mla_backend_about() {
  std::vector<std::string> kernels, products, ops, formats, cpu_kernels;
  for (const char* name : kKernelNames) kernels.push_back(quoted(name));
  for (const char* name : kProductsNames) products.push_back(quoted(name));
  for (const auto* op = bindings::Op::first; op; op = op->next) ops.push_back(quoted(op->name));
  for (int number = 0; number <= kFormatCount; ++number) formats.push_back(describe(format_of(number)));
  cpu::KernelChoice choices[cpu::kMaxKernels];
  const int count = cpu::kernel_choices(choices);
  for (int i = 0; i < count; ++i) cpu_kernels.push_back(describe(choices[i]));
  thread_local std::string json;
  json = object(
      text("version", MLA_VERSION) + text("compiler", MLA_COMPILER) + text("torch_built_with", MLA_TORCH) +
      text("torch_needed", MLA_TORCH_TARGET) + text("cuda_compiler", MLA_NVCC) + text("cuda_archs", MLA_CUDA_ARCHS) +
      number("plan_ctas_per_thread", kPlanCtasPerThread) + member("kernels", list(kernels)) +
      member("products", list(products)) + number("workspace_floats", Workspace::kFloatsPerCtaHead) +
      number("workspace_counters", Workspace::kCountersPerCtaHead) +
      number("max_select_positions", kMaxSelectPositions) + number("max_select_workspace", kMaxSelectWorkspace) +
      number("max_index_heads", kMaxIndexHeads) + number("max_selected", kMaxSelected) + member("ops", list(ops)) +
      member("formats", list(formats)) + member("cpu_kernels", list(cpu_kernels)));
  return json.c_str();
}

// Each CUDA kernel as the driver loaded it on the current device, or the reason why there is none.
MLA_EXPORT const char* mla_backend_cuda_kernels() {
  thread_local std::string json;
#ifdef MLA_CUDA
  json = cuda::describe_kernels();
#else
  json = "[]";
#endif
  return json.c_str();
}

// A GPU as JSON, or an error that says why there is none.
MLA_EXPORT const char* mla_backend_describe_gpu([[maybe_unused]] int index) {
  thread_local std::string json;
#ifdef MLA_CUDA
  try {
    const Gpu gpu = cuda::describe_gpu(index);
    std::vector<std::string> clusters;
    for (const int32_t count : gpu.clusters) clusters.push_back(std::to_string(count));
    json = object(number("multiprocessors", gpu.multiprocessors) + truth("hopper", gpu.hopper != 0) +
                  member("clusters", list(clusters)) + number("clock_khz", std::llround(gpu.clock_ghz * 1e6)) +
                  number("memory_mbs", std::llround(gpu.memory_tbs * 1e6)));
  } catch (const std::exception& error) {
    json = object(text("error", error.what()));
  }
#else
  json = object(text("error", "mla_backend: the library was built without CUDA"));
#endif
  return json.c_str();
}

// The launch for a GPU that mla_backend_describe_gpu knows, as kLaunchNumbers ints. Without a number of tokens or slots
// (-1) it suits any. The format is the number of one, -1: fp8_ds_mla; products are a number, too.
MLA_EXPORT void mla_backend_launch([[maybe_unused]] int gpu, [[maybe_unused]] int64_t tokens,
                                   [[maybe_unused]] int64_t slots, [[maybe_unused]] int heads,
                                   [[maybe_unused]] int format, [[maybe_unused]] int batch_invariant,
                                   [[maybe_unused]] int products, [[maybe_unused]] int32_t* launch) {
#ifdef MLA_CUDA
  const int64_t tiles = slots < 0 ? kAny : ceil_div(slots, kGpuTileSlots);
  const CacheFormat& rows = format < 0 ? kFp8DsMla : format_of(format);
  const AttentionShape shape{tokens, tiles, heads, rows, batch_invariant != 0, static_cast<Products>(products)};
  const Launch chosen = choose_launch(shape, cuda::describe_gpu(gpu));
  static_assert(sizeof(chosen) == kLaunchNumbers * sizeof(*launch));
  std::memcpy(launch, &chosen, sizeof(chosen));
#endif
}

// For whoever fits the constants: all candidates for a size on a Hopper GPU, and the model's times in us with these
// constants, which are those of GpuCosts in their order; null: the GPU's own. Returns how many there are; `most` are
// written.
MLA_EXPORT int mla_backend_weigh(const Gpu* gpu, const double* constants, int64_t tokens, int64_t slots, int heads,
                                 int format, int products, int most, Launch* launches, double* times) {
  GpuCosts costs = costs_of(*gpu);
  constexpr size_t kConstants = sizeof(costs) - offsetof(GpuCosts, memory_kb);
  if (constants) std::memcpy(&costs.memory_kb, constants, kConstants);
  const AttentionShape shape{tokens, ceil_div(slots, kGpuTileSlots), heads, format_of(format),
                             false,  static_cast<Products>(products)};
  int count = 0;
  for_each_candidate(shape, *gpu, [&](const Launch& launch) {
    if (count < most) launches[count] = launch, times[count] = launch_time(shape, launch, *gpu, costs);
    ++count;
  });
  return count;
}

MLA_EXPORT int mla_backend_select_cuda_kernel(const char* name) {
#ifdef MLA_CUDA
  return cuda::select_kernel(name);
#else
  return std::string(name) == "auto";
#endif
}

MLA_EXPORT int mla_backend_select_cpu_kernel(const char* name) { return cpu::select_kernel(name); }

}  // namespace mla
