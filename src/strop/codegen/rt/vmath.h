// Inline math for generated loops. Everything here is branch-free, so that `omp simd` vectorises
// it, keeps NaN and infinities, and needs no -ffast-math. Errors are against correct rounding.
// Nothing of the C++ library is included: reading <algorithm> and <cmath> takes longer than compiling
// a kernel, <bit>, <limits> and <type_traits> half as long. What is needed of them is below.
#pragma once

#include <stdint.h>

// What g++ calls for a parallel region. Where its ``if`` says no, libgomp would still make a team of
// one thread, which takes as long as a small kernel (0.4 us).
extern "C" {
void GOMP_parallel_start(void (*)(void*), void*, unsigned);
void GOMP_parallel_end();
int omp_in_parallel();
void* aligned_alloc(decltype(sizeof 0) alignment, decltype(sizeof 0) bytes) noexcept;

[[gnu::visibility("hidden"), gnu::used]] void GOMP_parallel(void (*work)(void*), void* data,
                                                            unsigned threads, unsigned) {
  if (threads == 1 && !omp_in_parallel()) return work(data);
  GOMP_parallel_start(work, data, threads);
  work(data);
  GOMP_parallel_end();
}
}

namespace sp {

// ---- types -------------------------------------------------------------------------------------

template <class T>
struct Same { using type = T; };
template <class T>
using Given = typename Same<T>::type;  // a parameter that decides nothing about T

template <class T>
constexpr bool is_real = __is_same(T, float) || __is_same(T, double);
template <class T>
constexpr bool is_signed = T(-1) < T(0);

template <int bytes>
struct Bits;
template <>
struct Bits<1> { using type = uint8_t; };
template <>
struct Bits<2> { using type = uint16_t; };
template <>
struct Bits<4> { using type = uint32_t; };
template <>
struct Bits<8> { using type = uint64_t; };
template <class T>
using Unsigned = typename Bits<sizeof(T)>::type;

// 0, 1, ... COUNT - 1 as arguments of a template, which g++ and clang write in two ways.
template <class T, T... N>
struct Numbers {};
#if defined(__clang__)
template <int COUNT>
using Counted = __make_integer_seq<Numbers, int, COUNT>;
#else
template <int COUNT>
using Counted = Numbers<int, __integer_pack(COUNT)...>;
#endif

// Lanes of two vectors, those of b counted behind those of a.
template <class V, class Places>
[[gnu::always_inline]] inline V shuffled(V a, V b, Places places) {
#if defined(__clang__)
  constexpr int lanes = sizeof(V) / sizeof(a[0]);
  V found = a;
  for (int lane = 0; lane < lanes; ++lane)
    found[lane] = int(places[lane]) < lanes ? a[places[lane]] : b[places[lane] - lanes];
  return found;
#else
  return __builtin_shuffle(a, b, places);
#endif
}

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float from_bits(uint32_t x) { return __builtin_bit_cast(float, x); }

template <class T>
constexpr T infinity() { return T(__builtin_inf()); }
template <class T>
constexpr T not_a_number() { return T(__builtin_nan("")); }

// -infinity where there is one.
template <class T>
constexpr T lowest() {
  if constexpr (is_real<T>) return -infinity<T>();
  else if constexpr (is_signed<T>) return static_cast<T>(Unsigned<T>(1) << (8 * sizeof(T) - 1));
  else return T(0);
}

template <class T>
constexpr T highest() {
  if constexpr (is_real<T>) return infinity<T>();
  else if constexpr (is_signed<T>) return static_cast<T>(~lowest<T>());
  else return T(-1);
}

// ---- choices -----------------------------------------------------------------------------------

// NaN in either operand gives NaN. Two choices, not one of two tests: of several in a row g++ makes
// branches, and no vectors. A known limit is no NaN, so that one instruction does; of zeros the sign counts.
template <class T>
inline T max(T a, T b) {
  if (__builtin_constant_p(b) && b == b && b != 0) return b > a ? b : a;
  const T larger = a > b ? a : b;
  return a != a ? a : larger;
}
template <class T>
inline T min(T a, T b) {
  if (__builtin_constant_p(b) && b == b && b != 0) return b < a ? b : a;
  const T smaller = a < b ? a : b;
  return a != a ? a : smaller;
}

// By bits: g++ turns a choice between values that are loaded for it alone into branches, and makes
// no vectors of the loop around.
template <class T>
inline T choose(bool condition, T a, T b) {
  if constexpr (__is_same(T, float)) {
    const uint32_t mask = -static_cast<uint32_t>(condition);
    return from_bits((bits_of(a) & mask) | (bits_of(b) & ~mask));
  } else {
    return condition ? a : b;
  }
}

// ---- storage types -----------------------------------------------------------------------------

struct fp16 {
  uint16_t bits;
};

struct bf16 {
  uint16_t bits;
};

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
    const uint32_t exponent = max(twice & 0xFF000000u, 0x71000000u);
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
      : data_(static_cast<T*>(aligned_alloc(64, (size * sizeof(T) / 64 + 1) * 64))) {
    if (!data_) __builtin_abort();  // no memory: there is nobody to tell in a thread of a kernel
  }
  ~Row() { __builtin_free(data_); }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

// ---- rows --------------------------------------------------------------------------------------

// Whole rows in vectors by hand: what is left over at the end is one vector that overlaps, where a
// loop would take as long for up to fifteen single elements as for two hundred others.
using Floats = float __attribute__((vector_size(32), aligned(4)));
using Lanes = int32_t __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(64)));
constexpr int64_t LANES = 8;

