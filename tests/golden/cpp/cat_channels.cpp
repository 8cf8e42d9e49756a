#include "vmath.h"

extern "C" void cat_channels(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  const float* const p1 = static_cast<const float*>(buffers[1]);
  float* const p2 = static_cast<float*>(buffers[2]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const auto part0 = [](const float* const p0, float* const p1, const int64_t s0, const int64_t s1) __attribute__((noinline)) {
    const int64_t step = 26;
    const int64_t chunks = (s0 + step - 1) / step;
    #pragma omp parallel for schedule(static) if (s1 > 32768)
    for (int64_t task = 0; task < chunks; ++task) {
      const int64_t begin = task * step;
      const int64_t end = sp::min<int64_t>(begin + step, s0);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t r0 = row;
        #pragma omp simd
        for (int64_t c0 = 0; c0 < 40; ++c0) {
          const float v0 = sp::widen(p0[r0 * 40 + c0]);
          p1[r0 * 63 + c0] = sp::narrow<float>(v0);
        }
      }
    }
  };
  part0(p0, p2, s0, s1);
  const auto part1 = [](const float* const p0, float* const p1, const int64_t s0, const int64_t s1) __attribute__((noinline)) {
    const int64_t step = 45;
    const int64_t chunks = (s0 + step - 1) / step;
    #pragma omp parallel for schedule(static) if (s1 > 32768)
    for (int64_t task = 0; task < chunks; ++task) {
      const int64_t begin = task * step;
      const int64_t end = sp::min<int64_t>(begin + step, s0);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t r0 = row;
        #pragma omp simd
        for (int64_t c0 = 0; c0 < 23; ++c0) {
          const float v0 = sp::widen(p0[r0 * 23 + c0]);
          p1[r0 * 63 + c0] = sp::narrow<float>(v0);
        }
      }
    }
  };
  part1(p1, p2 + 40, s0, s2);
}
