#include "vmath.h"

extern "C" void timestep_embedding(void* const* buffers, const int64_t* scalars) {
  const int64_t* const p0 = static_cast<const int64_t*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const float v4 = -0.057564627324851146f;
  const int64_t v9 = 0;
  const int64_t step = 52;
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s1 > 16384)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    alignas(64) int64_t t0[320];
    alignas(64) int64_t t1[320];
    for (int64_t c0 = 0; c0 < 2; ++c0) {
      for (int64_t c1 = 0; c1 < 160; ++c1) {
        t0[c0 * 160 + c1] = c1;
      }
    }
    for (int64_t c0 = 0; c0 < 2; ++c0) {
      for (int64_t c1 = 0; c1 < 160; ++c1) {
        t1[c0 * 160 + c1] = c0;
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r0 = row;
      const int64_t v0 = sp::widen(p0[r0]);
      const float v1 = static_cast<float>(v0);
      #pragma omp simd
      for (int64_t lane = 0; lane < 320; ++lane) {
        const int64_t v2 = t0[lane];
        const float v3 = static_cast<float>(v2);
        const float v5 = v3 * v4;
        const float v6 = sp::exp(v5);
        const float v7 = v1 * v6;
        const int64_t v8 = t1[lane];
        const bool v10 = v8 == v9;
        const float v11 = sp::cos(v7);
        const float v12 = sp::sin(v7);
        const float v13 = sp::choose(v10, v11, v12);
        p1[r0 * 320 + lane] = sp::narrow<float>(v13);
      }
    }
  }
}
