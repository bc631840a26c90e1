// What this library is, for mla_backend/library.py: read through ctypes, because it must answer before and
// without any tensor.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>

#include "bindings/op.h"
#include "build_info.h"  // written by setup.py
#include "cpu/common/features.h"
#include "cuda/ops.h"
#include "mla/backward.h"
#include "mla/format.h"
#include "mla/limits.h"
#include "mla/plan.h"
#include "mla/schedule/cost.h"
#include "mla/workspace.h"

namespace {

std::string quoted(const std::string& text) { return '"' + text + '"'; }

// In the order of mla::Code, mla::Scale and mla::ScalesAt.
constexpr const char* kCodeNames[] = {"bf16", "f16", "e4m3"};
constexpr const char* kScaleNames[] = {"none", "fp32", "ue8m0", "tensor", "power"};
constexpr const char* kScalesAtNames[] = {"nowhere", "in_row", "end_of_page"};

// By its number; staged rows come last.
const mla::CacheFormat* format_of(int number) {
  return number < mla::kFormatCount ? mla::kFormats[number] : &mla::kStaged;
}

std::string describe_formats() {
  std::string json;
  for (int number = 0; number <= mla::kFormatCount; ++number) {
    const mla::CacheFormat* f = format_of(number);
    json += json.empty() ? "" : ",";
    json += "{\"name\":" + quoted(f->name) + ",\"code\":" + quoted(kCodeNames[static_cast<int>(f->code)]) +
            ",\"latent\":" + std::to_string(f->latent) +
            ",\"rope_code\":" + quoted(kCodeNames[static_cast<int>(f->rope_code)]) +
            ",\"rope\":" + std::to_string(f->rope) + ",\"value_dim\":" + std::to_string(mla::kValueDim) +
            ",\"scale\":" + quoted(kScaleNames[static_cast<int>(f->scale)]) + ",\"group\":" + std::to_string(f->group) +
            ",\"scales_at\":" + quoted(kScalesAtNames[static_cast<int>(f->scales_at)]) +
            ",\"scale_bytes\":" + std::to_string(f->scale_bytes()) +
            ",\"scale_offset\":" + std::to_string(f->scale_offset()) +
            ",\"rope_offset\":" + std::to_string(f->rope_offset()) +
            ",\"row_bytes\":" + std::to_string(f->row_bytes()) +
            ",\"token_bytes\":" + std::to_string(f->token_bytes()) +
            ",\"page_alignment\":" + std::to_string(f->page_alignment) + "}";
  }
  return "[" + json + "]";
}

std::string describe_ops() {
  std::string json;
  for (const auto* op = mla::bindings::ListedOp::first; op; op = op->next)
    json += (json.empty() ? "" : ",") + quoted(op->name);
  return "[" + json + "]";
}

std::string describe_kernel_names() {
  std::string json;
  for (const char* name : mla::kKernelNames) json += (json.empty() ? "" : ",") + quoted(name);
  return "[" + json + "]";
}

std::string describe_cpu_kernels() {
  mla::cpu::KernelChoice choices[mla::cpu::kMaxKernels];
  const int count = mla::cpu::kernel_choices(choices);
  const mla::cpu::AttentionKernel* active = mla::cpu::active_kernels().attention;
  std::string json;
  for (int i = 0; i < count; ++i) {
    json += json.empty() ? "" : ",";
    json += "{\"name\":" + quoted(choices[i].attention->name) + ",\"needs\":" + quoted(choices[i].attention->needs) +
            ",\"usable\":" + (choices[i].usable ? "true" : "false") +
            ",\"active\":" + (choices[i].attention == active ? "true" : "false") + "}";
  }
  return "[" + json + "]";
}

}  // namespace

#define MLA_EXPORT extern "C" __attribute__((visibility("default")))

// The strings stay valid until the next call on the same thread.
MLA_EXPORT const char* mla_backend_about() {
  thread_local std::string json;
  json = std::string("{\"version\":") + quoted(MLA_VERSION) + ",\"compiler\":" + quoted(MLA_COMPILER) +
         ",\"torch_built_with\":" + quoted(MLA_TORCH) + ",\"torch_needed\":" + quoted(MLA_TORCH_TARGET) +
         ",\"cuda_compiler\":" + quoted(MLA_NVCC) + ",\"cuda_archs\":" + quoted(MLA_CUDA_ARCHS) +
         ",\"plan_ctas_per_thread\":" + std::to_string(mla::kPlanCtasPerThread) +
         ",\"kernels\":" + describe_kernel_names() +
         ",\"workspace_floats\":" + std::to_string(mla::Workspace::kFloatsPerCtaHead) +
         ",\"workspace_counters\":" + std::to_string(mla::Workspace::kCountersPerCtaHead) +
         ",\"max_select_positions\":" + std::to_string(mla::kMaxSelectPositions) +
         ",\"max_select_workspace\":" + std::to_string(mla::kMaxSelectWorkspace) + ",\"ops\":" + describe_ops() +
         ",\"formats\":" + describe_formats() + ",\"cpu_kernels\":" + describe_cpu_kernels() + "}";
  return json.c_str();
}

