// Sums of products of int8 codes on AArch64: x (M, K) times w (N, K) transposed, to int32. Exact.
//
// What ``code_sums.h`` is elsewhere, for processors that multiply codes at once. With i8mm, smmla
// multiplies eight codes of two rows by those of two columns; else, with dotprod, sdot multiplies
// four codes of a row by those of four columns. Both take signed codes as they are. The codes of w
// are packed first, rows are read where they lie.
#if !defined(STROP_CODE_SUMS) && defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define STROP_CODE_SUMS

#include <arm_neon.h>

namespace code_sums {
namespace {  // each kernel has its own

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int EACH = 8, ACROSS = 2;  // codes of a step; rows, and columns, of a vector of sums
#else
constexpr int EACH = 4, ACROSS = 1;
#endif
constexpr int LANES = 4;
constexpr int ROWS = 6, BLOCK = 16;  // rows and columns of a tile: 24 vectors of sums
constexpr int64_t PANEL = 24;        // rows of a task, a multiple of ROWS
constexpr double THREADED_FROM = 2e6;  // operations: 10 us of one core

typedef uint32_t Word __attribute__((may_alias));

constexpr int64_t up_to(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline double work(int64_t rows, int64_t columns, int64_t depth) {
  return 2.0 * rows * columns * depth;
}

// The first codes of a row, up to EACH of them, zeros behind them.
inline int8x8_t codes(const int8_t* from, int64_t count) {
  int64_t found = 0;
  if (count >= EACH) __builtin_memcpy(&found, from, EACH);
  else __builtin_memcpy(&found, from, count);
  return vcreate_s8(found);
}

// Codes of ACROSS rows beside each other; where there is one, four of them for each lane.
inline int8x16_t of_rows(const int8_t* x, int64_t row, int64_t rows, int64_t depth, int64_t at) {
  const int64_t rest = least(depth - at, EACH);
  const int8x8_t first = codes(x + row * depth + at, rest);
  if constexpr (ACROSS == 1) {
    return vreinterpretq_s8_s32(vdupq_lane_s32(vreinterpret_s32_s8(first), 0));
  } else {
    return vcombine_s8(first, row + 1 < rows ? codes(x + (row + 1) * depth + at, rest)
                                             : vdup_n_s8(0));
  }
}

inline int32x4_t fused(int32x4_t sums, int8x16_t rows, int8x16_t columns) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vmmlaq_s32(sums, rows, columns);
#else
  return vdotq_s32(sums, rows, columns);
#endif
}

// What the sums of a vector of columns begin with, for one or two rows.
inline int32x4_t begin_of(const int32_t* begins, int vector) {
  if constexpr (ACROSS == 1) return vld1q_s32(begins + vector * LANES);
  const int32x2_t two = vld1_s32(begins + vector * 2);
  return vcombine_s32(two, two);
}

// M rows by BLOCK columns: ``b`` has 16 * EACH codes for each step.
template <int M>
void tile(const int8_t* x, int64_t depth, const int8_t* b, const int32_t* begins, int32_t* to,
          int64_t to_row) {
  constexpr int groups = (M + ACROSS - 1) / ACROSS, vectors = BLOCK * ACROSS / LANES;
  int32x4_t sums[groups][vectors];
  for (int m = 0; m < groups; ++m)
    for (int n = 0; n < vectors; ++n) sums[m][n] = begin_of(begins, n);
  for (int64_t at = 0; at < depth; at += EACH, b += BLOCK * EACH) {
    int8x16_t rows[groups];
#pragma GCC unroll 6
    for (int m = 0; m < groups; ++m) rows[m] = of_rows(x, m * ACROSS, M, depth, at);
#pragma GCC unroll 8
    for (int n = 0; n < vectors; ++n) {
      const int8x16_t columns = vld1q_s8(b + n * 16);
#pragma GCC unroll 6
      for (int m = 0; m < groups; ++m) sums[m][n] = fused(sums[m][n], rows[m], columns);
    }
  }
  for (int m = 0; m < groups; ++m) {
    int32_t* const out = to + m * ACROSS * to_row;
    if constexpr (ACROSS == 1) {
      for (int n = 0; n < vectors; ++n) vst1q_s32(out + n * LANES, sums[m][n]);
    } else {
      for (int n = 0; n < vectors; n += 2) {
        const int64x2_t a = vreinterpretq_s64_s32(sums[m][n]);
        const int64x2_t c = vreinterpretq_s64_s32(sums[m][n + 1]);
        vst1q_s32(out + n * 2, vreinterpretq_s32_s64(vuzp1q_s64(a, c)));
        if (m * ACROSS + 1 < M)
          vst1q_s32(out + to_row + n * 2, vreinterpretq_s32_s64(vuzp2q_s64(a, c)));
      }
    }
  }
}

// ---- what kernels call -------------------------------------------------------------------------

// Words of packed codes, and of working memory for a row, in whichever form: numbers of a launch.
constexpr int64_t packed_words(int64_t columns, int64_t depth) {
  return up_to(columns, 16) * (depth / 2 + 3);
}
constexpr int64_t row_words(int64_t depth) { return depth / 2 + 1; }

// Packs w (columns, depth) into ``packed_words`` words: by block of columns, by step, by column. Behind
// them lie the sums of the columns.
inline void pack(const int8_t* w, int64_t columns, int64_t depth, Word* packed) {
  int8_t* const all = reinterpret_cast<int8_t*>(packed);
  const int64_t blocks = up_to(columns, BLOCK) / BLOCK, padded = up_to(depth, EACH);
  int32_t* const sums = reinterpret_cast<int32_t*>(all + blocks * BLOCK * padded);
#pragma omp parallel for schedule(static) if (work(1, columns, depth) > THREADED_FROM)
  for (int64_t block = 0; block < blocks; ++block) {
    int8_t* to = all + block * BLOCK * padded;
    for (int64_t column = block * BLOCK; column < (block + 1) * BLOCK; ++column) {
      sums[column] = 0;
      for (int64_t n = 0; column < columns && n < depth; ++n) sums[column] += w[column * depth + n];
    }
    for (int64_t at = 0; at < depth; at += EACH) {
      for (int n = 0; n < BLOCK; ++n, to += EACH) {
        const int64_t column = block * BLOCK + n, rest = least(depth - at, EACH);
        const int8x8_t found =
            column < columns ? codes(w + column * depth + at, rest) : vdup_n_s8(0);
        __builtin_memcpy(to, &found, EACH);
      }
    }
  }
}

// Writes what sums of x - ``zero`` with packed columns begin with, ``up_to(columns, BLOCK)`` numbers.
inline void begins_of(const Word* packed, int64_t columns, int64_t depth, int32_t zero,
                      int32_t* begins) {
  const int64_t padded = up_to(columns, BLOCK);
  const int8_t* const all = reinterpret_cast<const int8_t*>(packed);
  const int32_t* const sums = reinterpret_cast<const int32_t*>(all + padded * up_to(depth, EACH));
  for (int64_t n = 0; n < padded; ++n) begins[n] = int32_t(-uint32_t(zero) * uint32_t(sums[n]));
}

// Sums of up to PANEL dense rows of x with one block of columns.
inline void block_of(const int8_t* x, int64_t rows, int64_t depth, const int8_t* b,
                     const int32_t* begins, int32_t* to, int64_t to_row) {
  for (int64_t row = 0; row < rows;) {
    const int64_t rest = rows - row;
    const int8_t* const from = x + row * depth;
    int32_t* const out = to + row * to_row;
    if (rest >= 6) tile<6>(from, depth, b, begins, out, to_row), row += 6;
    else if (rest >= 4) tile<4>(from, depth, b, begins, out, to_row), row += 4;
    else if (rest >= 2) tile<2>(from, depth, b, begins, out, to_row), row += 2;
    else tile<1>(from, depth, b, begins, out, to_row), row += 1;
  }
}

// Sums of up to PANEL dense rows of x with all columns, to rows of ``to_row`` numbers.
inline void rows_by_all(const int8_t* x, int64_t rows, int64_t columns, int64_t depth,
                        const Word* packed, const int32_t* begins, int32_t* to, int64_t to_row) {
  const int8_t* b = reinterpret_cast<const int8_t*>(packed);
  alignas(64) int32_t sums[PANEL * BLOCK];
  for (int64_t column = 0; column < columns; column += BLOCK, b += BLOCK * up_to(depth, EACH)) {
    const int64_t some = least(columns - column, BLOCK);
    if (column + BLOCK <= to_row) {
      block_of(x, rows, depth, b, begins + column, to + column, to_row);
      continue;
    }
    block_of(x, rows, depth, b, begins + column, sums, BLOCK);
    for (int64_t row = 0; row < rows; ++row)
      __builtin_memcpy(to + row * to_row + column, sums + row * BLOCK, some * sizeof(int32_t));
  }
}

// Sums of up to PANEL dense rows of x with all columns, to rows of ``up_to(columns, LANES)`` numbers.
inline void multiply(const int8_t* x, int64_t rows, int64_t columns, int64_t depth,
                     const Word* packed, const int32_t* begins, Word*, int32_t* to) {
  rows_by_all(x, rows, columns, depth, packed, begins, to, up_to(columns, LANES));
}

// out (rows, columns) = x - zero (rows, depth) times w (columns, depth) transposed, all dense.
// ``memory``: packed codes, ``row_words(depth)`` words for each row, and ``up_to(columns, 16)``.
inline void product(const int8_t* x, const int8_t* w, int32_t* out, Word* memory, int64_t rows,
                    int64_t columns, int64_t depth, int32_t zero) {
  const int64_t parts = (rows + PANEL - 1) / PANEL;
  Word* const behind = memory + packed_words(columns, depth) + rows * row_words(depth);
  int32_t* const begins = reinterpret_cast<int32_t*>(behind);
  pack(w, columns, depth, memory);
  begins_of(memory, columns, depth, zero, begins);
#pragma omp parallel for schedule(static) if (work(rows, columns, depth) > THREADED_FROM)
  for (int64_t at = 0; at < parts; ++at) {
    const int64_t row = at * PANEL;
    rows_by_all(x + row * depth, least(PANEL, rows - row), columns, depth, memory, begins,
                out + row * columns, columns);
  }
}

}  // namespace
}  // namespace code_sums
#endif