inline Floats at(const float* x) { return *reinterpret_cast<const Floats*>(x); }
inline Doubles wide(Floats x) { return __builtin_convertvector(x, Doubles); }

// The sum of positive numbers: eight of them in fp32, where they lose a quarter of an ulp that the
// number of such groups averages out, and fp64 from there on.
inline double sum(const float* x, int64_t size) {
  double total = 0;
  if (size < LANES) {
    for (int64_t i = 0; i < size; ++i) total += x[i];
    return total;
  }
  Doubles totals = {};
  int64_t i = 0;
  for (; i + 8 * LANES <= size; i += 8 * LANES) {
    const float* const y = x + i;
    totals += wide(((at(y) + at(y + 8)) + (at(y + 16) + at(y + 24))) +
                   ((at(y + 32) + at(y + 40)) + (at(y + 48) + at(y + 56))));
  }
  for (; i + LANES <= size; i += LANES) totals += wide(at(x + i));
  const Lanes lane = {0, 1, 2, 3, 4, 5, 6, 7};
  if (i < size) {
    const Floats last = at(x + size - LANES);
    totals += wide(lane >= static_cast<int32_t>(LANES - (size - i)) ? last : Floats{});
  }
  return ((totals[0] + totals[4]) + (totals[2] + totals[6])) +
         ((totals[1] + totals[5]) + (totals[3] + totals[7]));
}

// The first number, and sums of what others are above it, and of the squares of that, in fp64. Their
// lanes are added up by pairs: of a loop under ``omp simd`` g++ adds up to 64 one behind the other,
// which takes longer than a row of 256.
struct Moments { double first, sum, squares; };

inline double total(Doubles x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

inline Moments moments(const float* x, int64_t size) {
  if (!size) return {0, 0, 0};
  constexpr int MANY = 4;
  const double first = x[0];
  Doubles sums[MANY] = {}, squares[MANY] = {};
  const auto add = [&](int n, Doubles off) {
    sums[n] += off;
    squares[n] += off * off;
  };
  int64_t i = 0;
  for (; i + MANY * LANES <= size; i += MANY * LANES)
#pragma GCC unroll 4
    for (int n = 0; n < MANY; ++n) add(n, wide(at(x + i + n * LANES)) - first);
  for (; i + LANES <= size; i += LANES) add(0, wide(at(x + i)) - first);
  Moments found = {first, total((sums[0] + sums[1]) + (sums[2] + sums[3])),
                   total((squares[0] + squares[1]) + (squares[2] + squares[3]))};
  for (; i < size; ++i) {
    const double off = x[i] - first;
    found.sum += off;
    found.squares += off * off;
  }
  return found;
}

// The largest number, as if there were no NaN.
inline float largest(const float* x, int64_t size) {
  float most = -infinity<float>();
  if (size < LANES) {
    for (int64_t i = 0; i < size; ++i) most = x[i] > most ? x[i] : most;
    return most;
  }
  const auto larger = [](Floats a, Floats b) { return b > a ? b : a; };
  Floats a = Floats{} + most, b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES) {
    a = larger(a, at(x + i));
    b = larger(b, at(x + i + 8));
    c = larger(c, at(x + i + 16));
    d = larger(d, at(x + i + 24));
  }
  for (; i + LANES <= size; i += LANES) a = larger(a, at(x + i));
  b = larger(b, at(x + size - LANES));
  const Floats best = larger(larger(a, b), larger(c, d));
#pragma omp simd reduction(max : most)
  for (int64_t k = 0; k < LANES; ++k) most = best[k] > most ? best[k] : most;
  return most;
}

