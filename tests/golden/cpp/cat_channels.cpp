#include "vmath.h"

extern "C" void cat_channels(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  const float* const p1 = static_cast<const float*>(buffers[1]);
  float* const p2 = static_cast<float*>(buffers[2]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t v1 = 40;
  const int64_t step = 17;
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s1 > 32768)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r0 = row;
      #pragma omp simd
      for (int64_t c0 = 0; c0 < 63; ++c0) {
        const int64_t v0 = c0;
        const bool v2 = v0 < v1;
        const bool v3 = v0 >= v1;
        const float v4 = v2 ? sp::widen(p0[r0 * 40 + c0]) : 0.0f;
        const float v5 = v3 ? sp::widen(p1[r0 * 23 + c0 - 40]) : 0.0f;
        const float v6 = (v2 ? v4 : v5);
        p2[r0 * 63 + c0] = sp::narrow<float>(v6);
      }
    }
  }
}
