#include "vmath.h"

extern "C" void gather_wrapped(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  const int64_t* const p1 = static_cast<const int64_t*>(buffers[1]);
  float* const p2 = static_cast<float*>(buffers[2]);
  int64_t* const p3 = static_cast<int64_t*>(buffers[3]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  int64_t faults = 0;
  const int32_t none = sp::unseen_zero();
  const int64_t v1 = 1;
  const int64_t v3 = 0;
  const int64_t v5 = 3;
  const int64_t v7 = 6;
  const int64_t v10 = 2;
  const int64_t blocks = (s0 + 16383) / 16384;
  const int64_t step = 1 + 1024 / sp::max<int64_t>(s0, 1);
  const int64_t chunks = (s1 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s2 > 32768)
  for (int64_t task = 0; task < chunks * blocks; ++task) {
    int64_t faults = 0;
    const int32_t none = sp::unseen_zero();
    const int64_t first = task / blocks * step;
    const int64_t last = sp::min<int64_t>(first + step, s1);
    const int64_t begin = task % blocks * 16384;
    const int64_t end = sp::min<int64_t>(begin + 16384, s0);
    for (int64_t row = first; row < last; ++row) {
      const int64_t r0 = row;
      #pragma omp simd reduction(|:faults)
      for (int64_t c0 = begin; c0 < end; ++c0) {
        const int64_t v0 = sp::widen(p1[r0 * s0 + c0]);
        const int64_t v2 = v0 & v1;
        const bool v4 = v2 == v3;
        const int64_t v6 = v0 * v5;
        const int64_t v8 = v6 - v7;
        const bool v9_outside = sp::is_outside(sp::wrapped(v8, 6), 6);
        faults |= v9_outside & v4;
        const int32_t v9 = (static_cast<int32_t>(sp::wrapped(v8, 6)) + none) & (v9_outside - 1);
        const int64_t v11 = v10 - v0;
        const bool v12_outside = sp::is_outside(sp::wrapped(v11, 6), 6);
        faults |= v12_outside;
        const int32_t v12 = (static_cast<int32_t>(sp::wrapped(v11, 6)) + none) & (v12_outside - 1);
        const float v13 = v4 ? sp::widen(p0[r0 * 6 + v9]) : 0.0f;
        const float v14 = sp::widen(p0[r0 * 6 + v12]);
        const float v15 = v13 + v14;
        p2[r0 * s0 + c0] = sp::narrow<float>(v15);
      }
    }
    if (faults) sp::report(p3);
  }
  if (faults) sp::report(p3);
}