// ---- lookups -----------------------------------------------------------------------------------

// A negative place counts from the end.
inline int64_t wrapped(int64_t place, int64_t size) { return place < 0 ? place + size : place; }

inline bool is_outside(int64_t place, int64_t size) {
  return static_cast<uint64_t>(place) >= static_cast<uint64_t>(size);
}

// Of which the compiler does not know that it is zero. g++ 12 takes a condition that is a place of a
// lookup, such as (x > 0), for the mask that it is in a vector: it reads at -1 where it holds.
inline int32_t unseen_zero() {
  int32_t zero = 0;
  asm("" : "+r"(zero));
  return zero;
}

// Threads may do so at once.
inline void report(int64_t* mark) { __atomic_store_n(mark, int64_t(1), __ATOMIC_RELAXED); }

// Rows that are about to be read. Nothing is read where there is no row of this number.
template <class T>
inline void prefetch(const T* table, int64_t row, int64_t stride, int64_t width) {
  const uint64_t begin = reinterpret_cast<uint64_t>(table) + uint64_t(row) * stride * sizeof(T);
  for (uint64_t at = 0; at < width * sizeof(T); at += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(begin + at));
}

// ---- elementary --------------------------------------------------------------------------------

inline float half(float x) { return x * 0.5f; }
inline double half(double x) { return x * 0.5; }

inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
template <class T>
inline T abs(T x) { return x < 0 ? -x : x; }

inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }

// NaN in one operand gives the other one.
template <class T>
inline T fmax(T a, T b) {
  const T larger = a > b ? a : b;
  return b != b ? a : larger;
}
template <class T>
inline T fmin(T a, T b) {
  const T smaller = a < b ? a : b;
  return b != b ? a : smaller;
}

// Between two bounds; NaN stays.
template <class T>
inline T limit(T x, Given<T> least, Given<T> most) {
  return min(max(x, least), most);
}

// The same where nobody asks for the sign of a zero: two instructions.
inline float between(float x, float least, float most) {
  const float larger = least > x ? least : x;
  return most < larger ? most : larger;
}

// The whole number nearest to x plus ``zero``, between two whole numbers, all of them below 2^20; NaN
// becomes the least. Limits come first: then a sum rounds, to even, and no number is converted.
inline int32_t code(float x, float zero, float least, float most) {
  const float low = least - zero, high = most - zero;
  const float larger = x > low ? x : low, limited = larger < high ? larger : high;
  const uint32_t bits = bits_of(limited + 12582912.0f);
  return static_cast<int32_t>(bits - 0x4B400000u) + static_cast<int32_t>(zero);
}

template <class T>
inline T sign(T x) { return T(x > 0) - T(x < 0); }
inline bool signbit(float x) { return bits_of(x) >> 31; }
inline bool signbit(double x) { return __builtin_bit_cast(uint64_t, x) >> 63; }
inline float copysign(float x, float y) { return __builtin_copysignf(x, y); }
inline double copysign(double x, double y) { return __builtin_copysign(x, y); }

inline float floor(float x) { return __builtin_floorf(x); }
inline double floor(double x) { return __builtin_floor(x); }
inline float ceil(float x) { return __builtin_ceilf(x); }
inline double ceil(double x) { return __builtin_ceil(x); }
inline float trunc(float x) { return __builtin_truncf(x); }
inline double trunc(double x) { return __builtin_trunc(x); }
inline float round(float x) { return __builtin_rintf(x); }
inline double round(double x) { return __builtin_rint(x); }

// ---- division ----------------------------------------------------------------------------------

// Towards zero. 0 where there is no answer, and the smallest integer divided by -1 is itself.
template <class T>
inline T quotient(T a, T b) {
  if constexpr (is_signed<T>) {
    if (b == T(-1)) return static_cast<T>(0 - static_cast<Unsigned<T>>(a));
  }
  return b == 0 ? T(0) : static_cast<T>(a / b);
}

inline float fmod(float a, float b) { return __builtin_fmodf(a, b); }
inline double fmod(double a, double b) { return __builtin_fmod(a, b); }
template <class T>
inline T fmod(T a, T b) { return static_cast<T>(a - quotient(a, b) * b); }

