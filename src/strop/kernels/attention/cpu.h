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

// Keys ``begin`` to ``begin`` + BLOCK of one head, as far as there are: words by step, then by key.
template <class T, bool PAIRED>
void pack_keys(const T* keys, const Strides& by, int64_t begin, int64_t count, int64_t head,
               Word* to) {
  const int64_t steps = PAIRED ? (head + 1) / 2 : head;
  const int64_t width = least(up_to(count - begin, LANES), BLOCK);
  for (int64_t key = 0; key < width; key += LANES) {
    for (int64_t step = 0; step < steps; step += LANES) {
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

// exp(x) for x <= 0 or NaN: ``sp::exp_of_negative`` for a vector. With AVX-512 a power of 2 has any
// exponent, so that what is too small needs no test.
[[gnu::always_inline]] inline Floats power_of(Floats x) {
#if defined(__AVX512F__)
  constexpr float bias = 0.0f, lowest = -126.0f;
#else
  constexpr float bias = 127.0f, lowest = -87.0f;
#endif
  const Floats zero = splat(12582912.0f + bias), least = splat(lowest);
  const Floats y = x < least ? least : x;
  const Floats biased = y * splat(1.44269504088896341f) + zero;
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

[[gnu::always_inline]] inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float total(Floats x) {
  float sum = 0.0f;
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) x[lane] += x[lane + half];
  return sum + x[0];
}

inline float largest(Floats x) {
  float found = x[0];
  for (int lane = 1; lane < LANES; ++lane) found = x[lane] > found ? x[lane] : found;
  return found;
}

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
    const Floats first = power_of(load(scores + at) - least);
    const Floats second = power_of(load(scores + at + LANES) - least);
    store_power<PAIRED>(powers, at, first);
    store_power<PAIRED>(powers, at + LANES, second);
    sums[0] += first;
    sums[1] += second;
  }
  for (; at < padded; at += LANES) {
    const Floats power = power_of(load(scores + at) - least);
    store_power<PAIRED>(powers, at, power);
    sums[0] += power;
  }
  const float factor = power_of(splat(before - now))[0];
  row.most = now;
  row.sum = row.sum * factor + total(sums[0] + sums[1]);
  return factor;
}

// ---- masks -------------------------------------------------------------------------------------

inline float number(bool x) { return x ? 0.0f : LOWEST; }
inline float number(float x) { return x; }
inline float number(sp::bf16 x) { return sp::widen(x); }

template <class T>
void read_mask(const T* row, int64_t stride, int64_t count, float* to) {
  if (stride == 1) {
#pragma omp simd
    for (int64_t key = 0; key < count; ++key) to[key] = number(row[key]);
  } else {
    for (int64_t key = 0; key < count; ++key) to[key] = number(row[key * stride]);
  }
}

// Marks side by side, by vectors: g++ takes them one by one.
inline void read_mask(const bool* row, int64_t stride, int64_t count, float* to) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
  int64_t key = 0;
  for (; stride == 1 && key + LANES <= count; key += LANES) {
    const Bytes marks = *reinterpret_cast<const Bytes*>(row + key);
    const Words is_hidden = Words(__builtin_convertvector(marks, Words) == Words{});
    store(to + key, is_hidden & splat(bits(LOWEST)));
  }
  for (; key < count; ++key) to[key] = number(row[key * stride]);
}

inline void add(const float* numbers, int64_t count, float* to) {
#pragma omp simd
  for (int64_t key = 0; key < count; ++key) to[key] += numbers[key];
}

// ---- one task ----------------------------------------------------------------------------------

// The packed keys and values of one head, and some queries of it.
template <class T, bool PAIRED>
struct Task {
  const Sizes& of;
  const Word* keys;
  const Word* values;
  const T* q;        // row 0 of the head
  T* out;
  const void* mask;  // at its row 0
  int64_t begin, count;

  // no aggregate, which would be filled with zeros
  Task(const Sizes& of, const Word* keys, const Word* values, const T* q, T* out, const void* mask,
       int64_t begin, int64_t count)
      : of(of), keys(keys), values(values), q(q), out(out), mask(mask), begin(begin), count(count) {}

