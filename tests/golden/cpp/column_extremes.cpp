#include "vmath.h"

extern "C" void column_extremes(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  float* const p1 = static_cast<float*>(buffers[1]);
  float* const p2 = static_cast<float*>(buffers[2]);
  float* const p3 = static_cast<float*>(buffers[3]);
  float* const p4 = static_cast<float*>(buffers[4]);
  const int64_t s0 = scalars[0];
  const int64_t s1 = scalars[1];
  const int64_t s2 = scalars[2];
  const int64_t s3 = scalars[3];
  const int64_t s4 = scalars[4];
  const int64_t step = sp::limit<int64_t>((s0 + 31) / 32, 32, 1024);
  const int64_t chunks = (s0 + step - 1) / step;
  #pragma omp parallel for schedule(static) if (s2 > 32768)
  for (int64_t task = 0; task < chunks * s1; ++task) {
    const int64_t r0 = task / chunks;
    const int64_t begin = task % chunks * step;
    const int64_t end = sp::min<int64_t>(begin + step, s0);
    alignas(64) float lanes_v1[24];
    alignas(64) float lanes_v3[24];
    #pragma omp simd
    for (int64_t lane = 0; lane < 24; ++lane) {
      lanes_v1[lane] = sp::lowest<float>();
      lanes_v3[lane] = sp::highest<float>();
    }
    for (int64_t row = begin; row < end; ++row) {
      const int64_t r1 = row;
      #pragma omp simd
      for (int64_t lane = 0; lane < 24; ++lane) {
        const float v0 = sp::widen(p0[r0 * s3 + r1 * 24 + lane]);
        const float v2 = v0 * v0;
        lanes_v1[lane] = sp::max<float>(lanes_v1[lane], v0);
        lanes_v3[lane] = sp::min<float>(lanes_v3[lane], v2);
      }
    }
    for (int64_t c0 = 0; c0 < 4; ++c0) {
      float part_v1 = sp::lowest<float>();
      for (int64_t c1 = 0; c1 < 6; ++c1) {
        part_v1 = sp::max<float>(part_v1, lanes_v1[c0 * 6 + c1]);
      }
      p3[task * 4 + c0] = part_v1;
      float part_v3 = sp::highest<float>();
      for (int64_t c1 = 0; c1 < 6; ++c1) {
        part_v3 = sp::min<float>(part_v3, lanes_v3[c0 * 6 + c1]);
      }
      p4[task * 4 + c0] = part_v3;
    }
  }
  #pragma omp parallel for schedule(static) if (s4 * chunks > 32768)
  for (int64_t cell = 0; cell < s4; ++cell) {
    const int64_t r0 = cell / 4;
    const int64_t c0 = cell % 4;
    const int64_t start = cell / 4 * chunks * 4 + cell % 4;
    float total_v1 = sp::lowest<float>();
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      total_v1 = sp::max<float>(total_v1, p3[start + chunk * 4]);
    }
    const float v1 = total_v1;
    float total_v3 = sp::highest<float>();
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      total_v3 = sp::min<float>(total_v3, p4[start + chunk * 4]);
    }
    const float v3 = total_v3;
    p1[r0 * 4 + c0] = sp::narrow<float>(v1);
    p2[r0 * 4 + c0] = sp::narrow<float>(v3);
  }
}