// The result has the sign of the divisor, as in Python.
template <class T>
inline T remainder(T a, T b) {
  const T rest = fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? static_cast<T>(rest + b) : rest;
}

template <class T>
inline T floor_divide(T a, T b) {
  const T rest = fmod(a, b);
  const T one_less = rest != 0 && (rest < 0) != (b < 0);
  if constexpr (!is_real<T>) return static_cast<T>(quotient(a, b) - one_less);
  else return b == 0 ? a / b : copysign(abs(round((a - rest) / b - one_less)), a / b);
}

template <class T>
inline T shift_left(T x, T count) {
  const bool is_out = count < 0 || count >= T(8 * sizeof(T));
  return is_out ? T(0) : static_cast<T>(static_cast<Unsigned<T>>(x) << count);
}

// What is left of a shift by the width or more, or by a negative count, is the sign.
template <class T>
inline T shift_right(T x, T count) {
  constexpr T last = 8 * sizeof(T) - 1;
  const bool is_out = count < 0 || count > last;
  if constexpr (!is_signed<T>) return is_out ? T(0) : static_cast<T>(x >> count);
  else return static_cast<T>(x >> (is_out ? last : count));
}

// ---- transcendental ----------------------------------------------------------------------------

inline float sin(float x) { return __builtin_sinf(x); }
inline double sin(double x) { return __builtin_sin(x); }
inline float cos(float x) { return __builtin_cosf(x); }
inline double cos(double x) { return __builtin_cos(x); }
inline float tan(float x) { return __builtin_tanf(x); }
inline double tan(double x) { return __builtin_tan(x); }
inline double exp(double x) { return __builtin_exp(x); }
inline double log(double x) { return __builtin_log(x); }
inline double erf(double x) { return __builtin_erf(x); }
inline double tanh(double x) { return __builtin_tanh(x); }

// x limited to [-most, most], NaN stays. On the bits, because the compiler would follow the two
// constants of a float clamp through all that comes after and make branches of them.
inline float clamp(float x, float most) {
  const uint32_t magnitude = min(bits_of(x) & 0x7FFFFFFFu, bits_of(most));
  const float limited = from_bits(magnitude | (bits_of(x) & 0x80000000u));
  return x != x ? x : limited;
}

template <class T>
inline T or_nan(bool is_valid, T x) {
  return is_valid ? x : not_a_number<T>();
}

// x rounded to an integer, for |x| < 2^22, as a float and (with ``whole``) as an int.
inline float shifted(float x) { return x + 12582912.0f; }
inline int32_t whole(float shifted) { return static_cast<int32_t>(bits_of(shifted)) - 0x4B400000; }

// exp(r) - 1 with |r| <= ln(2) / 2; Cephes expf.
inline float expm1_of_rest(float r) {
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  return __builtin_fmaf(p, r * r, r);
}

// x rounded to an integer k, as k + BIASED: its bits end in k + 254, two exponents of 2^0.
constexpr float BIASED = 12582912.0f + 254.0f;

// p * 2^k in two factors: 2^k itself may be below the smallest or above the largest float.
inline float scale(float p, float biased) {
  const uint32_t both = bits_of(biased), first = both >> 1;
  return p * from_bits(first << 23) * from_bits((both - first) << 23);
}

// 2^k * exp(r). 1 ulp.
inline float exp(float x) {
  const float y = clamp(x, 104.0f);
  const float biased = y * 1.44269504088896341f + BIASED;
  const float k = biased - BIASED;
  const float r = __builtin_fmaf(k, 2.12194440e-4f, __builtin_fmaf(k, -0.693359375f, y));
  return scale(expm1_of_rest(r) + 1.0f, biased);
}

// exp(x) for x <= 0 or NaN, and nothing below e^-87: for softmax, beside whose largest power, 1,
// that is nothing indeed. Two thirds of the instructions of exp. 1 ulp above e^-10.
inline float exp_of_negative(float x) {
  constexpr float biased_zero = 12582912.0f + 127.0f;
  const float y = x < -87.0f ? -87.0f : x;
  const float biased = y * 1.44269504088896341f + biased_zero;
  const float r = __builtin_fmaf(biased - biased_zero, -0.693147180559945309f, y);
  const float power = (expm1_of_rest(r) + 1.0f) * from_bits(bits_of(biased) << 23);
  return x < -87.0f ? 0.0f : power;
}

