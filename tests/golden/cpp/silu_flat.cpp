#include "vmath.h"

extern "C" void silu_flat(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  const int64_t s0 = scalars[0];
  const int64_t blocks = (s0 + 16383) / 16384;
  #pragma omp parallel for schedule(static) if (s0 > 16384)
  for (int64_t task = 0; task < blocks; ++task) {
    const int64_t begin = task * 16384;
    const int64_t end = sp::min<int64_t>(begin + 16384, s0);
    #pragma omp simd
    for (int64_t c0 = begin; c0 < end; ++c0) {
      const float v0 = sp::widen(p0[c0]);
      const float v1 = v0 / (1 + sp::exp(-v0));
      p1[c0] = sp::narrow<float>(v1);
    }
  }
}
