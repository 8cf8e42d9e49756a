// Attention on a CPU: softmax(q k^T * scale + mask) v, one function for all sizes and strides.
//
// Keys and values are packed once a call, so that vectors lie along keys for the scores and along
// the columns of values for the weighted sums. Some queries at a time go over chunks of keys; their
// scores stay in the first cache. Row maxima, powers and sums are fp32. What a row gives depends on
// its own sizes alone: neither on threads nor on the rows beside it.
//
// A word is what one step of a product takes of one operand: a float, or two bf16 (PAIRED), whose
// products vdpbf16ps, or bfdot on AArch64, sums in fp32.
#ifndef STROP_CPU_ATTENTION
#define STROP_CPU_ATTENTION

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace attention {
namespace {  // each kernel has its own

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 4;  // of a vector; vectors beside each other in a tile
#elif defined(__AVX__)
constexpr int LANES = 8, WIDE = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, WIDE = 4;
#else
constexpr int LANES = 4, WIDE = 2;
#endif
constexpr int ROWS = 6;         // queries of a tile: 24 sums, 4 columns and a row in 32 registers
constexpr int BLOCK = WIDE * LANES;
constexpr int64_t QUERIES = 48;   // of a task, beside which a chunk of keys stays in the second cache
constexpr int64_t KEYS = 512;     // of a chunk, a multiple of BLOCK
constexpr int64_t STEPS = 128;    // that are summed by themselves: the error of a sum grows with them
constexpr int64_t MOST_HEAD = 256;
constexpr double THREADED_FROM = 2e6;  // operations: 20 us of one core

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
// the same at any address, of whatever type
typedef float LooseFloats __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef uint32_t Word __attribute__((may_alias));

enum MaskKind { NONE, MARKS, NUMBERS };

struct Strides {
  int64_t batch, head, row, column;  // in elements
};

// What the scalars of a launch say, in their order.
struct Sizes {
  int64_t batch, heads, queries, keys, head, values;
  int64_t shared;     // heads of queries for each head of keys
  int64_t is_causal;  // a query attends to the keys that are no later than itself
  int64_t mask_kind;
  double scale;
  Strides q, k, v, out, mask;
};

inline int64_t up_to(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline Floats splat(float x) { return x - Floats{}; }
inline Words splat(uint32_t x) { return x - Words{}; }
inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
inline void store(void* to, Words x) { *static_cast<LooseWords*>(to) = x; }
inline void store(void* to, Floats x) { *static_cast<LooseFloats*>(to) = x; }
constexpr float LOWEST = -__builtin_inff();

// ---- packing -----------------------------------------------------------------------------------

inline uint32_t bits(float x) { return sp::bits_of(x); }
inline uint32_t bits(sp::bf16 x) { return x.bits; }

// Words ``begin`` and after of a row, as many as a vector has; zeros behind its ``count`` elements.
template <class T, bool PAIRED>
inline Words words(const T* row, int64_t stride, int64_t count, int64_t begin) {
  constexpr int each = PAIRED ? 2 : 1;
  const int64_t first = begin * each;
  if (stride == 1 && first + each * LANES <= count) {
    if constexpr (PAIRED || sizeof(T) == 4) {
      return *reinterpret_cast<const LooseWords*>(row + first);
    } else {
      const Halves found = *reinterpret_cast<const LooseHalves*>(row + first);
      return __builtin_convertvector(found, Words) << 16;
    }
  }
  Words found = {};
  for (int lane = 0; lane < LANES && first + each * lane < count; ++lane) {
    const int64_t at = first + each * lane;
    if constexpr (PAIRED) {
      const uint32_t second = at + 1 < count ? bits(row[(at + 1) * stride]) : 0;
      found[lane] = bits(row[at * stride]) | second << 16;
    } else {
      found[lane] = bits(sp::widen(row[at * stride]));
    }
  }
  return found;
}

// The elements of two rows, side by side in words.
inline Words both(const sp::bf16* row, const sp::bf16* next, int64_t stride, int64_t count,
                  int64_t begin) {
  if (stride == 1 && begin + LANES <= count) {
    const Halves low = *reinterpret_cast<const LooseHalves*>(row + begin);
    const Halves high = next ? Halves(*reinterpret_cast<const LooseHalves*>(next + begin)) : Halves{};
    return __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
  }
  Words found = {};
  for (int lane = 0; lane < LANES && begin + lane < count; ++lane) {
    const int64_t at = (begin + lane) * stride;
    found[lane] = bits(row[at]) | (next ? uint32_t(bits(next[at])) << 16 : 0);
  }
  return found;
}

// Swaps blocks of HALF x HALF words over the diagonal, then smaller ones.
template <int HALF>
inline void transpose(Words (&rows)[LANES]) {
  Words low, high;
  for (int lane = 0; lane < LANES; ++lane) {
    low[lane] = lane & HALF ? LANES + lane - HALF : lane;
    high[lane] = lane & HALF ? LANES + lane : lane + HALF;
  }
#pragma GCC unroll 16
  for (int row = 0; row < LANES; ++row) {
    if (row & HALF) continue;
    const Words a = rows[row], b = rows[row + HALF];
    rows[row] = sp::shuffled(a, b, low);
    rows[row + HALF] = sp::shuffled(a, b, high);
  }
  if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}

#if defined(__AVX512F__)
// One 128th part of a vector from memory: a load alone, where others would take it out of vectors.
template <int PART>
[[gnu::always_inline]] inline void load_part(Words& x, const Word* from) {
  struct Part { Word words[4]; };
  const uint16_t mask = 0xF << 4 * PART;
  asm("vbroadcasti32x4 %1, %0%{%2%}" : "+v"(x) : "m"(*reinterpret_cast<const Part*>(from)), "Yk"(mask));
}

[[gnu::always_inline]] inline Words beside(Words a, Words b, int half) {  // words of each 128 bits
  Words places;
  for (int lane = 0; lane < LANES; ++lane)
    places[lane] = lane / 4 * 4 + half * 2 + lane % 4 / 2 + lane % 2 * LANES;
  return sp::shuffled(a, b, places);
}

[[gnu::always_inline]] inline Words beside_pairs(Words a, Words b, int half) {
  Words places;
  for (int lane = 0; lane < LANES; ++lane)
    places[lane] = lane / 4 * 4 + half * 2 + lane % 2 + lane % 4 / 2 * LANES;
  return sp::shuffled(a, b, places);
}

// LANES words of LANES rows, transposed: a vector of each word. Rows are read by quarters of vectors,
// so that half of the shuffles do.
[[gnu::always_inline]] inline void load_transposed(const Word* const (&rows)[LANES], int64_t first,
                                                   Words (&to)[LANES]) {
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    Words own[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      own[n] = Words{};
      const int64_t at = first + 4 * quarter;
      load_part<0>(own[n], rows[n] + at), load_part<1>(own[n], rows[n + 4] + at);
      load_part<2>(own[n], rows[n + 8] + at), load_part<3>(own[n], rows[n + 12] + at);
    }
    const Words a = beside(own[0], own[1], 0), b = beside(own[0], own[1], 1);
    const Words c = beside(own[2], own[3], 0), d = beside(own[2], own[3], 1);
    to[4 * quarter] = beside_pairs(a, c, 0), to[4 * quarter + 1] = beside_pairs(a, c, 1);
    to[4 * quarter + 2] = beside_pairs(b, d, 0), to[4 * quarter + 3] = beside_pairs(b, d, 1);
  }
}
#endif

// Keys ``begin`` to ``begin`` + BLOCK of one head, as far as there are: words by step, then by key.
template <class T, bool PAIRED>
void pack_keys(const T* keys, const Strides& by, int64_t begin, int64_t count, int64_t head,
               Word* to) {
  const int64_t steps = PAIRED ? (head + 1) / 2 : head;
  const int64_t width = least(up_to(count - begin, LANES), BLOCK);
  for (int64_t key = 0; key < width; key += LANES) {
    int64_t step = 0;
#if defined(__AVX512F__)
    if (by.column == 1 && (PAIRED || sizeof(T) == 4)) {
      const Word* all[LANES];
      for (int n = 0; n < LANES; ++n) {
        const int64_t at = begin + key + n;
        all[n] = reinterpret_cast<const Word*>(keys + least(at, count - 1) * by.row);
      }
      for (; step + LANES <= (PAIRED ? head / 2 : head); step += LANES) {
        Words rows[LANES];
        load_transposed(all, step, rows);
        for (int n = 0; n < LANES; ++n) store(to + (step + n) * width + key, rows[n]);
      }
    }
#endif
    for (; step < steps; step += LANES) {
      Words rows[LANES];
      for (int n = 0; n < LANES; ++n) {
        const int64_t at = begin + key + n;
        rows[n] = at < count ? words<T, PAIRED>(keys + at * by.row, by.column, head, step) : Words{};
      }
      transpose<LANES / 2>(rows);
      for (int n = 0; n < LANES && step + n < steps; ++n)
        store(to + (step + n) * width + key, rows[n]);
    }
  }
}

// Values of the same keys: words by key, or pair of keys, then by column.
template <class T, bool PAIRED>
void pack_values(const T* values, const Strides& by, int64_t begin, int64_t count, int64_t columns,
                 Word* to) {
  const int64_t padded = up_to(columns, LANES), end = least(begin + BLOCK, count);
  for (int64_t key = begin; key < end; key += PAIRED ? 2 : 1) {
    const T* const row = values + key * by.row;
    for (int64_t column = 0; column < padded; column += LANES) {
      if constexpr (PAIRED) {
        const T* const next = key + 1 < count ? row + by.row : nullptr;
        store(to + column, both(row, next, by.column, columns, column));
      } else {
        store(to + column, words<T, false>(row, by.column, columns, column));
      }
    }
    to += padded;
  }
}

// ---- products ----------------------------------------------------------------------------------

template <bool PAIRED>
[[gnu::always_inline]] inline void fuse(Floats& sum, Words row, Words column) {
  if constexpr (PAIRED) {
#if defined(__AVX512F__)
    // by its text: g++ spills sums that go through its builtin
    Floats own = sum;  // nor are the parts of an array kept in registers that it names
    asm("vdpbf16ps %1, %2, %0" : "+v"(own) : "v"(column), "v"(row));
    sum = own;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    sum = Floats(vbfdotq_f32(float32x4_t(sum), bfloat16x8_t(row), bfloat16x8_t(column)));
#else
    static_assert(!PAIRED, "this processor multiplies no pairs of bf16");
#endif
  } else {
    sum += Floats(row) * Floats(column);
  }
}

// Has g++ load a vector once: by itself, it loads it again for each row that is multiplied.
[[gnu::always_inline]] inline void keep(Words& x) {
#if defined(__AVX__)
  asm("" : "+v"(x));
#endif
}

template <int N>
struct Number { static constexpr int value = N; };

template <class F, int... N>
[[gnu::always_inline]] inline void call(F f, sp::Numbers<int, N...>) { (f(Number<N>{}), ...); }

// f(0), f(1), ... f(COUNT - 1), written out: sums of a loop that is unrolled later stay on the stack.
template <int COUNT, class F>
[[gnu::always_inline]] inline void each(F f) { call(f, sp::Counted<COUNT>{}); }

#define INLINE [&](auto i) __attribute__((always_inline))

template <int M, int N>
struct Tile { Floats at[M][N]; };

// M rows of words by N vectors of columns, over ``steps``.
template <bool PAIRED, int M, int N>
[[gnu::always_inline]] inline Tile<M, N> multiply(const Word* a, int64_t a_row, const Word* b,
                                                  int64_t b_row, int64_t steps) {
  Tile<M, N> sums;
  each<M * N>(INLINE { sums.at[i.value / N][i.value % N] = Floats{}; });
  for (int64_t step = 0; step < steps; ++step, ++a, b += b_row) {
    Words columns[N], row;
    each<N>(INLINE {
      Words found = *reinterpret_cast<const LooseWords*>(b + i.value * LANES);
      if constexpr (PAIRED) keep(found);
      columns[i.value] = found;
    });
    each<M * N>(INLINE {
      constexpr int m = i.value / N, n = i.value % N;
      if constexpr (n == 0) row = splat(uint32_t(a[m * a_row]));
      fuse<PAIRED>(sums.at[m][n], row, columns[n]);
    });
  }
  return sums;
}

struct Operands {
  const Word* a;
  int64_t a_row;
  const Word* b;
  int64_t b_row, steps;
};

// Products of M rows and N vectors, plus what is there times ``kept`` of each row, if there is, and
// all of it times ``factor``. Scores and weighted sums share it: g++ takes half a second for one.
template <bool PAIRED, int M, int N>
void accumulate(const Operands& of, const float* kept, float factor, float* to, int64_t to_row) {
  static constexpr float ones[ROWS] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  for (int64_t step = 0; step < of.steps; step += STEPS, kept = ones) {
    const int64_t rest = of.steps - step;
    const Tile<M, N> sums = multiply<PAIRED, M, N>(of.a + step, of.a_row, of.b + step * of.b_row,
                                                   of.b_row, least(rest, STEPS));
    const Floats times = splat(rest > STEPS ? 1.0f : factor);
    each<M * N>(INLINE {
      constexpr int m = i.value / N, n = i.value % N;
      float* const place = to + m * to_row + n * LANES;
      const Floats sum = sums.at[m][n];
      store(place, (kept ? load(place) * splat(kept[m]) + sum : sum) * times);
    });
  }
}

template <bool PAIRED, int M>
void accumulate_wide(int vectors, const Operands& of, const float* kept, float factor, float* to,
                     int64_t to_row) {
  if constexpr (WIDE > 2) {
    if (vectors == 4) return accumulate<PAIRED, M, 4>(of, kept, factor, to, to_row);
    if (vectors == 3) return accumulate<PAIRED, M, 3>(of, kept, factor, to, to_row);
  }
  if (vectors == 2) return accumulate<PAIRED, M, 2>(of, kept, factor, to, to_row);
  accumulate<PAIRED, M, 1>(of, kept, factor, to, to_row);
}

// ---- softmax -----------------------------------------------------------------------------------

[[gnu::always_inline]] inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) for x <= 0 or NaN: ``sp::exp_of_negative`` for a vector. With AVX-512 a power of 2 has any
// exponent, so that what is too small needs no test. What is ROUNDED to bf16 behind it is within 3e-6.
template <bool ROUNDED>
[[gnu::always_inline]] inline Floats power_of(Floats x) {
#if defined(__AVX512F__)
  constexpr float bias = 0.0f, lowest = -126.0f;
#else
  constexpr float bias = 127.0f, lowest = -87.0f;
#endif
  const Floats zero = splat(12582912.0f + bias), least = splat(lowest);
  const Floats y = larger(least, x);
  const Floats biased = y * splat(1.44269504088896341f) + zero;
#if defined(__AVX512F__)
  if constexpr (ROUNDED) {  // 2^r, by a polynomial of four steps instead of seven
    const Floats whole = biased - zero, rest = y * splat(1.44269504088896341f) - whole;
    Floats power = splat(9.5701000e-3f);
    power = power * rest + splat(5.5917860e-2f);
    power = power * rest + splat(2.40247450e-1f);
    power = power * rest + splat(6.93121810e-1f);
    power = power * rest + splat(0.99999926f);
    asm("vscalefps %1, %0, %0" : "+v"(power) : "v"(whole));
    return power;
  }
#endif
  const Floats r = (biased - zero) * splat(-0.693147180559945309f) + y;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r;
#if defined(__AVX512F__)
  Floats power = p + splat(1.0f);
  asm("vscalefps %1, %0, %0" : "+v"(power) : "v"(biased - zero));
  return power;
#else
  const Floats power = (p + splat(1.0f)) * Floats(Words(biased) << 23);
  return x < least ? Floats{} : power;
#endif
}

// The lanes of one half beside those of the other, as many times as there are halves: by shuffles, as
// g++ takes lanes out one by one.
template <int HALF, class F>
[[gnu::always_inline]] inline float folded(Floats x, F f) {
  Words other;
  for (int lane = 0; lane < LANES; ++lane) other[lane] = (lane + HALF) % LANES;
  const Floats found = f(x, Floats(sp::shuffled(Words(x), Words(x), other)));
  if constexpr (HALF > 1) return folded<HALF / 2>(found, f);
  else return found[0];
}

[[gnu::always_inline]] inline float total(Floats x) {
  return folded<LANES / 2>(x, [](Floats a, Floats b) { return a + b; });
}

[[gnu::always_inline]] inline float largest(Floats x) { return folded<LANES / 2>(x, larger); }

struct RowState {
  float most = LOWEST, sum = 0.0f;
};

template <bool PAIRED>
[[gnu::always_inline]] inline void store_power(Word* to, int64_t at, Floats power) {
  if constexpr (PAIRED) {
#if defined(__AVX512F__)
    Halves half;
    asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(power));
    *reinterpret_cast<LooseHalves*>(reinterpret_cast<char*>(to) + 2 * at) = half;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const Halves half = Halves(vcvt_bf16_f32(float32x4_t(power)));
    *reinterpret_cast<LooseHalves*>(reinterpret_cast<char*>(to) + 2 * at) = half;
#endif
  } else {
    store(to + at, power);
  }
}

