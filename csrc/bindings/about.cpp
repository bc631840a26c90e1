// What this library is, for mla_backend/library.py: read through ctypes, because it must answer before and
// without any tensor.
#include <string>

#include "build_info.h"  // written by setup.py
#include "cpu/features.h"
#include "cpu/ops.h"
#include "cuda/ops.h"
#include "mla/format.h"
#include "mla/problem.h"

namespace {

std::string quoted(const std::string& text) { return '"' + text + '"'; }

constexpr const char* kScaleNames[] = {"none", "fp32", "ue8m0"};  // in the order of mla::Scale

std::string describe_formats() {
  std::string json;
  for (const mla::CacheFormat* f : mla::kFormats) {
    json += json.empty() ? "" : ",";
    json += "{\"name\":" + quoted(f->name) + ",\"quantised\":" + (f->code == mla::Code::bf16 ? "false" : "true") +
            ",\"latent\":" + std::to_string(f->latent) + ",\"rope\":" + std::to_string(f->rope) +
            ",\"value_dim\":" + std::to_string(f->value) + ",\"group\":" + std::to_string(f->group) +
            ",\"scale\":" + quoted(kScaleNames[static_cast<int>(f->scale)]) +
            ",\"scale_place\":" + quoted(f->scale_place == mla::ScalePlace::in_row ? "in_row" : "end_of_page") +
            ",\"scale_offset\":" + std::to_string(f->scale_offset()) +
            ",\"rope_offset\":" + std::to_string(f->rope_offset()) +
            ",\"token_bytes\":" + std::to_string(f->token_bytes()) + "}";
  }
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
         ",\"plan_workers_per_thread\":" + std::to_string(mla::cpu::kPlanWorkersPerThread) +
         ",\"partial_floats\":" + std::to_string(mla::Partials::kWorkspacePerRow) +
         ",\"partial_counters\":" + std::to_string(mla::Partials::kArrivalsPerRow) +
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

// Rows that a plan should have for a GPU of this compute capability (its major number).
MLA_EXPORT int mla_backend_cuda_workers(int major, int processors, int64_t tokens, int heads) {
#ifdef MLA_CUDA
  return mla::cuda::default_workers(major, processors, tokens, heads);
#else
  return processors;
#endif
}

// A GPU's plan, but made by the CPU.
MLA_EXPORT void mla_backend_cuda_plan(int32_t tokens, int32_t topk, int32_t extra_topk, const int32_t* length,
                                      const int32_t* extra_length, bool whole_tokens, mla::PlanRow* rows,
                                      int32_t workers) {
  mla::cpu::make_plan(mla::cuda::plan_shape(tokens, topk, extra_topk, length, extra_length, whole_tokens), rows,
                      workers);
}

MLA_EXPORT int mla_backend_select_cuda_kernel(const char* name) {
#ifdef MLA_CUDA
  return mla::cuda::select_kernel(name);
#else
  return std::string(name) == "auto";
#endif
}

MLA_EXPORT int mla_backend_select_cpu_kernel(const char* name) { return mla::cpu::select_kernel(name); }
