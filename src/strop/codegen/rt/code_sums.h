// Sums of products of int8 codes on a CPU: x (M, K) times w (N, K) transposed, to int32. Exact.
//
// A word is what one step of a product takes of one operand: four codes with AVX-512 VNNI, else two,
// widened to 16 bits. The codes of w are packed first, a block of columns at a time: words by step,
// then by column. Tiles of rows and vectors of columns walk over the steps with their sums in
// registers.
//
// vpdpbusd multiplies unsigned by signed codes and saturates nowhere. Its rows are x + 128, and sums
// begin with -128 times those of the columns of w. vpmaddwd takes both as they are. A zero point of x,
// one for all of it, is taken off the same way, and costs nothing.
#ifndef STROP_CODE_SUMS
#define STROP_CODE_SUMS

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace code_sums {
namespace {  // each kernel has its own

#if defined(__AVX512BW__)
constexpr int LANES = 16, WIDE = 4;  // of a vector; vectors beside each other in a tile
#elif defined(__AVX2__)
constexpr int LANES = 8, WIDE = 2;
#else
constexpr int LANES = 4, WIDE = 2;
#endif
constexpr int ROWS = 6;  // of a tile: 24 sums, 4 columns and a row in 32 registers
constexpr int BLOCK = WIDE * LANES;
constexpr int64_t PANEL = 24;  // rows of a task, a multiple of ROWS
constexpr double THREADED_FROM = 2e6;  // operations: 10 us of one core

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t LooseInts __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint32_t Word __attribute__((may_alias));
typedef uint32_t LooseWord __attribute__((aligned(1), may_alias));

constexpr int64_t up_to(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline Words splat(uint32_t x) { return x - Words{}; }
template <bool VNNI>
constexpr int EACH = VNNI ? 4 : 2;  // codes of a word
template <bool VNNI>
constexpr int64_t steps_of(int64_t depth) { return up_to(depth, EACH<VNNI>) / EACH<VNNI>; }
inline double work(int64_t rows, int64_t columns, int64_t depth) {
  return 2.0 * rows * columns * depth;
}

#ifndef STROP_WITHOUT_VNNI
inline bool has_vnni() {
#if defined(__AVX512BW__)
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}
#else  // tests compile the kernel of a processor that lacks it
inline bool has_vnni() { return false; }
#endif

// ---- products ----------------------------------------------------------------------------------

// Sums of products of pairs of 16 bits.
[[gnu::always_inline]] inline Ints pairs(Words a, Words b) {
#if defined(__AVX512BW__)
  return Ints(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#elif defined(__AVX2__)
  return Ints(_mm256_madd_epi16(__m256i(a), __m256i(b)));
#elif defined(__SSE2__)
  return Ints(_mm_madd_epi16(__m128i(a), __m128i(b)));
#else
  const Ints low = (Ints(a << 16) >> 16) * (Ints(b << 16) >> 16);
  return low + (Ints(a) >> 16) * (Ints(b) >> 16);
#endif
}

template <bool VNNI>
[[gnu::always_inline]] inline void fuse(Ints& sum, Words row, Words column) {
  if constexpr (VNNI) {
#if defined(__AVX512BW__)
    // by its text: targets that a cache is shared between have no such builtin
    Ints own = sum;  // g++ keeps no parts of an array in registers that an asm names
    asm("vpdpbusd %1, %2, %0" : "+v"(own) : "v"(column), "v"(row));
    sum = own;
#endif
  } else {
    sum += pairs(row, column);
  }
}

// Has g++ load a vector once: by itself, it loads it again for each row that is multiplied.
[[gnu::always_inline]] inline void keep(Words& x) {
#if defined(__AVX2__)
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

// M rows of words by N vectors of columns.
template <bool VNNI, int M, int N>
void tile(const Word* a, const Word* b, int64_t width, int64_t steps, const int32_t* begins,
          int32_t* to, int64_t to_row) {
  Ints sums[M][N];
  each<M * N>(INLINE {
    constexpr int n = i.value % N;
    sums[i.value / N][n] = *reinterpret_cast<const LooseInts*>(begins + n * LANES);
  });
  const int64_t a_row = steps;
  for (int64_t step = 0; step < steps; ++step, ++a, b += width) {
    Words columns[N], row;
    each<N>(INLINE {
      Words found = *reinterpret_cast<const LooseWords*>(b + i.value * LANES);
      keep(found);
      columns[i.value] = found;
    });
    each<M * N>(INLINE {
      constexpr int m = i.value / N, n = i.value % N;
      if constexpr (n == 0) row = splat(a[m * a_row]);
      fuse<VNNI>(sums[m][n], row, columns[n]);
    });
  }
  each<M * N>(INLINE {
    constexpr int m = i.value / N, n = i.value % N;
    *reinterpret_cast<LooseInts*>(to + m * to_row + n * LANES) = sums[m][n];
  });
}

template <bool VNNI, int M>
void tile_wide(int vectors, const Word* a, const Word* b, int64_t width, int64_t steps,
               const int32_t* begins, int32_t* to, int64_t to_row) {
  if (vectors == WIDE) return tile<VNNI, M, WIDE>(a, b, width, steps, begins, to, to_row);
  if constexpr (VNNI && M == ROWS && WIDE == 4) {  // beside each other, to have sums enough at work
    if (vectors == 3) return tile<VNNI, M, 3>(a, b, width, steps, begins, to, to_row);
    if (vectors == 2) return tile<VNNI, M, 2>(a, b, width, steps, begins, to, to_row);
  }
  for (int n = 0; n < vectors; ++n)
    tile<VNNI, M, 1>(a, b + n * LANES, width, steps, begins + n * LANES, to + n * LANES, to_row);
}

#undef INLINE

// ---- packing -----------------------------------------------------------------------------------

// The first word of ``count`` codes, zeros behind them.
template <bool VNNI>
inline uint32_t word(const int8_t* codes, int64_t count) {
  uint32_t found = 0;
  for (int n = 0; n < EACH<VNNI>; ++n) {
    const int8_t code = n < count ? codes[n] : 0;
    found |= VNNI ? uint32_t(uint8_t(code)) << 8 * n : uint32_t(uint16_t(code)) << 16 * n;
  }
  return found;
}

// As many words from ``begin`` on as a vector has.
template <bool VNNI>
inline Words words(const int8_t* row, int64_t depth, int64_t begin) {
  typedef int8_t Codes __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
  typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
  const int64_t first = begin * EACH<VNNI>;
  if (first + EACH<VNNI> * LANES <= depth) {
    if constexpr (VNNI) return *reinterpret_cast<const LooseWords*>(row + first);
    else return Words(__builtin_convertvector(*reinterpret_cast<const Codes*>(row + first), Shorts));
  }
  Words found = {};
  for (int lane = 0; lane < LANES; ++lane) {
    const int64_t at = first + lane * EACH<VNNI>;
    found[lane] = at < depth ? word<VNNI>(row + at, depth - at) : 0;
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

// One vector of columns of w from ``column`` on, into a block that is ``width`` columns wide.
template <bool VNNI>
void pack_columns(const int8_t* w, int64_t column, int64_t columns, int64_t depth, Word* to,
                  int64_t width, int32_t* of_columns) {
  const int64_t steps = steps_of<VNNI>(depth);
  Ints sums = {};
  for (int64_t step = 0; step < steps; step += LANES) {
    Words rows[LANES];
    for (int n = 0; n < LANES; ++n) {
      const int8_t* const row = w + (column + n) * depth;
      rows[n] = column + n < columns ? words<VNNI>(row, depth, step) : Words{};
      __builtin_prefetch(row + LANES * depth + step * EACH<VNNI>);  // what is packed next
    }
    transpose<LANES / 2>(rows);
    for (int n = 0; n < LANES && step + n < steps; ++n) {
      *reinterpret_cast<LooseWords*>(to + (step + n) * width) = rows[n];
      fuse<VNNI>(sums, splat(VNNI ? 0x01010101u : 0x00010001u), rows[n]);
    }
  }
  *reinterpret_cast<LooseInts*>(of_columns) = sums;
}

template <bool VNNI>
void pack_all(const int8_t* w, int64_t columns, int64_t depth, Word* packed) {
  const int64_t steps = steps_of<VNNI>(depth), padded = up_to(columns, LANES), vectors = padded / LANES;
  int32_t* const of_columns = reinterpret_cast<int32_t*>(packed + padded * steps);
#pragma omp parallel for schedule(static) if (work(1, columns, depth) > THREADED_FROM)
  for (int64_t vector = 0; vector < vectors; ++vector) {
    const int64_t column = vector * LANES, block = column / BLOCK * BLOCK;
    const int64_t width = least(padded - block, BLOCK);
    pack_columns<VNNI>(w, column, columns, depth, packed + block * steps + column - block, width,
                       of_columns + column);
  }
}

// What sums with each column begin with: what is added to x by its form, and ``zero``, times the sums
// of the columns, which lie behind the packed codes.
template <bool VNNI>
void begin_with(const Word* packed, int64_t columns, int64_t depth, int32_t zero, int32_t* begins) {
  const int64_t padded = up_to(columns, LANES);
  const int32_t* const sums = reinterpret_cast<const int32_t*>(packed + padded * steps_of<VNNI>(depth));
  const uint32_t taken = -(uint32_t(zero) + (VNNI ? 128 : 0));
  for (int64_t n = 0; n < padded; ++n) begins[n] = int32_t(sums[n] * taken);
}

// ---- a panel of rows ---------------------------------------------------------------------------

// Copies rows of x as words.
template <bool VNNI>
void copy_rows(const int8_t* x, int64_t rows, int64_t depth, Word* to) {
  const int64_t steps = steps_of<VNNI>(depth);
  const uint32_t sign = VNNI ? 0x80808080u : 0;
  const int64_t whole = depth / EACH<VNNI>;  // words; the last vector of them overlaps
  for (int64_t row = 0; row < rows; ++row, x += depth, to += steps) {
    int64_t step = 0;
    const auto copy = [&](int64_t at) __attribute__((always_inline)) {
      *reinterpret_cast<LooseWords*>(to + at) = words<VNNI>(x, depth, at) ^ splat(sign);
    };
    for (; step + LANES <= whole; step += LANES) copy(step);
    if (step && step < whole) copy(whole - LANES), step = whole;
    const int8_t* rest = x + step * EACH<VNNI>;
    for (; step < steps; ++step, rest += EACH<VNNI>)
      to[step] = word<VNNI>(rest, x + depth - rest) ^ sign;
  }
}

// Sums of up to PANEL rows, with the columns from ``begin`` to ``end``, both ends of blocks, to rows
// of ``to_row`` numbers that can be written up to a multiple of LANES.
template <bool VNNI>
void panel(const Word* a, int64_t rows, int64_t steps, const Word* packed, const int32_t* begins,
           int64_t begin, int64_t end, int32_t* to, int64_t to_row) {
  for (int64_t block = begin; block < end; block += BLOCK) {
    const int64_t width = least(end - block, BLOCK);
    const int vectors = int(width / LANES);
    const Word* const b = packed + block * steps;
    for (int64_t row = 0; row < rows;) {
      const int64_t rest = rows - row;
      const Word* const from = a + row * steps;
      int32_t* const out = to + row * to_row + block - begin;
      if constexpr (VNNI && WIDE == 4) {  // six sums would wait for each other
        if (vectors == 1 && rest >= 2 * ROWS) {
          tile<VNNI, 2 * ROWS, 1>(from, b, width, steps, begins + block, out, to_row);
          row += 2 * ROWS;
          continue;
        }
      }
      const auto multiply = [&](auto count) {
        constexpr int m = count.value;
        tile_wide<VNNI, m>(vectors, from, b, width, steps, begins + block, out, to_row);
        row += m;
      };
      if (rest >= ROWS) multiply(Number<ROWS>{});
      else if (rest >= 4) multiply(Number<4>{});
      else if (rest >= 2) multiply(Number<2>{});
      else multiply(Number<1>{});
    }
  }
}

template <bool VNNI>
void rows_by_all(const int8_t* x, int64_t rows, int64_t columns, int64_t depth, const Word* packed,
                 const int32_t* begins, Word* copied, int32_t* to) {
  const int64_t padded = up_to(columns, LANES);
  copy_rows<VNNI>(x, rows, depth, copied);
  panel<VNNI>(copied, rows, steps_of<VNNI>(depth), packed, begins, 0, padded, to, padded);
}

// ---- what kernels call -------------------------------------------------------------------------

// Words of packed codes, and of a copied row, in whichever form: numbers of a launch.
constexpr int64_t packed_words(int64_t columns, int64_t depth) {
  return up_to(columns, 16) * (depth / 2 + 3);
}
constexpr int64_t row_words(int64_t depth) { return depth / 2 + 1; }

// Packs w (columns, depth) into ``packed_words`` words.
inline void pack(const int8_t* w, int64_t columns, int64_t depth, Word* packed) {
  if (has_vnni()) pack_all<true>(w, columns, depth, packed);
  else pack_all<false>(w, columns, depth, packed);
}

// Writes what sums of x - ``zero`` with packed columns begin with, ``up_to(columns, LANES)`` numbers.
inline void begins_of(const Word* packed, int64_t columns, int64_t depth, int32_t zero,
                      int32_t* begins) {
  if (has_vnni()) begin_with<true>(packed, columns, depth, zero, begins);
  else begin_with<false>(packed, columns, depth, zero, begins);
}

// Sums of up to PANEL dense rows of x with all columns, to rows of ``up_to(columns, LANES)`` numbers.
// ``copied``: memory for ``rows`` times ``row_words(depth)`` words.
inline void multiply(const int8_t* x, int64_t rows, int64_t columns, int64_t depth,
                     const Word* packed, const int32_t* begins, Word* copied, int32_t* to) {
  if (has_vnni()) rows_by_all<true>(x, rows, columns, depth, packed, begins, copied, to);
  else rows_by_all<false>(x, rows, columns, depth, packed, begins, copied, to);
}

// One task of a product of its own: up to PANEL rows. What is left of columns behind whole blocks has
// no room for whole vectors: it is copied.
template <bool VNNI>
void part(const int8_t* x, int64_t rows, int64_t columns, int64_t depth, const Word* packed,
          const int32_t* begins, Word* copied, int32_t* to) {
  alignas(64) int32_t sums[PANEL * BLOCK];
  const int64_t padded = up_to(columns, LANES), steps = steps_of<VNNI>(depth);
  copy_rows<VNNI>(x, rows, depth, copied);
  const int64_t whole = columns / BLOCK * BLOCK, width = padded - whole, some = columns - whole;
  panel<VNNI>(copied, rows, steps, packed, begins, 0, whole, to, columns);
  if (!some) return;
  panel<VNNI>(copied, rows, steps, packed, begins, whole, padded, sums, width);
  for (int64_t row = 0; row < rows; ++row)
    __builtin_memcpy(to + row * columns + whole, sums + row * width, some * sizeof(int32_t));
}

// out (rows, columns) = x - zero (rows, depth) times w (columns, depth) transposed, all dense.
// ``memory``: packed codes, ``row_words(depth)`` words for each row, and ``up_to(columns, 16)``.
inline void product(const int8_t* x, const int8_t* w, int32_t* out, Word* memory, int64_t rows,
                    int64_t columns, int64_t depth, int32_t zero) {
  const int64_t parts = (rows + PANEL - 1) / PANEL;
  Word* const copies = memory + packed_words(columns, depth);
  int32_t* const begins = reinterpret_cast<int32_t*>(copies + rows * row_words(depth));
  pack(w, columns, depth, memory);
  begins_of(memory, columns, depth, zero, begins);
#pragma omp parallel for schedule(static) if (work(rows, columns, depth) > THREADED_FROM)
  for (int64_t at = 0; at < parts; ++at) {
    const int64_t row = at * PANEL, some = least(PANEL, rows - row);
    const int8_t* const from = x + row * depth;
    Word* const copied = copies + row * row_words(depth);
    int32_t* const to = out + row * columns;
    if (has_vnni()) part<true>(from, some, columns, depth, memory, begins, copied, to);
    else part<false>(from, some, columns, depth, memory, begins, copied, to);
  }
}

}  // namespace
}  // namespace code_sums
#endif