// Turns the first ``count`` scores of a row into powers, with zeros up to ``padded``; ``scores`` can
// be written up to there. Returns by what earlier sums of the row are to be multiplied. A row whose
// scores are all -infinity has a sum of 0.
template <bool PAIRED>  // not inline: each height of tiles would have its own
[[gnu::noinline]] float soften(float* scores, Word* powers, int64_t count, int64_t padded,
                               RowState& row) {
  for (int64_t key = count; key < padded; ++key) scores[key] = LOWEST;
  Floats most[2] = {splat(LOWEST), splat(LOWEST)};
  const int64_t end = up_to(count, LANES);
  int64_t at = 0;
  for (; at + LANES < end; at += 2 * LANES) {
    most[0] = larger(load(scores + at), most[0]);
    most[1] = larger(load(scores + at + LANES), most[1]);
  }
  if (at < end) most[0] = larger(load(scores + at), most[0]);
  const float found = largest(larger(most[0], most[1]));
  const float before = row.most, now = found > before ? found : before;
  Floats sums[2] = {};
  if (now == LOWEST) {  // NaN is larger than nothing
    for (int64_t key = 0; key < count; ++key)
      if (scores[key] != scores[key]) row.sum = scores[key];
    for (at = 0; at < padded; at += LANES) store_power<PAIRED>(powers, at, Floats{});
    return 1.0f;
  }
  const Floats least = splat(now);
  for (at = 0; at + LANES < end; at += 2 * LANES) {
    const Floats first = power_of<PAIRED>(load(scores + at) - least);
    const Floats second = power_of<PAIRED>(load(scores + at + LANES) - least);
    store_power<PAIRED>(powers, at, first);
    store_power<PAIRED>(powers, at + LANES, second);
    sums[0] += first;
    sums[1] += second;
  }
  for (; at < padded; at += LANES) {
    const Floats power = power_of<PAIRED>(load(scores + at) - least);
    store_power<PAIRED>(powers, at, power);
    sums[0] += power;
  }
  const float sum = total(sums[0] + sums[1]);
  const float factor = before == LOWEST ? 0.0f : power_of<false>(splat(before - now))[0];
  row.most = now;
  row.sum = row.sum * factor + sum;
  return factor;
}

#undef INLINE
}  // namespace
}  // namespace attention
#endif