// Each CUDA kernel as the driver loaded it on the current device, or the reason why there is none.
MLA_EXPORT const char* mla_backend_cuda_kernels() {
  thread_local std::string json;
#ifdef MLA_CUDA
  json = mla::cuda::describe_kernels();
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
    const mla::Gpu gpu = mla::cuda::describe_gpu(index);
    std::string clusters;
    for (const int32_t count : gpu.clusters) clusters += (clusters.empty() ? "" : ",") + std::to_string(count);
    json = "{\"multiprocessors\":" + std::to_string(gpu.multiprocessors) +
           ",\"hopper\":" + (gpu.hopper ? "true" : "false") + ",\"clusters\":[" + clusters +
           "],\"clock_khz\":" + std::to_string(std::llround(gpu.clock_ghz * 1e6)) +
           ",\"memory_mbs\":" + std::to_string(std::llround(gpu.memory_tbs * 1e6)) + "}";
  } catch (const std::exception& error) {
    json = "{\"error\":" + quoted(error.what()) + "}";
  }
#else
  json = "{\"error\":\"mla_backend: the library was built without CUDA\"}";
#endif
  return json.c_str();
}

// The launch for a GPU that mla_backend_describe_gpu knows, as kLaunchNumbers ints. Without a number of tokens or slots
// (-1) it suits any. The format is the number of one; -1: fp8_ds_mla.
MLA_EXPORT void mla_backend_launch([[maybe_unused]] int gpu, [[maybe_unused]] int64_t tokens,
                                   [[maybe_unused]] int64_t slots, [[maybe_unused]] int heads,
                                   [[maybe_unused]] int format, [[maybe_unused]] int batch_invariant,
                                   [[maybe_unused]] int32_t* launch) {
#ifdef MLA_CUDA
  const int64_t tiles = slots < 0 ? mla::kAny : mla::ceil_div(slots, mla::kGpuTileSlots);
  const mla::CacheFormat& rows = format < 0 ? mla::kFp8DsMla : *format_of(format);
  const mla::Launch chosen =
      mla::choose_launch({tokens, tiles, heads, rows, batch_invariant != 0}, mla::cuda::describe_gpu(gpu));
  static_assert(sizeof(chosen) == mla::kLaunchNumbers * sizeof(*launch));
  std::memcpy(launch, &chosen, sizeof(chosen));
#endif
}

// For whoever fits the constants: all candidates for a size on a Hopper GPU, and the model's times in us with these
// constants, which are those of GpuCosts in their order; null: the GPU's own. Returns how many there are; `most` are
// written.
MLA_EXPORT int mla_backend_weigh(const mla::Gpu* gpu, const double* constants, int64_t tokens, int64_t slots, int heads,
                                 int format, int most, mla::Launch* launches, double* times) {
  mla::GpuCosts costs = mla::costs_of(*gpu);
  constexpr size_t kConstants = sizeof(costs) - offsetof(mla::GpuCosts, memory_kb);
  if (constants) std::memcpy(&costs.memory_kb, constants, kConstants);
  const mla::AttentionShape shape{tokens, mla::ceil_div(slots, mla::kGpuTileSlots), heads, *format_of(format), false};
  int count = 0;
  mla::for_each_candidate(shape, *gpu, [&](const mla::Launch& launch) {
    if (count < most) launches[count] = launch, times[count] = mla::launch_time(shape, launch, *gpu, costs);
    ++count;
  });
  return count;
}

// Heads whose contributions to kv's gradient the backward adds up before it writes them: on a GPU, or (-1) on a CPU.
MLA_EXPORT int mla_backend_backward_group_heads(int device) {
#ifdef MLA_CUDA
  if (device >= 0) return mla::cuda::backward_group_heads(device);
#endif
  return mla::kCpuGroupHeads;
}

// Bytes that backward_order works in on the current GPU.
MLA_EXPORT int64_t mla_backend_order_scratch_bytes([[maybe_unused]] int64_t pairs, [[maybe_unused]] int rows) {
#ifdef MLA_CUDA
  return mla::cuda::order_scratch_bytes(pairs, rows);
#else
  return 0;
#endif
}

// Bytes that select_tokens works in on a GPU, or (-1) on a CPU. Numbers that it refuses count as the largest that it
// takes.
MLA_EXPORT int64_t mla_backend_select_workspace_bytes(int device, int64_t tokens, int64_t heads, int64_t positions,
                                                      int64_t topk) {
  const auto limit = [](int64_t number, int64_t most) { return static_cast<int32_t>(number < most ? number : most); };
  mla::SelectTokensProblem p{};
  p.tokens = tokens, p.heads = limit(heads, mla::kMaxIndexHeads);
  p.positions = limit(positions, mla::kMaxSelectPositions), p.topk = limit(topk, mla::kMaxSelected);
#ifdef MLA_CUDA
  if (device >= 0) return mla::cuda::select_workspace_bytes(p, device);
#endif
  return mla::cpu::select_workspace_bytes(p);
}

MLA_EXPORT int mla_backend_select_cuda_kernel(const char* name) {
#ifdef MLA_CUDA
  return mla::cuda::select_kernel(name);
#else
  return std::string(name) == "auto";
#endif
}

MLA_EXPORT int mla_backend_select_cpu_kernel(const char* name) { return mla::cpu::select_kernel(name); }
