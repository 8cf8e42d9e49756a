#include "vmath.h"

extern "C" void group_norm_stats(void* const* buffers, const int64_t* scalars) {
  const float* const p0 = static_cast<const float*>(buffers[0]);
  const float* const p1 = static_cast<const float*>(buffers[1]);
  const float* const p2 = static_cast<const float*>(buffers[2]);
  float* const p3 = static_cast<float*>(buffers[3]);
  float* const p4 = static_cast<float*>(buffers[4]);
  float* const p5 = static_cast<float*>(buffers[5]);
  double* const p6 = static_cast<double*>(buffers[6]);
  double* const p7 = static_cast<double*>(buffers[7]);
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
    alignas(64) double first_v5[320];
    alignas(64) double sum_v5[320];
    alignas(64) double squares_v5[320];
    for (int64_t row = begin; row < begin + 1; ++row) {
      const int64_t r1 = row;
      #pragma omp simd
      for (int64_t lane = 0; lane < 320; ++lane) {
        const float v0 = sp::widen(p0[r0 * s3 + r1 * 320 + lane]);
        const float v1 = sp::widen(p1[lane]);
        const float v2 = v0 + v1;
        const float v3 = sp::widen(p2[r0 * 320 + lane]);
        const float v4 = v2 + v3;
        first_v5[lane] = v4;
        sum_v5[lane] = 0;
        squares_v5[lane] = 0;
      }
    }
    int64_t top = begin;
    for (; top + 8 <= end; top += 8) {
      #pragma omp simd
      for (int64_t lane = 0; lane < 320; ++lane) {
        const double base_v5 = first_v5[lane];
        double part_v5 = 0, spread_v5 = 0;
        #pragma GCC unroll 8
        for (int64_t row = top; row < top + 8; ++row) {
          const int64_t r1 = row;
          const float v0 = sp::widen(p0[r0 * s3 + r1 * 320 + lane]);
          const float v1 = sp::widen(p1[lane]);
          const float v2 = v0 + v1;
          const float v3 = sp::widen(p2[r0 * 320 + lane]);
          const float v4 = v2 + v3;
          p3[r0 * s3 + r1 * 320 + lane] = sp::narrow<float>(v4);
          const double delta_v5 = v4 - base_v5;
          part_v5 += delta_v5;
          spread_v5 += delta_v5 * delta_v5;
        }
        sum_v5[lane] += part_v5;
        squares_v5[lane] += spread_v5;
      }
    }
    for (int64_t row = top; row < end; ++row) {
      const int64_t r1 = row;
      #pragma omp simd
      for (int64_t lane = 0; lane < 320; ++lane) {
        const float v0 = sp::widen(p0[r0 * s3 + r1 * 320 + lane]);
        const float v1 = sp::widen(p1[lane]);
        const float v2 = v0 + v1;
        const float v3 = sp::widen(p2[r0 * 320 + lane]);
        const float v4 = v2 + v3;
        p3[r0 * s3 + r1 * 320 + lane] = sp::narrow<float>(v4);
        const double delta_v5 = v4 - first_v5[lane];
        sum_v5[lane] += delta_v5;
        squares_v5[lane] += delta_v5 * delta_v5;
      }
    }
    const double count = static_cast<double>(end - begin);
    const double inverse = 1 / count;
    for (int64_t c0 = 0; c0 < 32; ++c0) {
      double mean_v5 = 0;
      for (int64_t c1 = 0; c1 < 10; ++c1) {
        mean_v5 += first_v5[c0 * 10 + c1] + sum_v5[c0 * 10 + c1] * inverse;
      }
      mean_v5 /= 10;
      double spread_v5 = 0;
      for (int64_t c1 = 0; c1 < 10; ++c1) {
        const double shift_v5 = first_v5[c0 * 10 + c1] + sum_v5[c0 * 10 + c1] * inverse - mean_v5;
        spread_v5 += squares_v5[c0 * 10 + c1] - sum_v5[c0 * 10 + c1] * sum_v5[c0 * 10 + c1] * inverse + count * shift_v5 * shift_v5;
      }
      p6[task * 32 + c0] = mean_v5;
      p7[task * 32 + c0] = spread_v5;
    }
  }
  #pragma omp parallel for schedule(static) if (s4 * chunks > 32768)
  for (int64_t cell = 0; cell < s4; ++cell) {
    const int64_t r0 = cell / 32;
    const int64_t c0 = cell % 32;
    const int64_t start = cell / 32 * chunks * 32 + cell % 32;
    double mean_v5 = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const double length = sp::min<int64_t>(step, s0 - chunk * step);
      mean_v5 += length * p6[start + chunk * 32];
    }
    mean_v5 /= s0;
    double spread_v5 = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const double length = sp::min<int64_t>(step, s0 - chunk * step);
      const double shift = p6[start + chunk * 32] - mean_v5;
      spread_v5 += p7[start + chunk * 32] + length * 10 * shift * shift;
    }
    const float v5 = static_cast<float>(mean_v5);
    const float v6 = static_cast<float>(spread_v5 / (static_cast<double>(s0) * 10));
    const float v7 = 1e-05f;
    const float v8 = v6 + v7;
    const float v9 = 1 / sp::sqrt(v8);
    p4[r0 * 32 + c0] = sp::narrow<float>(v5);
    p5[r0 * 32 + c0] = sp::narrow<float>(v9);
  }
}
