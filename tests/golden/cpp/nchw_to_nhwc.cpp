#include "vmath.h"

extern "C" void nchw_to_nhwc(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const int64_t s3 = scalars[3];
  const int64_t s4 = scalars[4];
  const int64_t step = 64;
  const int64_t chunks = (s1 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s3 > 32768)
  for (int64_t task = 0; task < chunks * s2; ++task) {
    const int64_t r0 = task / chunks;
    const int64_t begin = task % chunks * step;
    const int64_t end = sp::min<int64_t>(begin + step, s1);
    for (int64_t left = 0; left < s0; left += 16) {
      const int64_t right = sp::min<int64_t>(left + 16, s0);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t r1 = row;
        #pragma omp simd
        for (int64_t c0 = left; c0 < right; ++c0) {
          const float v0 = sp::widen(p0[r0 * s4 + r1 + c0 * s1]);
          p1[r0 * s4 + r1 * s0 + c0] = sp::narrow<float>(v0);
        }
      }
    }
  }
}
