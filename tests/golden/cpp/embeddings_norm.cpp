#include "vmath.h"

extern "C" void embeddings_norm(void* const* buffers, const int64_t* scalars) {
  const int64_t* const p0 = static_cast<const int64_t*>(buffers[0]);
  const float* const p1 = static_cast<const float*>(buffers[1]);
  const float* const p2 = static_cast<const float*>(buffers[2]);
  float* const p3 = static_cast<float*>(buffers[3]);
  int64_t* const p4 = static_cast<int64_t*>(buffers[4]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const int64_t s3 = scalars[3];
  int64_t faults = 0;
  const int32_t none = sp::unseen_zero();
  const int64_t step = 4;
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s1 > 32768)
  for (int64_t task = 0; task < chunks; ++task) {
    int64_t faults = 0;
    const int32_t none = sp::unseen_zero();
    const int64_t begin = task * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    const auto place0_of = [&](const int64_t row) {
      const int64_t r0 = row / s2;
      const int64_t r1 = row % s2;
      const int64_t v0 = sp::widen(p0[r0 * s2 + r1]);
      return v0;
    };
    const auto place1_of = [&](const int64_t row) {
      const int64_t r0 = row / s2;
      const int64_t r1 = row % s2;
      const int64_t v3 = r1;
      return v3;
    };
    {
      int64_t r0 = begin / s2;
      int64_t r1 = begin % s2;
      for (int64_t row = begin; row < end; ++row) {
        if (row + 12 < s0) {
          sp::prefetch(p1, place0_of(row + 12), 320, sp::min<int64_t>(256, 320));
          sp::prefetch(p2, place1_of(row + 12), 320, sp::min<int64_t>(256, 320));
        }
        float* const t0 = p3 + r0 * s3 + r1 * 320;
        const int64_t v0 = sp::widen(p0[r0 * s2 + r1]);
        const bool v1_outside = sp::is_outside(v0, 4);
        faults |= v1_outside;
        const int32_t v1 = static_cast<int32_t>(v0) & (v1_outside - 1);
        const int64_t v3 = r1;
        const bool v4_outside = sp::is_outside(v3, s2);
        faults |= v4_outside;
        const int32_t v4 = (static_cast<int32_t>(v3) + none) & (v4_outside - 1);
        #pragma omp simd reduction(|:faults)
        for (int64_t c0 = 0; c0 < 320; ++c0) {
          const float v2 = sp::widen(p1[c0 + v1 * int64_t{320}]);
          const float v5 = sp::widen(p2[c0 + v4 * int64_t{320}]);
          const float v6 = v2 + v5;
          t0[c0] = v6;
        }
        const sp::Moments of_v7 = sp::moments(t0, 320);
        const double first_v7 = of_v7.first;
        const double total_v7 = of_v7.sum;
        const double total_v8 = of_v7.squares;
        const float v7 = static_cast<float>(first_v7 + total_v7 / 320);
        const float v8 = static_cast<float>(sp::max(total_v8 / 320 - total_v7 / 320 * (total_v7 / 320), 0.0));
        const float v10 = 1 / sp::sqrt(v8);
        #pragma omp simd reduction(|:faults)
        for (int64_t c0 = 0; c0 < 320; ++c0) {
          const float v6 = t0[c0];
          const float v9 = v6 - v7;
          const float v11 = v9 * v10;
          p3[r0 * s3 + r1 * 320 + c0] = sp::narrow<float>(v11);
        }
        if (++r1 == s2) {
          r1 = 0;
          ++r0;
        }
      }
    }
    if (faults) sp::report(p4);
  }
  if (faults) sp::report(p4);
}