inline float exp2(float x) {
  const float y = clamp(x, 151.0f);
  const float biased = y + BIASED;
  const float r = (y - (biased - BIASED)) * 0.693147180559945309f;
  return scale(expm1_of_rest(r) + 1.0f, biased);
}
inline double exp2(double x) { return __builtin_exp2(x); }

// exp(y) - 1 for |y| <= 24: 2^k * (exp(r) - 1) + (2^k - 1), which cancels nowhere. 2 ulp.
inline float expm1_within(float y) {
  const float place = shifted(y * 1.44269504088896341f);
  const float k = place - 12582912.0f;
  const float r = __builtin_fmaf(k, 2.12194440e-4f, __builtin_fmaf(k, -0.693359375f, y));
  const float power = from_bits(static_cast<uint32_t>(whole(place) + 127) << 23);
  return __builtin_fmaf(power, expm1_of_rest(r), power - 1.0f);
}

inline float expm1(float x) {
  const float large = x > 24.0f ? exp(x) : expm1_within(clamp(x, 24.0f));
  return x == 0.0f ? x : large;  // -0.0 stays
}
inline double expm1(double x) { return __builtin_expm1(x); }

// Cephes logf: x = 2^e * m with m in [sqrt(1/2), sqrt(2)), log(m) = m - 1 + rest.
struct Logarithm {
  float e, m1, rest;
};

inline Logarithm take_log(float x) {
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
  return {e, m, __builtin_fmaf(z, -0.5f, p * m * z)};
}

// What the logarithm of x is when x has none of its own, else ``result``.
inline float or_special(float x, float result) {
  const float nan = not_a_number<float>();
  const float inf = infinity<float>();
  const float finite = x < inf ? result : x;  // inf and NaN give themselves
  return x < 0.0f ? nan : (x == 0.0f ? -inf : finite);
}

// 1 ulp.
inline float log(float x) {
  const Logarithm l = take_log(x);
  const float y = l.m1 + __builtin_fmaf(l.e, -2.12194440e-4f, l.rest);
  return or_special(x, __builtin_fmaf(l.e, 0.693359375f, y));
}

// 2 ulp, and exact for powers of two.
inline float log2(float x) {
  const Logarithm l = take_log(x);
  const float high = (l.m1 + l.rest) * 1.44269504088896341f;
  return or_special(x, l.e + high);
}
inline double log2(double x) { return __builtin_log2(x); }

// 2 ulp.
inline float log10(float x) {
  const Logarithm l = take_log(x);
  const float y = __builtin_fmaf(l.m1 + l.rest, 0.434294481903251828f, l.e * 4.6050389811952137e-6f);
  return or_special(x, __builtin_fmaf(l.e, 0.301025390625f, y));
}
inline double log10(double x) { return __builtin_log10(x); }

// log(u) * (x / (u - 1)) with u = 1 + x rounded: the errors of both factors cancel (Kahan). 3 ulp.
inline float log1p(float x) {
  const float u = 1.0f + x, rest = u - 1.0f;
  const float scaled = log(u) * (x / rest);
  const float inf = infinity<float>();
  return rest == 0.0f ? x : (x < inf ? scaled : x);
}
inline double log1p(double x) { return __builtin_log1p(x); }

// log2(x) for x > 0, in fp64 but good for fp32 only: relative error 2^-40.
inline double log2_wide(float x) {
  const bool tiny = x < 0x1.0p-126f;
  const uint32_t above = bits_of(tiny ? x * 0x1.0p23f : x) - 0x3F3504F3u;
  const int32_t e = (static_cast<int32_t>(above) >> 23) - (tiny ? 23 : 0);
  const double m = from_bits((above & 0x007FFFFFu) + 0x3F3504F3u);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 1.0 / 15;
  p = __builtin_fma(p, z, 1.0 / 13);
  p = __builtin_fma(p, z, 1.0 / 11);
  p = __builtin_fma(p, z, 1.0 / 9);
  p = __builtin_fma(p, z, 1.0 / 7);
  p = __builtin_fma(p, z, 1.0 / 5);
  p = __builtin_fma(p, z, 1.0 / 3);
  p = __builtin_fma(p, z, 1.0);
  return __builtin_fma(s * p, 2.8853900817779268, static_cast<double>(e));
}

