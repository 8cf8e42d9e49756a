#include "vmath.h"

extern "C" void layer_norm(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  const float* const p1 = static_cast<const float*>(buffers[1]);
  const float* const p2 = static_cast<const float*>(buffers[2]);
  const float* const p3 = static_cast<const float*>(buffers[3]);
  float* const p4 = static_cast<float*>(buffers[4]);
  float* const p5 = static_cast<float*>(buffers[5]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const float v5 = 1e-05f;
  const int64_t step = 4;
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s1 > 32768)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r0 = row;
      float* const t0 = p4 + r0 * 320;
      #pragma omp simd
      for (int64_t c0 = 0; c0 < 320; ++c0) {
        const float v0 = sp::widen(p0[r0 * 320 + c0]);
        const float v1 = sp::widen(p1[r0 * 320 + c0]);
        const float v2 = v0 + v1;
        t0[c0] = v2;
      }
      const sp::Moments of_v3 = sp::moments(t0, 320);
      const double first_v3 = of_v3.first;
      const double total_v3 = of_v3.sum;
      const double total_v4 = of_v3.squares;
      const float v3 = static_cast<float>(first_v3 + total_v3 / 320);
      const float v4 = static_cast<float>(sp::max(total_v4 / 320 - total_v3 / 320 * (total_v3 / 320), 0.0));
      const float v6 = v4 + v5;
      const float v7 = 1 / sp::sqrt(v6);
      #pragma omp simd
      for (int64_t c0 = 0; c0 < 320; ++c0) {
        const float v2 = t0[c0];
        const float v8 = v2 - v3;
        const float v9 = v8 * v7;
        const float v10 = sp::widen(p2[c0]);
        const float v11 = v9 * v10;
        const float v12 = sp::widen(p3[c0]);
        const float v13 = v11 + v12;
        p5[r0 * 320 + c0] = sp::narrow<float>(v13);
      }
    }
  }
}
