
// Linears on a CPU, by the tiles of attention (attention/cpu.h): x (M, K) times w (N, K) transposed.
//
// The weight is packed in each call, into memory that stays in a cache: it has to come from memory
// anyway, once, and what is kept packed would have to come beside it. Tiles of rows by columns are
// in registers over the whole sum, or over parts of it, and end in the bias and one rounding. What a
// number is depends on the depth alone: neither on threads nor on other rows.
//
// Few rows or columns would leave most lanes of a tile empty, or pack for nothing. Their sums run
// along the depth, which is read where it lies, so that a number of few rows has other bits in fp32.
#ifndef STROP_LINEARS
#define STROP_LINEARS

namespace linears {
namespace {  // each kernel has its own

using namespace attention;

#define NUMBERED [&](auto i) __attribute__((always_inline))

constexpr int64_t PANEL = 16 * ROWS;  // rows of a task
constexpr int64_t FEW_ROWS = 8;       // in fp32, as FEWEST_ROWS of linear_cpu.py has it
constexpr int64_t FEW_COLUMNS = 4;

struct Sizes {
  int64_t rows, columns, depth, x_row;
  Strides w;  // without batches and heads
  int64_t out_row, vectors, blocks;

  // The first vector of columns of a block: blocks are about equally wide.
  int64_t first(int64_t block) const { return block * vectors / blocks; }
};

template <class T>
[[gnu::always_inline]] inline void put(T* to, Floats found) {
  if constexpr (sizeof(T) == 4) {
    store(to, found);
  } else {
#if defined(__AVX512F__)
    Halves half;
    asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(found));
    *reinterpret_cast<LooseHalves*>(to) = half;
#endif
  }
}

// The last vector of each row, where the result has fewer columns. It is no part of a tile: g++
// would write out each of its lanes, for each row of each kind of tile.
template <class T>
[[gnu::noinline]] void put_some(T* to, int64_t to_row, const float* found, int rows, int64_t count) {
  for (; rows; --rows, to += to_row, found += LANES)
#pragma GCC unroll 1
    for (int64_t lane = 0; lane < count; ++lane) to[lane] = sp::narrow<T>(found[lane]);
}

// M rows by N vectors of columns, of which ``count`` are stored.
template <class T, bool PAIRED, int M, int N>
void tile(Operands of, const float* bias, T* to, int64_t to_row, int64_t count) {
  float before[M][N][LANES], last[M][LANES];
  const bool is_whole = count >= N * LANES;
  for (;;) {
    const int64_t steps = least(of.steps, STEPS);
    const Tile<M, N> sums = multiply<PAIRED, M, N>(of.a, of.a_row, of.b, of.b_row, steps);
    of.steps -= steps, of.a += steps, of.b += steps * of.b_row;
    if (!of.steps) {
      each<M * N>(NUMBERED {
        constexpr int m = i.value / N, n = i.value % N;
        const Floats found = sums.at[m][n] + load(bias ? bias + n * LANES : before[m][n]);
        if (n < N - 1 || is_whole) put(to + m * to_row + n * LANES, found);
        else store(last[m], found);
      });
      break;
    }
    each<M * N>(NUMBERED {
      constexpr int m = i.value / N, n = i.value % N;
      store(before[m][n], sums.at[m][n] + load(bias ? bias + n * LANES : before[m][n]));
    });
    bias = nullptr;
  }
  if (!is_whole) {
    constexpr int64_t done = (N - 1) * LANES;
    put_some(to + done, to_row, last[0], M, count - done);
  }
}

template <class T, bool PAIRED, int M>
void tile_wide(int64_t vectors, const Operands& of, const float* bias, T* to, int64_t to_row,
               int64_t count) {
  if constexpr (WIDE > 2) {
    if (vectors == 4) return tile<T, PAIRED, M, 4>(of, bias, to, to_row, count);
    if (vectors == 3) return tile<T, PAIRED, M, 3>(of, bias, to, to_row, count);
  }
  if (vectors == 2) return tile<T, PAIRED, M, 2>(of, bias, to, to_row, count);
  tile<T, PAIRED, M, 1>(of, bias, to, to_row, count);
}

// The columns of a block, as words by step, then by column.
template <class T, bool PAIRED>
void pack(const T* w, const Sizes& of, int64_t block, Word* packed) {
  constexpr int64_t each = PAIRED ? 2 : 1;
  const int64_t steps = (of.depth + each - 1) / each, first = of.first(block);
  const int64_t vectors = of.first(block + 1) - first, end = least(of.columns, (first + vectors) * LANES);
  pack_keys<T, PAIRED>(w, of.w, first * LANES, end, of.depth, packed + first * LANES * steps);
}

// Some rows by the columns of a block.
template <class T, bool PAIRED>
void part(const T* x, const T* bias, T* out, const Sizes& of, int64_t block, const Word* packed) {
  constexpr int64_t each = PAIRED ? 2 : 1;
  const int64_t steps = of.depth / each, first = of.first(block) * LANES;
  const int64_t vectors = of.first(block + 1) - of.first(block), count = of.columns - first;
  alignas(64) float added[BLOCK] = {};
  for (int64_t n = 0; bias && n < least(count, vectors * LANES); ++n)
    added[n] = sp::widen(bias[first + n]);
  for (int64_t row = 0; row < of.rows;) {
    const int64_t rest = of.rows - row;
    const Operands from = {reinterpret_cast<const Word*>(x + row * of.x_row), of.x_row / each,
                           packed + first * steps, vectors * LANES, steps};
    const auto multiplied = [&](auto rows) {
      constexpr int m = rows.value;
      tile_wide<T, PAIRED, m>(vectors, from, added, out + row * of.out_row + first, of.out_row, count);
      row += m;
    };
    if (rest >= ROWS) multiplied(Number<ROWS>{});
    else if (rest >= 4) multiplied(Number<4>{});
    else if (rest >= 2) multiplied(Number<2>{});
    else multiplied(Number<1>{});
  }
}

// ---- few rows or columns -----------------------------------------------------------------------

// The words of two rows but for the first ``before``, which are summed up already. Zeros stand for
// them on both sides, as infinity times zero is NaN.
template <bool PAIRED>
[[gnu::always_inline]] inline void fuse_last(Floats& sum, const Word* a, const Word* b, int64_t before) {
  Words lanes;
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = lane;
  const Words wanted = Words(lanes >= splat(uint32_t(before)));
  fuse<PAIRED>(sum, *reinterpret_cast<const LooseWords*>(a) & wanted,
               *reinterpret_cast<const LooseWords*>(b) & wanted);
}

// The products of one row with four others, over the depth. Two sums of each are under way at once.
template <class T, bool PAIRED>
void four(const T* one, const T* const (&others)[4], int64_t depth, float (&sums)[4]) {
  constexpr int64_t each_word = PAIRED ? 2 : 1, both = 2 * LANES;
  const int64_t steps = depth / each_word;
  const Word* const a = reinterpret_cast<const Word*>(one);
  for (float& sum : sums) sum = 0.0f;
  for (int64_t begin = 0; begin < steps; begin += STEPS * both) {
    const int64_t end = least(steps, begin + STEPS * both);
    Floats even[4] = {}, odd[4] = {};
    int64_t at = begin;
    for (; at + both <= end; at += both)
      each<4>(NUMBERED {
        const Word* const b = reinterpret_cast<const Word*>(others[i.value]) + at;
        fuse<PAIRED>(even[i.value], *reinterpret_cast<const LooseWords*>(a + at),
                     *reinterpret_cast<const LooseWords*>(b));
        fuse<PAIRED>(odd[i.value], *reinterpret_cast<const LooseWords*>(a + at + LANES),
                     *reinterpret_cast<const LooseWords*>(b + LANES));
      });
    for (; at < end; at += LANES)
      each<4>(NUMBERED {
        const Word* const b = reinterpret_cast<const Word*>(others[i.value]);
        const int64_t first = least(at, steps - LANES);
        if (first >= 0) fuse_last<PAIRED>(even[i.value], a + first, b + first, at - first);
        else fuse<PAIRED>(even[i.value], words<T, PAIRED>(one, 1, depth, 0),
                          words<T, PAIRED>(others[i.value], 1, depth, 0));
      });
    each<4>(NUMBERED { sums[i.value] += total(even[i.value] + odd[i.value]); });
  }
}

template <class T>
inline T with_bias(float sum, const T* bias, int64_t column) {
  return sp::narrow<T>(bias ? sum + sp::widen(bias[column]) : sum);
}

// Four columns of each row, or four rows of each column, at once.
template <class T, bool PAIRED>
void along_depth(const T* x, const T* w, const T* bias, T* out, const Sizes& of) {
  const bool has_few_rows = of.rows < of.columns;
  const int64_t few = has_few_rows ? of.rows : of.columns, many = has_few_rows ? of.columns : of.rows;
  const T* const ones = has_few_rows ? x : w;
  const T* const all = has_few_rows ? w : x;
  const int64_t one_row = has_few_rows ? of.x_row : of.w.row, row = has_few_rows ? of.w.row : of.x_row;
#pragma omp parallel for schedule(static) if (2.0 * of.rows * of.columns * of.depth > THREADED_FROM)
  for (int64_t begin = 0; begin < many; begin += 4) {
    const T* others[4];
    for (int n = 0; n < 4; ++n) others[n] = all + least(begin + n, many - 1) * row;
    for (int64_t m = 0; m < few; ++m) {
      float sums[4];
      four<T, PAIRED>(ones + m * one_row, others, of.depth, sums);
      for (int n = 0; n < 4 && begin + n < many; ++n) {
        const int64_t r = has_few_rows ? m : begin + n, column = has_few_rows ? begin + n : m;
        out[r * of.out_row + column] = with_bias(sums[n], bias, column);
      }
    }
  }
}

// ---- all ---------------------------------------------------------------------------------------

// Buffers: x, w, the result, working memory, and the bias where scalar 7 says that there is one.
template <class T, bool PAIRED>
void linear(void* const* buffers, const int64_t* s) {
  const int64_t vectors = (s[1] + LANES - 1) / LANES, blocks = (vectors + WIDE - 1) / WIDE;
  const Sizes of = {s[0], s[1], s[2], s[3], {0, 0, s[4], s[5]}, s[6], vectors, blocks};
  const T* const x = static_cast<const T*>(buffers[0]);
  const T* const w = static_cast<const T*>(buffers[1]);
  T* const out = static_cast<T*>(buffers[2]);
  const uintptr_t memory = (reinterpret_cast<uintptr_t>(buffers[3]) + 63) / 64 * 64;
  Word* const packed = reinterpret_cast<Word*>(memory);
  const T* const bias = s[7] ? static_cast<const T*>(buffers[4]) : nullptr;
  const bool has_few = of.columns <= FEW_COLUMNS || (!PAIRED && of.rows < FEW_ROWS);
  if (has_few && of.w.column == 1) return along_depth<T, PAIRED>(x, w, bias, out, of);
  const int64_t panels = (of.rows + PANEL - 1) / PANEL;
#pragma omp parallel if (2.0 * of.rows * of.columns * of.depth > THREADED_FROM)
  {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) pack<T, PAIRED>(w, of, block, packed);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * blocks; ++task) {
      const int64_t row = task / blocks * PANEL;
      Sizes mine = of;
      mine.rows = least(PANEL, of.rows - row);
      part<T, PAIRED>(x + row * of.x_row, bias, out + row * of.out_row, mine, task % blocks, packed);
    }
  }
}

#undef NUMBERED

}  // namespace
}  // namespace linears

#endif