// 2^x for |x| <= 1000, in fp64 but good for fp32 only.
inline double exp2_wide(double x) {
  const double place = x + 6755399441055744.0;  // rounds to an integer
  const double r = (x - (place - 6755399441055744.0)) * 0.69314718055994531;
  double p = 1.0 / 362880;
  p = __builtin_fma(p, r, 1.0 / 40320);
  p = __builtin_fma(p, r, 1.0 / 5040);
  p = __builtin_fma(p, r, 1.0 / 720);
  p = __builtin_fma(p, r, 1.0 / 120);
  p = __builtin_fma(p, r, 1.0 / 24);
  p = __builtin_fma(p, r, 1.0 / 6);
  p = __builtin_fma(p, r, 0.5);
  p = __builtin_fma(p, r, 1.0);
  p = __builtin_fma(p, r, 1.0);
  const uint64_t k = __builtin_bit_cast(uint64_t, place) + 1023;
  return p * __builtin_bit_cast(double, k << 52);
}

// 2^(y * log2|x|), then the sign. 1 ulp.
inline float pow(float x, float y) {
  const float inf = infinity<float>();
  const float magnitude = abs(x);
  const double finite = log2_wide(magnitude);
  const double infinite = magnitude == 0.0f ? -inf : magnitude;
  const double power = y * (magnitude > 0.0f && magnitude < inf ? finite : infinite);
  const double bounded = min(max(power, -300.0), 300.0);
  float result = static_cast<float>(exp2_wide(bounded));
  result = power != power ? static_cast<float>(power) : result;
  const float nearest = round(y);
  const bool is_odd = nearest == y && abs(y) < 0x1.0p24f && round(y * 0.5f) != y * 0.5f;
  result = signbit(x) && is_odd ? -result : result;
  result = or_nan(!(x < 0.0f && x > -inf && nearest != y && y == y), result);
  const bool is_one = x == 1.0f || y == 0.0f || (x == -1.0f && abs(y) == inf);
  return is_one ? 1.0f : result;
}
inline double pow(double x, double y) { return __builtin_pow(x, y); }

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

// gelu(x) = x * P(normal <= x) where 16 bits are kept of it, by the polynomial of ``ir/functions.py``:
// log2(P(normal <= -|x|)), of which 2^x is within 1e-7. No division, and half of erf's instructions.
inline float half_gelu(float x) {
  constexpr float biased_zero = 12582912.0f + 127.0f;
  const float a = abs(x);
  float t = __builtin_fmaf(a, -1.16784452e-6f, 5.14027517e-5f);
  t = __builtin_fmaf(t, a, -8.70034642e-4f);
  t = __builtin_fmaf(t, a, 8.33262074e-3f);
  t = __builtin_fmaf(t, a, -5.37043910e-2f);
  t = __builtin_fmaf(t, a, -4.58637588e-1f);
  t = __builtin_fmaf(t, a, -1.15120849f);
  t = __builtin_fmaf(t, a, -0.999996922f);
  const float y = t < -126.0f ? -126.0f : t;
  const float biased = y + biased_zero, r = y - (biased - biased_zero);
  float p = 1.32764510e-3f;
  p = __builtin_fmaf(p, r, 9.67554002e-3f);
  p = __builtin_fmaf(p, r, 5.55071297e-2f);
  p = __builtin_fmaf(p, r, 2.40221200e-1f);
  p = __builtin_fmaf(p, r, 6.93146970e-1f);
  p = __builtin_fmaf(p, r, 1.00000007f);
  const float chance = t < -126.0f ? 0.0f : p * from_bits(bits_of(biased) << 23);
  return x * (x > 0.0f ? 1.0f - chance : chance);
}

// (e - 1) / (e + 1) with e = exp(2 |x|). 2.3 ulp, 1.5 from 0.4 on, where the gradient 1 - tanh^2 would
// show more.
inline float tanh(float x) {
  const float t = expm1_within(2.0f * clamp(abs(x), 10.0f));
  return copysign(t / (t + 2.0f), x);
}

// exp(x / 2)^2 where exp(x) would be infinite too early. 3 ulp.
inline float cosh(float x) {
  const float e = exp(abs(x) * 0.5f), large = (0.5f * e) * e;
  return abs(x) > 16.0f ? large : large + 0.5f / (e * e);
}
inline double cosh(double x) { return __builtin_cosh(x); }

inline float sinh(float x) {
  const float e = exp(abs(x) * 0.5f), large = (0.5f * e) * e;
  const float t = expm1(clamp(abs(x), 16.0f));
  const float small = 0.5f * (t + t / (t + 1.0f));
  return copysign(abs(x) > 16.0f ? large : small, x);
}
inline double sinh(double x) { return __builtin_sinh(x); }

