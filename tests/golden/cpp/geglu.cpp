#include "vmath.h"

extern "C" void geglu(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t step = 4;
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s1 > 16384)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r0 = row;
      #pragma omp simd
      for (int64_t c0 = 0; c0 < 320; ++c0) {
        const float v0 = sp::widen(p0[r0 * 640 + c0]);
        const float v1 = sp::widen(p0[r0 * 640 + c0 + 320]);
        const float v2 = sp::half(v1) * (1 + sp::erf(v1 * 0.7071067811865476f));
        const float v3 = v0 * v2;
        p1[r0 * 320 + c0] = sp::narrow<float>(v3);
      }
    }
  }
}
