
// Products of many small matrices on a CPU, by the tiles of attention (attention/cpu.h).
//
// The second operand of each product is packed, so that vectors lie along its columns; a tile of
// rows by columns stays in registers over the whole sum.
#ifndef STROP_SMALL_PRODUCTS
#define STROP_SMALL_PRODUCTS

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace products {
namespace {  // each kernel has its own

using namespace attention;

#define NUMBERED [&](auto i) __attribute__((always_inline))

constexpr int64_t MOST = 64, DEEPEST = 128;  // rows and columns; terms of a sum

// The first ``count`` lanes, fewer than there are: by a mask, where a loop would spill the vector.
[[gnu::always_inline]] inline void store_some(float* to, Floats found, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), __m512(found));
#else
  for (int lane = 0; lane < LANES; ++lane)
    if (lane < count) to[lane] = found[lane];
#endif
}

struct Sizes {
  int64_t batch, rows, columns, depth;
  Strides a, b, out;  // of which none has heads
};

template <int M, int N>
[[gnu::always_inline]] inline void tile(const float* a, int64_t a_row, const Word* b, int64_t b_row,
                                        int64_t depth, float* out, const Strides& by, int64_t columns) {
  const auto sums =
      multiply<false, M, N>(reinterpret_cast<const Word*>(a), a_row, b, b_row, depth);
  each<M * N>(NUMBERED {
    constexpr int m = i.value / N, n = i.value % N;
    float* const to = out + m * by.row + n * LANES;
    const Floats found = sums.at[m][n];
    if ((n + 1) * LANES <= columns) {
      store(to, found);
    } else {
      store_some(to, found, columns - n * LANES);
    }
  });
}

template <int N>
void columns_of(const float* a, int64_t a_row, const Word* b, int64_t b_row, const Sizes& of,
                float* out, int64_t columns) {
  int64_t row = 0;
  for (; row + ROWS <= of.rows; row += ROWS)
    tile<ROWS, N>(a + row * a_row, a_row, b, b_row, of.depth, out + row * of.out.row, of.out, columns);
  for (; row + 3 <= of.rows; row += 3)
    tile<3, N>(a + row * a_row, a_row, b, b_row, of.depth, out + row * of.out.row, of.out, columns);
  for (; row < of.rows; ++row)
    tile<1, N>(a + row * a_row, a_row, b, b_row, of.depth, out + row * of.out.row, of.out, columns);
}

// b (K, N) as words by step, then by column.
inline void pack(const float* b, const Sizes& of, Word* to) {
  if (of.b.column != 1) {  // its columns are rows of another matrix
    const Strides turned = {0, 0, of.b.column, of.b.row};
    for (int64_t begin = 0; begin < of.columns; begin += BLOCK)
      pack_keys<float, false>(b, turned, begin, of.columns, of.depth, to + begin * of.depth);
    return;
  }
  for (int64_t begin = 0; begin < of.columns; begin += BLOCK) {
    const int64_t width = least(up_to(of.columns - begin, LANES), BLOCK);
    Word* at = to + begin * of.depth;
    for (int64_t step = 0; step < of.depth; ++step, at += width)
      for (int64_t column = 0; column < width; column += LANES)
        store(at + column, words<float, false>(b + step * of.b.row + begin, 1,
                                               of.columns - begin, column));
  }
}

inline void product(const float* a, const float* b, float* out, const Sizes& of) {
  alignas(64) Word to[MOST * DEEPEST];
  alignas(64) float own[MOST * DEEPEST];
  pack(b, of, to);
  int64_t a_row = of.a.row;
  if (of.a.column != 1) {
    for (int64_t row = 0; row < of.rows; ++row)
      for (int64_t step = 0; step < of.depth; ++step)
        own[row * of.depth + step] = a[row * of.a.row + step * of.a.column];
    a = own, a_row = of.depth;
  }
  for (int64_t begin = 0; begin < of.columns; begin += BLOCK) {
    const int64_t columns = least(of.columns - begin, BLOCK);
    const int64_t width = up_to(columns, LANES);
    const Word* const at = to + begin * of.depth;
    float* const result = out + begin;
    if (width == LANES) columns_of<1>(a, a_row, at, width, of, result, columns);
    else if (width == 2 * LANES) columns_of<2>(a, a_row, at, width, of, result, columns);
    else if (WIDE > 2 && width == 3 * LANES) columns_of<3>(a, a_row, at, width, of, result, columns);
    else columns_of<WIDE>(a, a_row, at, width, of, result, columns);
  }
}

inline void products(void* const* buffers, const int64_t* scalars) {
  const int64_t* s = scalars;
  const Sizes of = {s[0], s[1], s[2], s[3],
                    {s[4], 0, s[5], s[6]}, {s[7], 0, s[8], s[9]}, {s[10], 0, s[11], s[12]}};
  const float* const a = static_cast<const float*>(buffers[0]);
  const float* const b = static_cast<const float*>(buffers[1]);
  float* const out = static_cast<float*>(buffers[2]);
  const double operations = 2.0 * of.batch * of.rows * of.columns * of.depth;
#pragma omp parallel for schedule(static) if (operations > THREADED_FROM)
  for (int64_t n = 0; n < of.batch; ++n)
    product(a + n * of.a.batch, b + n * of.b.batch, out + n * of.out.batch, of);
}

#undef NUMBERED

}  // namespace
}  // namespace products

#endif
