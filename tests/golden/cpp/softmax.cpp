#include "vmath.h"

extern "C" void softmax(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const int64_t step = 1 + 1024 / sp::max<int64_t>(s0, 1);
  const int64_t chunks = (s1 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s2 > 16384)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s1);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r0 = row;
      float* const t0 = p1 + r0 * s0;
      const float v1 = sp::largest(p0 + r0 * s0, s0);
      #pragma omp simd
      for (int64_t c0 = 0; c0 < s0; ++c0) {
        const float v0 = sp::widen(p0[r0 * s0 + c0]);
        const float v2 = v0 - v1;
        const float v3 = sp::exp_of_negative(v2);
        t0[c0] = v3;
      }
      const double total_v4 = sp::sum(t0, s0);
      const float v4 = static_cast<float>(total_v4);
      const float v4_inverse = static_cast<float>(1 / total_v4);
      #pragma omp simd
      for (int64_t c0 = 0; c0 < s0; ++c0) {
        const float v3 = t0[c0];
        const float v5 = v3 * v4_inverse;
        p1[r0 * s0 + c0] = sp::narrow<float>(v5);
      }
    }
  }
}
