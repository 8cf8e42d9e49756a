#include "vmath.h"

extern "C" void casts(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  int64_t* const p2 = static_cast<int64_t*>(buffers[2]);
  bool* const p3 = static_cast<bool*>(buffers[3]);
  const int64_t s0 = scalars[0];
  const float v1 = 3.1f;
  const float v4 = 1.0f;
  const float v9 = 0.0f;
  const int64_t blocks = (s0 + 16383) / 16384;
  #pragma omp parallel for schedule(static) if (s0 > 32768)
  for (int64_t task = 0; task < blocks; ++task) {
    const int64_t begin = task * 16384;
    const int64_t end = sp::min<int64_t>(begin + 16384, s0);
    #pragma omp simd
    for (int64_t c0 = begin; c0 < end; ++c0) {
      const float v0 = sp::widen(p0[c0]);
      const float v2 = v0 * v1;
      const float v3 = sp::round_to<sp::fp16>(v2);
      const float v5 = v3 + v4;
      const float v6 = sp::round_to<sp::bf16>(v5);
      const float v7 = static_cast<float>(v6);
      const int64_t v8 = static_cast<int64_t>(v6);
      const bool v10 = v7 > v9;
      p1[c0] = sp::narrow<float>(v7);
      p2[c0] = sp::narrow<int64_t>(v8);
      p3[c0] = sp::narrow<bool>(v10);
    }
  }
}
