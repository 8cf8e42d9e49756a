#include "vmath.h"

extern "C" void row_sum(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  float* const p2 = static_cast<float*>(buffers[2]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const float v2 = static_cast<float>(s0);
  const int64_t step = 1 + 1024 / sp::max<int64_t>(s0, 1);
  const int64_t chunks = (s1 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s2 > 32768)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s1);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r0 = row;
      double total_v1 = 0;
      #pragma omp simd reduction(+:total_v1) simdlen(8)
      for (int64_t c0 = 0; c0 < s0; ++c0) {
        const float v0 = sp::widen(p0[r0 * s0 + c0]);
        total_v1 += v0;
      }
      const float v1 = static_cast<float>(total_v1);
      p1[r0] = sp::narrow<float>(v1);
      const float v3 = v1 / v2;
      p2[r0] = sp::narrow<float>(v3);
    }
  }
}