  static constexpr int64_t EACH = PAIRED ? 2 : 1;
  alignas(64) Word queries[QUERIES * MOST_HEAD];
  alignas(64) float sums[QUERIES * MOST_HEAD];
  alignas(64) float scores[ROWS * KEYS];
  alignas(64) Word powers[PAIRED ? ROWS * KEYS / 2 : LANES];
  alignas(64) float numbers[KEYS];
  RowState rows[QUERIES];

  int64_t steps() const { return (of.head + EACH - 1) / EACH; }
  int64_t row_words() const { return up_to(steps(), LANES); }
  int64_t columns() const { return up_to(of.values, LANES); }

  void run() {
    for (int64_t n = 0; n < up_to(count, ROWS) && n < QUERIES; ++n)
      for (int64_t step = 0; step < steps(); step += LANES)
        store(queries + n * row_words() + step,
              n < count ? words<T, PAIRED>(q + (begin + n) * of.q.row, of.q.column, of.head, step)
                        : Words{});
    const int64_t seen = of.is_causal ? least(of.keys, begin + count) : of.keys;
    for (int64_t first = 0; first < seen; first += KEYS) {
      if (of.mask_kind != NONE && of.mask.row == 0) read(0, first);
      for (int64_t n = 0; n < count; n += ROWS) {
        const int64_t rest = count - n;
        if (rest > 4) part<6>(n, first);
        else if (rest > 2) part<4>(n, first);
        else if (rest > 1) part<2>(n, first);
        else part<1>(n, first);
      }
    }
    finish();
  }

  // not inline: each place of it would have all of its loops
  [[gnu::noinline]] void read(int64_t row, int64_t first) {
    const int64_t at = row * of.mask.row + first * of.mask.column;
    const int64_t some = least(KEYS, of.keys - first);
    if (of.mask_kind == MARKS)
      read_mask(static_cast<const bool*>(mask) + at, of.mask.column, some, numbers);
    else
      read_mask(static_cast<const T*>(mask) + at, of.mask.column, some, numbers);
  }

  // The keys of a chunk that a row attends to.
  int64_t seen_by(int64_t row, int64_t first) const {
    const int64_t rest = of.is_causal ? least(of.keys, begin + row + 1) : of.keys;
    const int64_t some = least(KEYS, rest - first);
    return some < 0 ? 0 : some;
  }

  // Queries ``n`` to ``n`` + M over the chunk of keys that begins at ``first``.
  template <int M>
  void part(int64_t n, int64_t first) {
    const int64_t last = least(n + M, count) - 1, most = seen_by(last, first);
    if (most == 0) return;
    const int64_t padded = up_to(most, LANES);
    const Word* const rows_of = queries + n * row_words();
    for (int64_t key = 0; key < padded; key += BLOCK) {
      const int64_t width = least(up_to(of.keys - first - key, LANES), BLOCK);
      const int vectors = int(least(padded - key, width) / LANES);
      const Word* const packed = keys + (first + key) * steps();
      accumulate_wide<PAIRED, M>(vectors, {rows_of, row_words(), packed, width, steps()}, nullptr,
                                 float(of.scale), scores + key, KEYS);
    }
    float factors[M];
    for (int i = 0; i < M; ++i) {
      float* const own = scores + i * KEYS;
      Word* const to = PAIRED ? powers + i * (KEYS / 2) : reinterpret_cast<Word*>(own);
      if (n + i > last) {  // beside the last query: what comes of it is not stored
        factors[i] = 0.0f;
        for (int64_t at = 0; at < padded; at += LANES) store_power<PAIRED>(to, at, Floats{});
        continue;
      }
      const int64_t some = seen_by(n + i, first);
      if (of.mask_kind != NONE) {
        if (of.mask.row != 0) read(begin + n + i, first);
        add(numbers, some, own);
      }
      factors[i] = soften<PAIRED>(own, to, some, padded, rows[n + i]);
    }
    const Word* const weights = PAIRED ? powers : reinterpret_cast<const Word*>(scores);
    const int64_t row = PAIRED ? KEYS / 2 : KEYS, used = (most + EACH - 1) / EACH;
    const int64_t all = columns() / LANES, blocks = (all + WIDE - 1) / WIDE;
    for (int64_t block = 0, column = 0; block < blocks; ++block) {
      const int vectors = int((all - column) / (blocks - block) + ((all - column) % (blocks - block) != 0));
      const Word* const packed = values + first / EACH * columns() + column * LANES;
      accumulate_wide<PAIRED, M>(vectors, {weights, row, packed, columns(), used},
                                 first ? factors : nullptr, 1.0f,
                                 sums + n * columns() + column * LANES, columns());
      column += vectors;
    }
  }

