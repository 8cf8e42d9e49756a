#include "vmath.h"

extern "C" void column_sum(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  double* const p2 = static_cast<double*>(buffers[2]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const int64_t step = sp::limit<int64_t>((s0 + 31) / 32, 32, 1024);
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s2 > 32768)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    const sp::Row<double> lanes_v1_memory(s1);
    double* const lanes_v1 = lanes_v1_memory.get();
    #pragma omp simd
    for (int64_t c0 = 0; c0 < s1; ++c0) {
      lanes_v1[c0] = 0;
    }
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r0 = row;
      #pragma omp simd
      for (int64_t c0 = 0; c0 < s1; ++c0) {
        const float v0 = sp::widen(p0[r0 * s1 + c0]);
        lanes_v1[c0] += v0;
      }
    }
    for (int64_t c0 = 0; c0 < s1; ++c0) {
      double part_v1 = 0;
      part_v1 += lanes_v1[c0];
      p2[task * s1 + c0] = part_v1;
    }
  }
  #pragma omp parallel for schedule(static) if (s1 * chunks > 32768)
  for (int64_t cell = 0; cell < s1; ++cell) {
    const int64_t c0 = cell;
    const int64_t start = cell;
    double total_v1 = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      total_v1 += p2[start + chunk * s1];
    }
    const float v1 = total_v1;
    p1[c0] = sp::narrow<float>(v1);
  }
}
