#include "vmath.h"

extern "C" void upsample_nearest(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const int64_t s3 = scalars[3];
  const int64_t s4 = scalars[4];
  const int64_t s5 = scalars[5];
  const int64_t s6 = scalars[6];
  const int64_t s7 = scalars[7];
  const int64_t step = 29;
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s1 > 32768)
  for (int64_t task = 0; task < chunks; ++task) {
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    {
      int64_t r0 = begin / s2;
      int64_t r1 = begin / s3 % 2;
      int64_t r2 = begin / 2 % s4;
      int64_t r3 = begin % 2;
      for (int64_t row = begin; row < end; ++row) {
        #pragma omp simd
        for (int64_t c0 = 0; c0 < 36; ++c0) {
          const float v0 = sp::widen(p0[r0 * s5 + r2 * 36 + c0]);
          p1[r0 * s6 + r1 * s7 + r2 * 72 + r3 * 36 + c0] = sp::narrow<float>(v0);
        }
        if (++r3 == 2) {
          r3 = 0;
          if (++r2 == s4) {
            r2 = 0;
            if (++r1 == 2) {
              r1 = 0;
              ++r0;
            }
          }
        }
      }
    }
  }
}