  void finish() {
    for (int64_t n = 0; n < count; ++n) {
      // a row without any weight is 0, and NaN where values are
      const float sum = rows[n].sum, divisor = sum == 0.0f ? 1.0f : sum;
      const float* const from = sums + n * columns();
      T* const to = out + (begin + n) * of.out.row;
      if (of.out.column == 1) {
#pragma omp simd
        for (int64_t c = 0; c < of.values; ++c) to[c] = sp::narrow<T>(from[c] / divisor);
      } else {
        for (int64_t c = 0; c < of.values; ++c)
          to[c * of.out.column] = sp::narrow<T>(from[c] / divisor);
      }
    }
  }
};

// ---- one call ----------------------------------------------------------------------------------

inline Strides strides(const int64_t* from) { return {from[0], from[1], from[2], from[3]}; }

inline Sizes sizes(const int64_t* s) {
  return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], __builtin_bit_cast(double, s[9]),
          strides(s + 10), strides(s + 14), strides(s + 18), strides(s + 22), strides(s + 26)};
}

template <class T, bool PAIRED>
void attend(void* const* buffers, const int64_t* scalars) {
  const Sizes of = sizes(scalars);
  constexpr int64_t each = PAIRED ? 2 : 1;
  const T* const q = static_cast<const T*>(buffers[0]);
  const T* const k = static_cast<const T*>(buffers[1]);
  const T* const v = static_cast<const T*>(buffers[2]);
  T* const out = static_cast<T*>(buffers[3]);
  const int64_t steps = (of.head + each - 1) / each, columns = up_to(of.values, LANES);
  const int64_t key_words = up_to(of.keys, LANES) * steps;
  const int64_t value_words = up_to((of.keys + each - 1) / each * columns, LANES);
  const int64_t sources = of.heads / of.shared, blocks = (of.keys + BLOCK - 1) / BLOCK;
  const uintptr_t memory = (reinterpret_cast<uintptr_t>(buffers[4]) + 63) / 64 * 64;
  Word* const packed_keys = reinterpret_cast<Word*>(memory);
  Word* const packed_values = packed_keys + of.batch * sources * key_words;
  const int64_t packs = of.batch * sources * blocks;
  const int64_t parts = (of.queries + QUERIES - 1) / QUERIES;
  const int64_t tasks = of.batch * of.heads * parts;
  const double work = 2.0 * of.batch * of.heads * of.queries * of.keys * (of.head + of.values);
#pragma omp parallel if (work > THREADED_FROM)
  {
#pragma omp for schedule(static)
    for (int64_t pack = 0; pack < packs; ++pack) {
      const int64_t which = pack / blocks, begin = pack % blocks * BLOCK;
      const int64_t b = which / sources, h = which % sources;
      pack_keys<T, PAIRED>(k + b * of.k.batch + h * of.k.head, of.k, begin, of.keys, of.head,
                           packed_keys + which * key_words + begin * steps);
      pack_values<T, PAIRED>(v + b * of.v.batch + h * of.v.head, of.v, begin, of.keys, of.values,
                             packed_values + which * value_words + begin / each * columns);
    }
#pragma omp for schedule(static, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t which = task / parts, begin = task % parts * QUERIES;
      const int64_t b = which / of.heads, h = which % of.heads;
      const int64_t source = b * sources + h / of.shared;
      const int64_t mask_at = b * of.mask.batch + h * of.mask.head;
      const char* mask = nullptr;
      if (of.mask_kind != NONE)
        mask = static_cast<const char*>(buffers[5]) +
               mask_at * int64_t(of.mask_kind == MARKS ? sizeof(bool) : sizeof(T));
      Task<T, PAIRED> mine(of, packed_keys + source * key_words,
                           packed_values + source * value_words, q + b * of.q.batch + h * of.q.head,
                           out + b * of.out.batch + h * of.out.head, mask, begin,
                           least(QUERIES, of.queries - begin));
      mine.run();
    }
  }
}

#undef INLINE
}  // namespace
}  // namespace attention
#endif
