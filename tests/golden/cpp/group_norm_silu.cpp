#include "vmath.h"

extern "C" void group_norm_silu(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  const float* const p1 = static_cast<const float*>(buffers[1]);
  const float* const p2 = static_cast<const float*>(buffers[2]);
  const float* const p3 = static_cast<const float*>(buffers[3]);
  const float* const p4 = static_cast<const float*>(buffers[4]);
  float* const p5 = static_cast<float*>(buffers[5]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const int64_t s3 = scalars[3];
  const int64_t step = 52;
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s2 > 16384)
  for (int64_t task = 0; task < chunks * s1; ++task) {
    const int64_t r0 = task / chunks;
    const int64_t begin = task % chunks * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    alignas(64) float t0[320];
    alignas(64) float t1[320];
    for (int64_t c0 = 0; c0 < 32; ++c0) {
      for (int64_t c1 = 0; c1 < 10; ++c1) {
        t0[c0 * 10 + c1] = sp::widen(p1[r0 * 32 + c0]);
      }
    }
    for (int64_t c0 = 0; c0 < 32; ++c0) {
      for (int64_t c1 = 0; c1 < 10; ++c1) {
        t1[c0 * 10 + c1] = sp::widen(p2[r0 * 32 + c0]);
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r1 = row;
      #pragma omp simd
      for (int64_t lane = 0; lane < 320; ++lane) {
        const float v0 = sp::widen(p0[r0 * s3 + r1 * 320 + lane]);
        const float v1 = t0[lane];
        const float v2 = v0 - v1;
        const float v3 = t1[lane];
        const float v4 = v2 * v3;
        const float v5 = sp::widen(p3[lane]);
        const float v6 = v4 * v5;
        const float v7 = sp::widen(p4[lane]);
        const float v8 = v6 + v7;
        const float v9 = v8 / (1 + sp::exp(-v8));
        p5[r0 * s3 + r1 * 320 + lane] = sp::narrow<float>(v9);
      }
    }
  }
}