inline float asinh(float x) {
  const float a = abs(x), square = a * a;
  const float small = log1p(a + square / (1.0f + sqrt(square + 1.0f)));
  return copysign(a > 4096.0f ? log(a) + 0.693147180559945309f : small, x);
}
inline double asinh(double x) { return __builtin_asinh(x); }

inline float acosh(float x) {
  const float t = x - 1.0f;
  const float small = log1p(t + sqrt(t * (2.0f + t)));
  return or_nan(x >= 1.0f, x > 4096.0f ? log(x) + 0.693147180559945309f : small);
}
inline double acosh(double x) { return __builtin_acosh(x); }

inline float atanh(float x) {
  const float a = abs(x);
  return copysign(0.5f * log1p((a + a) / (1.0f - a)), x);
}
inline double atanh(double x) { return __builtin_atanh(x); }

// Cephes atanf on [0, 1]. 2 ulp.
inline float atan_of_fraction(float a) {
  const bool is_upper = a > 0.4142135623730950f;
  const float x = is_upper ? (a - 1.0f) / (a + 1.0f) : a;
  const float z = x * x;
  float p = 8.05374449538e-2f;
  p = __builtin_fmaf(p, z, -1.38776856032e-1f);
  p = __builtin_fmaf(p, z, 1.99777106478e-1f);
  p = __builtin_fmaf(p, z, -3.33329491539e-1f);
  const float y = __builtin_fmaf(p * z, x, x);
  return is_upper ? 0.785398163397448310f + y : y;
}

inline float atan(float x) {
  const float a = abs(x);
  const float y = atan_of_fraction(a > 1.0f ? 1.0f / a : a);
  return copysign(a > 1.0f ? 1.57079632679489662f - y : y, x);
}
inline double atan(double x) { return __builtin_atan(x); }

inline float atan2(float y, float x) {
  const float a = abs(x), b = abs(y), most = max(a, b), least = min(a, b);
  const bool is_even = a == b;  // 0/0 and inf/inf count as 1, but for the zero
  const float fraction = is_even ? (a == 0.0f ? 0.0f : 1.0f) : least / most;
  const float steep = atan_of_fraction(fraction);
  const float right = b > a ? 1.57079632679489662f - steep : steep;
  const float turned = signbit(x) ? 3.14159265358979324f - right : right;
  return copysign(or_nan(x == x && y == y, turned), y);
}
inline double atan2(double y, double x) { return __builtin_atan2(y, x); }

// Cephes asinf: |x| <= 1/2, and by halves of the angle above.
inline float asin_small(float x, float z) {
  float p = 4.2163199048e-2f;
  p = __builtin_fmaf(p, z, 2.4181311049e-2f);
  p = __builtin_fmaf(p, z, 4.5470025998e-2f);
  p = __builtin_fmaf(p, z, 7.4953002686e-2f);
  p = __builtin_fmaf(p, z, 1.6666752422e-1f);
  return __builtin_fmaf(p * z, x, x);
}

inline float asin(float x) {
  const float a = abs(x);
  const bool is_steep = a > 0.5f;
  const float z = is_steep ? 0.5f * (1.0f - a) : a * a;
  const float y = asin_small(is_steep ? sqrt(z) : a, z);
  return copysign(is_steep ? 1.57079632679489662f - (y + y) : y, x);
}
inline double asin(double x) { return __builtin_asin(x); }

inline float acos(float x) {
  const float a = abs(x);
  const bool is_steep = a > 0.5f;
  const float z = is_steep ? 0.5f * (1.0f - a) : a * a;
  const float y = asin_small(is_steep ? sqrt(z) : a, z);
  const float steep = x < 0.0f ? 3.14159265358979324f - (y + y) : y + y;
  return is_steep ? steep : 1.57079632679489662f - copysign(y, x);
}
inline double acos(double x) { return __builtin_acos(x); }

inline float hypot(float x, float y) {
  const double a = x, b = y;
  const float inf = infinity<float>();
  const bool is_infinite = abs(x) == inf || abs(y) == inf;  // even beside NaN
  return is_infinite ? inf : static_cast<float>(__builtin_sqrt(a * a + b * b));
}
inline double hypot(double x, double y) { return __builtin_hypot(x, y); }

// x * tanh(log(1 + e^x)) as a quotient of polynomials in e^x.
inline float mish(float x) {
  const float e = exp(min(x, 20.0f)), n = e * (e + 2.0f);
  return x * (n / (n + 2.0f));
}
inline double mish(double x) { return x * __builtin_tanh(__builtin_log1p(__builtin_exp(x))); }

