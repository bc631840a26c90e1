// What this library is, for mla_backend/library.py: read through ctypes, because it must answer before and
// without any tensor.
#include <string>

#include "bindings/op.h"
#include "build_info.h"  // written by setup.py
#include "cpu/common/features.h"
#include "cuda/ops.h"
#include "mla/backward.h"
#include "mla/choice.h"
#include "mla/format.h"

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
         ",\"plan_workers_per_thread\":" + std::to_string(mla::kPlanWorkersPerThread) +
         ",\"few_tokens\":" + std::to_string(mla::kFewTokens) +
         ",\"workspace_floats\":" + std::to_string(mla::Workspace::kFloatsPerWorkerHead) +
         ",\"workspace_counters\":" + std::to_string(mla::Workspace::kCountersPerWorkerHead) +
         ",\"ops\":" + describe_ops() + ",\"formats\":" + describe_formats() +
         ",\"cpu_kernels\":" + describe_cpu_kernels() + "}";
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

// Fills in what mla/choice.h needs to know of a GPU; returns null, or why that failed.
MLA_EXPORT const char* mla_backend_describe_device([[maybe_unused]] int index, [[maybe_unused]] mla::Device* device) {
  thread_local std::string why;
#ifdef MLA_CUDA
  try {
    *device = mla::cuda::describe_device(index);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
  }
#else
  why = "mla_backend: the library was built without CUDA";
#endif
  return why.c_str();
}

// Rows that a plan should have for a GPU and a cache of that format; -1: fp8_ds_mla.
MLA_EXPORT int mla_backend_cuda_workers(const mla::Device* device, int64_t tokens, int slots, int heads, int format) {
  const mla::CacheFormat& rows = format < 0 ? mla::kFp8DsMla : *format_of(format);
  return mla::default_workers(tokens, mla::tiles_of(slots, mla::kGpuTileSlots), heads, rows, *device);
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

MLA_EXPORT int mla_backend_select_cuda_kernel(const char* name) {
#ifdef MLA_CUDA
  return mla::cuda::select_kernel(name);
#else
  return std::string(name) == "auto";
#endif
}

MLA_EXPORT int mla_backend_select_cpu_kernel(const char* name) { return mla::cpu::select_kernel(name); }
