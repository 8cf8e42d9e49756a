// Inline math for generated loops. Everything here is branch-free, so that `omp simd` vectorises
// it, keeps NaN and infinities, and needs no -ffast-math. Errors are against correct rounding.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

namespace sp {

// ---- storage types -----------------------------------------------------------------------------

struct fp16 {
  uint16_t bits;
};

struct bf16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
inline float from_bits(uint32_t x) { return std::bit_cast<float>(x); }

inline float widen(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }

// Bit operations instead of _Float16: conversions of that type stay scalar before GCC 13.
inline float widen(fp16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7FFFu) << 13;
  const uint32_t finite = bits_of(from_bits(magnitude) * 0x1.0p112f);  // denormals too
  const uint32_t infinite = magnitude >= 0x0F800000u ? 0x7F800000u : 0u;  // or NaN
  return from_bits(finite | infinite | uint32_t(x.bits & 0x8000u) << 16);
}

template <class T>
inline T widen(T x) { return x; }

template <class T, class V>
struct Narrow {
  static T of(V x) { return static_cast<T>(x); }
};

template <class V>
struct Narrow<bf16, V> {
  static bf16 of(V x) {
    const float value = static_cast<float>(x);
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(value != value ? 0x7FC0u : rounded)};
  }
};

template <class V>
struct Narrow<fp16, V> {
  static fp16 of(V x) {
    const float value = static_cast<float>(x);
    const uint32_t bits = bits_of(value);
    const uint32_t twice = bits + bits;
    const uint32_t exponent = std::max(twice & 0xFF000000u, 0x71000000u);
    // Too large becomes infinite in the first product; the sum rounds to the bits that fp16 has.
    const float scaled = (from_bits(bits & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
    const uint32_t sum = bits_of(from_bits((exponent >> 1) + 0x07800000u) + scaled);
    const uint32_t magnitude = ((sum >> 13) & 0x7C00u) + (sum & 0xFFFu);
    return {static_cast<uint16_t>((bits >> 16 & 0x8000u) |
                                  (twice > 0xFF000000u ? 0x7E00u : magnitude))};
  }
};

// Round once to the storage type T.
template <class T, class V>
inline T narrow(V x) { return Narrow<T, V>::of(x); }

// The nearest value that T can hold.
template <class T, class V>
inline float round_to(V x) { return widen(narrow<T>(x)); }

// Working memory of one task: a row of values.
template <class T>
class Row {
 public:
  explicit Row(int64_t size)
      : data_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t(64)))) {}
  ~Row() { ::operator delete(data_, std::align_val_t(64)); }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

// ---- elementary --------------------------------------------------------------------------------

template <class T>
constexpr T lowest() {
  using limits = std::numeric_limits<T>;
  return limits::has_infinity ? -limits::infinity() : limits::lowest();
}

template <class T>
constexpr T highest() {
  using limits = std::numeric_limits<T>;
  return limits::has_infinity ? limits::infinity() : limits::max();
}

inline float half(float x) { return x * 0.5f; }
inline double half(double x) { return x * 0.5; }

inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
template <class T>
inline T abs(T x) { return x < 0 ? -x : x; }

inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }

// NaN in either operand gives NaN.
template <class T>
inline T max(T a, T b) { return ((a > b) | (a != a)) ? a : b; }
template <class T>
inline T min(T a, T b) { return ((a < b) | (a != a)) ? a : b; }

inline float sin(float x) { return std::sin(x); }
inline double sin(double x) { return std::sin(x); }
inline float cos(float x) { return std::cos(x); }
inline double cos(double x) { return std::cos(x); }
inline double exp(double x) { return std::exp(x); }
inline double log(double x) { return std::log(x); }
inline double erf(double x) { return std::erf(x); }
inline double tanh(double x) { return std::tanh(x); }

// x limited to [-most, most], NaN stays. On the bits, because the compiler would follow the two
// constants of a float clamp through all that comes after and make branches of them.
inline float clamp(float x, float most) {
  const uint32_t magnitude = std::min(bits_of(x) & 0x7FFFFFFFu, bits_of(most));
  const float limited = from_bits(magnitude | (bits_of(x) & 0x80000000u));
  return x != x ? x : limited;
}

// 2^k * exp(r) with |r| <= ln(2) / 2; Cephes expf. 1 ulp.
inline float exp(float x) {
  const float y = clamp(x, 104.0f);
  const float shifted = y * 1.44269504088896341f + 12582912.0f;  // rounds to an integer
  const float k = shifted - 12582912.0f;
  const float r = __builtin_fmaf(k, 2.12194440e-4f, __builtin_fmaf(k, -0.693359375f, y));
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  // Two factors: 2^k itself may be below the smallest or above the largest float.
  const int32_t whole = static_cast<int32_t>(bits_of(shifted)) - 0x4B400000;
  const int32_t first = whole >> 1;
  const float low = from_bits(static_cast<uint32_t>(first + 127) << 23);
  const float high = from_bits(static_cast<uint32_t>(whole - first + 127) << 23);
  return p * low * high;
}