template <class T>
inline T mish_backward(T gradient, T x) {
  const T e = exp(min(x, T(20))), n = e * (e + 2), y = n / (n + 2);
  return gradient * (y + x * (e / (1 + e)) * (1 - y * y));
}

// 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u.
template <class T>
inline T gelu_tanh_backward(T gradient, T x) {
  const T cubic = T(0.07135481627260025) * x * x, linear = T(1.5957691216057308);
  const T open = 1 / (1 + exp(-x * (linear + cubic)));
  return gradient * open * (1 + x * (1 - open) * (linear + 3 * cubic));
}

inline float erfc(float x) { return __builtin_erfcf(x); }
inline double erfc(double x) { return __builtin_erfc(x); }
inline float lgamma(float x) { return __builtin_lgammaf(x); }
inline double lgamma(double x) { return __builtin_lgamma(x); }

// Giles' approximation, then Newton's rule in fp64.
inline double erfinv(double x) {
  const double a = abs(x);
  const double w = -__builtin_log((1.0 - a) * (1.0 + a)), t = w < 5.0 ? w - 2.5 : __builtin_sqrt(w) - 3.0;
  static constexpr double middle[] = {2.81022636e-08, 3.43273939e-07, -3.5233877e-06,
                                      -4.39150654e-06, 0.00021858087, -0.00125372503,
                                      -0.00417768164, 0.246640727, 1.50140941};
  static constexpr double tail[] = {-0.000200214257, 0.000100950558, 0.00134934322,
                                    -0.00367342844, 0.00573950773, -0.0076224613,
                                    0.00943887047, 1.00167406, 2.83297682};
  double p = 0.0;
  for (int i = 0; i < 9; ++i) p = p * t + (w < 5.0 ? middle[i] : tail[i]);
  double y = p * a;
  for (int i = 0; i < 2; ++i) {
    const double error = a < 0.5 ? __builtin_erf(y) - a : (1.0 - a) - __builtin_erfc(y);
    y -= error * 0.88622692545275801 * __builtin_exp(y * y);
  }
  if (!(a < 1.0)) y = a == 1.0 ? infinity<double>()
                               : not_a_number<double>();
  return copysign(y, x);
}
inline float erfinv(float x) { return static_cast<float>(erfinv(static_cast<double>(x))); }

// ---- numbers of bits ---------------------------------------------------------------------------

inline float half_of_bits(int32_t x) { return widen(fp16{static_cast<uint16_t>(x)}); }
inline float float_of_bits(int32_t x) { return from_bits(static_cast<uint32_t>(x)); }
inline int32_t bits_of_float(float x) { return static_cast<int32_t>(bits_of(x)); }

// See ir/functions.py.
inline int32_t e4m3_code(float x) {
  const int32_t bits = bits_of_float(x), size = bits & 0x7FFFFFFF;
  const int32_t normal = (size - 0x3BF80001 + ((size >> 20) & 1)) >> 20;
  const int32_t small = bits_of_float(float_of_bits(size) + 16384.0f) - 0x46800000;
  int32_t code = size < 0x3C800000 ? small : normal;
  code = code < 0x7E ? code : 0x7E;
  code = size <= 0x7F800000 ? code : 0x7F;
  return code | ((bits >> 24) & 0x80);
}

// ---- random numbers: see ir/philox.py ----------------------------------------------------------

inline float uniform(int64_t seed, int64_t position) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(uint64_t(seed) >> 32);
  uint32_t c0 = uint32_t(position), c1 = uint32_t(uint64_t(position) >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint32_t folded = c0 >> 31 ? ~c0 : c0;  // -x - 1 of a negative word
  return float(int32_t(folded)) * 4.6566127342e-10f;
}

}  // namespace sp

// OpenMP's own max and min drop NaN. Private copies start from the identity that the loop set.
#pragma omp declare reduction(nan_max : float, double, int64_t, int32_t, int16_t, int8_t, \
                                  uint8_t, bool : omp_out = sp::max(omp_out, omp_in))     \
    initializer(omp_priv = omp_orig)
#pragma omp declare reduction(nan_min : float, double, int64_t, int32_t, int16_t, int8_t, \
                                  uint8_t, bool : omp_out = sp::min(omp_out, omp_in))     \
    initializer(omp_priv = omp_orig)
