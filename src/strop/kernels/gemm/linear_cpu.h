
// Linears on a CPU, by blocks (blocks_cpu.h): x (M, K) times w (N, K) transposed.
//
// Few rows or columns would leave most lanes of a tile empty, or pack for nothing. Their sums run
// along the depth, which is read where it lies, so that a number of few rows has other bits in fp32.
#ifndef STROP_LINEARS
#define STROP_LINEARS

namespace linears {
namespace {  // each kernel has its own

using namespace blocks;

constexpr int64_t FEW_ROWS = 8;       // in fp32, as FEWEST_ROWS of linear_cpu.py has it
constexpr int64_t FEW_COLUMNS = 4;

struct Sizes {
  int64_t rows, columns, depth, x_row;
  Strides w;  // without batches and heads
  int64_t out_row;
};

// The operands, as ``blocks::Task`` asks for them. A part is STEPS words of the depth.
template <class T, bool PAIRED>
struct Lines {
  static constexpr int64_t EACH = PAIRED ? 2 : 1;
  const T* x;
  const T* w;
  Sizes of;
  int64_t all, parts;
  const Word* rows;

  Lines(const T* rows_of, const T* weight, const Sizes& sizes)
      : x(rows_of), w(weight), of(sizes), all((sizes.depth + EACH - 1) / EACH),
        parts((all + STEPS - 1) / STEPS), rows(nullptr) {}

  int64_t steps(int64_t part) const { return least(all - part * STEPS, STEPS); }
  int64_t length(int64_t part) const { return least(of.depth - part * STEPS * EACH, STEPS * EACH); }
  const T* at(int64_t part) const { return w + part * STEPS * EACH * of.w.column; }

  void look_at(int64_t begin, int64_t) { rows = reinterpret_cast<const Word*>(x + begin * of.x_row); }

  void pack(int64_t part, int64_t first, int64_t last, Word* to) const {
    pack_keys<T, PAIRED>(at(part), of.w, first, last, length(part), to);
  }

  Ahead ahead(int64_t part, int64_t first, int64_t last) const {
    if (of.w.column != 1) return {};
    const int64_t row = of.w.row * int64_t(sizeof(T));
    return Ahead::of(at(part) + first * of.w.row, row, length(part) * int64_t(sizeof(T)), last - first);
  }

  int64_t sections(int64_t part, int64_t section) const { return (steps(part) + section - 1) / section; }

  template <int M, int N>
  [[gnu::always_inline]] inline Tile<M, N> tile(int64_t row, int64_t part, const Word* b,
                                                int64_t width, Ahead& later) const {
    const int64_t x_row = of.x_row / EACH, count = steps(part);
    const Word* const from = rows + row * x_row + part * STEPS;
    Tile<M, N> sums;
    clear(sums);
    for (int64_t step = 0; step < count; step += later.section) {
      const Word* a[M];
      each<M>(NUMBERED { a[i.value] = from + i.value * x_row + step; });
      later.fetch();
      multiply_more<PAIRED, M, N>(sums, a, b + step * width, width, least(later.section, count - step));
    }
    return sums;
  }
};

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

// Buffers: x, w, the result, and the bias where scalar 7 says that there is one. Four scalars behind
// that tell what the next kernel reads.
template <class T, bool PAIRED>
void linear(void* const* buffers, const int64_t* s) {
  const Sizes of = {s[0], s[1], s[2], s[3], {0, 0, s[4], s[5]}, s[6]};
  const T* const x = static_cast<const T*>(buffers[0]);
  const T* const w = static_cast<const T*>(buffers[1]);
  T* const out = static_cast<T*>(buffers[2]);
  const T* const bias = s[7] ? static_cast<const T*>(buffers[3]) : nullptr;
  const bool has_few = of.columns <= FEW_COLUMNS || (!PAIRED && of.rows < FEW_ROWS);
  if (has_few && of.w.column == 1) return along_depth<T, PAIRED>(x, w, bias, out, of);
  const double work = 2.0 * of.rows * of.columns * of.depth;
  const Shape shape(of.rows, of.columns, of.out_row);
  multiply_all<T, PAIRED>(Lines<T, PAIRED>(x, w, of), shape, bias, out, work, of_next_kernel(s + 8));
}

#undef NUMBERED

}  // namespace
}  // namespace linears

#endif