// Cephes logf: x = 2^e * m with m in [sqrt(1/2), sqrt(2)). 1 ulp.
inline float log(float x) {
  const bool tiny = x < 0x1.0p-126f;
  const float scaled = tiny ? x * 0x1.0p23f : x;
  const uint32_t bits = bits_of(scaled);
  const uint32_t above = bits - 0x3F3504F3u;  // exponent relative to sqrt(1/2)
  const float e =
      static_cast<float>(static_cast<int32_t>(above) >> 23) - (tiny ? 23.0f : 0.0f);
  const float m = from_bits((above & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = __builtin_fmaf(p, m, -1.1514610310e-1f);
  p = __builtin_fmaf(p, m, 1.1676998740e-1f);
  p = __builtin_fmaf(p, m, -1.2420140846e-1f);
  p = __builtin_fmaf(p, m, 1.4249322787e-1f);
  p = __builtin_fmaf(p, m, -1.6668057665e-1f);
  p = __builtin_fmaf(p, m, 2.0000714765e-1f);
  p = __builtin_fmaf(p, m, -2.4999993993e-1f);
  p = __builtin_fmaf(p, m, 3.3333331174e-1f);
  float y = __builtin_fmaf(e, -2.12194440e-4f, p * m * z);
  y = __builtin_fmaf(z, -0.5f, y);
  const float result = __builtin_fmaf(e, 0.693359375f, m + y);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const float finite = x < inf ? result : x;  // inf and NaN give themselves
  return x < 0.0f ? nan : (x == 0.0f ? -inf : finite);
}

// Rational, odd / even in x: 5 ulp near 1, 2 ulp below |x| = 1. Beyond the clamp exactly 1, or
// gelu(x) would not vanish for large negative x.
inline float erf(float x) {
  const float y = clamp(x, 3.8325068f);
  const float z = y * y;
  float p = 2.2905065861350646e-4f;
  p = __builtin_fmaf(p, z, 3.4082910107109506e-3f);
  p = __builtin_fmaf(p, z, 5.0955695062380861e-2f);
  p = __builtin_fmaf(p, z, 1.8520832239976145e-1f);
  p = __builtin_fmaf(p, z, 1.128379143519084f);
  float q = -1.1791602954361697e-7f;
  q = __builtin_fmaf(q, z, 2.3547966471313185e-5f);
  q = __builtin_fmaf(q, z, 1.0179625278914885e-3f);
  q = __builtin_fmaf(q, z, 1.4070470171167667e-2f);
  q = __builtin_fmaf(q, z, 1.1098505178285362e-1f);
  q = __builtin_fmaf(q, z, 4.9746925110067538e-1f);
  q = __builtin_fmaf(q, z, 1.0f);
  const float inside = y * (p / q);
  return abs(x) > 3.8325068f ? __builtin_copysignf(1.0f, x) : inside;
}

// Rational, odd / even in x: 5 ulp near 1.
inline float tanh(float x) {
  const float y = clamp(x, 7.90531110763549805f);
  const float z = y * y;
  float p = -2.76076847742355e-16f;
  p = __builtin_fmaf(p, z, 2.00018790482477e-13f);
  p = __builtin_fmaf(p, z, -8.60467152213735e-11f);
  p = __builtin_fmaf(p, z, 5.12229709037114e-08f);
  p = __builtin_fmaf(p, z, 1.48572235717979e-05f);
  p = __builtin_fmaf(p, z, 6.37261928875436e-04f);
  p = __builtin_fmaf(p, z, 4.89352455891786e-03f);
  float q = 1.19825839466702e-06f;
  q = __builtin_fmaf(q, z, 1.18534705686654e-04f);
  q = __builtin_fmaf(q, z, 2.26843463243900e-03f);
  q = __builtin_fmaf(q, z, 4.89352518554385e-03f);
  return abs(x) > 8.5f ? __builtin_copysignf(1.0f, x) : y * (p / q);
}

}  // namespace sp

// OpenMP's own max and min drop NaN. Private copies start from the identity that the loop set.
#pragma omp declare reduction(nan_max : float, double, int64_t, int32_t, int16_t, int8_t, \
                                  uint8_t, bool : omp_out = sp::max(omp_out, omp_in))     \
    initializer(omp_priv = omp_orig)
#pragma omp declare reduction(nan_min : float, double, int64_t, int32_t, int16_t, int8_t, \
                                  uint8_t, bool : omp_out = sp::min(omp_out, omp_in))     \
    initializer(omp_priv = omp_orig)
