// What launches cost on the GPUs that were measured, in us: written by `python -m serving_benchmarks ops tune`.
#pragma once

namespace mla {

// Of a kernel with so many heads per CTA.
struct KernelCosts {
  double begin;           // and end, of a CTA
  double tile_fp8;        // 64 rows that are multiplied as e4m3 numbers
  double tile_16bit;      // rows of 16-bit numbers
  double tile_converted;  // rows that become such; of m64_fp8, rows with one scale
  double tile_fp4;        // rows of e2m1 numbers
  double token;           // another token, or split of one, in the same CTA
  double cluster[4];      // to combine splits within a cluster of 2, 4, 8 and 16 CTAs
  double uneven;          // more for each CTA by which a cluster is smaller than the next of these sizes
  double combine;         // to combine splits in the workspace
  double combine_split;   // more for each beyond kEarlySplits
};

struct GpuCosts {
  const char* name;
  double clock_ghz, memory_tbs;  // as the driver says, to find the nearest
  double memory_kb;              // to read 1000 bytes of rows from memory
  double l2_kilorow;             // for each further group of heads that reads 1000 rows again
  double partial_row;            // a partial result of one head, written and read
  KernelCosts swap_ab_8, swap_ab_16, swap_ab_32, m64, m64_fp8;
};

// clang-format off
constexpr GpuCosts kGpuCosts[] = {
    {"NVIDIA H100 80GB HBM3", 1.980, 3.352, 0.0003688, 0.0137, 0.00134,
     {4.915, 0.9931, 1.418, 2.221, 0.9931, 3.539, 2.017, 1.642, 1.873, 3.311, 0.4212, 6.411, 0.4177},
     {7.08, 1.1, 1.556, 2.27, 1.1, 3.482, 1.706, 0.1648, 1.026, 1.705, 0.7543, 7.799, 0.4799},
     {12.1, 1.373, 1.3, 1.3, 1.373, 8.927, 0.01, 0.01, 0.01, 0.01, 0.01, 2.014, 0.4266},
     {12.51, 2.271, 1.82, 2.4, 1.82, 5.849, 0.01, 0.01, 0.01, 0.01, 0.01, 1.682, 0.3339},
     {11.67, 1.683, 1.75, 1.25, 1.75, 7.337, 0.01, 0.01, 0.01, 0.01, 0.01, 2.178, 0.09838}},
    {"NVIDIA H200", 1.980, 4.814, 0.0002419, 0.02693, 0.001185,
     {4.915, 1.013, 1.313, 2.221, 1.013, 4.134, 1.829, 1.548, 1.99, 3.306, 0.3988, 5.706, 0.3348},
     {7.08, 1.1, 1.407, 2.27, 1.1, 3.498, 1.735, 0.1085, 0.9913, 1.777, 0.7121, 6.263, 0.376},
     {12.32, 1.428, 1.3, 1.3, 1.428, 7.936, 0.01, 0.01, 0.01, 0.01, 0.01, 0.5776, 0.2907},
     {11.31, 2.271, 1.75, 2.4, 1.75, 5.506, 0.01, 0.01, 0.01, 0.01, 0.01, 0.9144, 0.3275},
     {11.67, 1.683, 1.75, 1.25, 1.75, 7.337, 0.01, 0.01, 0.01, 0.01, 0.01, 2.178, 0.09838}},
};
// clang-format on

}  // namespace mla
