// Products on a CPU, by the tiles of attention (attention/cpu.h): rows times a weight, transposed.
//
// Some columns of the weight are packed for some steps of the sums, into 36 KB on the stack that stay
// in the first cache while all rows are multiplied by them; meanwhile the next part of the weight is
// fetched. So a weight is read once in each call, and nothing of it is ever stale. Tiles of rows by
// columns are in registers over the steps of a part, and sums of parts are added up in the second
// cache. What a number is depends on the depth alone: neither on threads nor on other rows.
#ifndef STROP_BLOCKS
#define STROP_BLOCKS

extern "C" int omp_get_num_threads();

namespace blocks {
namespace {  // each kernel has its own

using namespace attention;

#define NUMBERED [&](auto i) __attribute__((always_inline))

constexpr int64_t PANEL = 128 * ROWS;  // rows of a task: the sums of its parts are 196 KB
constexpr int64_t FEWEST = 4 * ROWS;   // rows that are worth packing for
constexpr int64_t MOST_STEPS = 144;    // of a part
constexpr int64_t SECTION = 16;        // steps between fetches, of few tiles
constexpr int64_t MANY_TILES = 32;     // between which it is enough to fetch
constexpr int64_t LINE = 64;           // bytes of a cache's line

// Memory that will be read soon: some bytes of each of some rows.
struct Ahead {
  const char* at = nullptr;
  int64_t row_bytes = 0, lines = 0, rows = 0, line = 0;
  int64_t section = SECTION, each_time = 0;  // steps, and lines that are fetched before them

  static Ahead of(const void* from, int64_t row_bytes, int64_t bytes, int64_t rows) {
    return {static_cast<const char*>(from), row_bytes, (bytes + LINE - 1) / LINE, rows};
  }
  [[gnu::always_inline]] void fetch() {
    for (int64_t count = each_time; count > 0 && rows; --count) {
      __builtin_prefetch(at + line * LINE, 0, 2);
      if (++line == lines) line = 0, at += row_bytes, --rows;
    }
  }
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

// Adds the products of M rows of words, each where it lies, by N vectors of columns.
template <bool PAIRED, int M, int N>
[[gnu::always_inline]] inline void multiply_more(Tile<M, N>& sums, const Word* const (&a)[M],
                                                 const Word* b, int64_t b_row, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step, b += b_row) {
    Words columns[N], row;
    each<N>(NUMBERED {
      Words found = *reinterpret_cast<const LooseWords*>(b + i.value * LANES);
      if constexpr (PAIRED) keep(found);
      columns[i.value] = found;
    });
    each<M * N>(NUMBERED {
      constexpr int m = i.value / N, n = i.value % N;
      if constexpr (n == 0) row = splat(uint32_t(a[m][step]));
      fuse<PAIRED>(sums.at[m][n], row, columns[n]);
    });
  }
}

template <int M, int N>
[[gnu::always_inline]] inline void clear(Tile<M, N>& sums) {
  each<M * N>(NUMBERED { sums.at[i.value / N][i.value % N] = Floats{}; });
}

// Where the sums of a tile begin, in rows of ``from_row``, and where they go: to ``sums`` in rows of
// BLOCK, or, where there are none, to the result, of whose columns ``count`` are this tile's.
template <class T>
struct Ends {
  const float* from;
  int64_t from_row;
  float* sums;
  T* to;
  int64_t to_row, count;
};

template <class T, int M, int N>
[[gnu::always_inline]] inline void finish(const Tile<M, N>& sums, const Ends<T>& ends) {
  if (ends.sums) {
    each<M * N>(NUMBERED {
      constexpr int m = i.value / N, n = i.value % N;
      store(ends.sums + m * BLOCK + n * LANES,
            sums.at[m][n] + load(ends.from + m * ends.from_row + n * LANES));
    });
    return;
  }
  float last[M][LANES];
  const bool is_whole = ends.count >= N * LANES;
  each<M * N>(NUMBERED {
    constexpr int m = i.value / N, n = i.value % N;
    const Floats found = sums.at[m][n] + load(ends.from + m * ends.from_row + n * LANES);
    if (n < N - 1 || is_whole) put(ends.to + m * ends.to_row + n * LANES, found);
    else store(last[m], found);
  });
  if (!is_whole) {
    constexpr int64_t done = (N - 1) * LANES;
    put_some(ends.to + done, ends.to_row, last[0], M, ends.count - done);
  }
}

// A result: rows by columns. The first vector of columns of a block: blocks are about equally wide.
struct Shape {
  int64_t rows, columns, out_row, vectors, blocks;
  Shape(int64_t r, int64_t c, int64_t row)
      : rows(r), columns(c), out_row(row), vectors((c + LANES - 1) / LANES),
        blocks((vectors + WIDE - 1) / WIDE) {}
  int64_t first(int64_t block) const { return block * vectors / blocks * LANES; }
};

// What the next kernel reads first, as NUM_FETCHED scalars of a launch tell (kernels/kernel.py).
inline Ahead of_next_kernel(const int64_t* s) {
  return Ahead::of(reinterpret_cast<const void*>(s[0]), s[1], s[2], s[3]);
}

// One block of columns by the rows of a panel. ``Rows`` knows the operands: how many ``parts`` a sum
// has, and how many ``sections`` one, between which it fetches; how to ``pack`` columns for a part; what
// that reads (``ahead``); and a ``tile`` of a part.
template <class T, bool PAIRED, class Rows>
struct Task {
  const Rows& x;
  const Shape& of;
  const T* bias;
  T* out;
  int64_t block, begin, end;  // rows
  Word* packed;
  float* sums;
  const Ahead& after;  // all of this

  template <int M, int N>
  void tile(int64_t row, int64_t part, int64_t width, const float* added, int64_t first,
            Ahead& later) const {
    float* const own = sums + (row - begin) * BLOCK;
    const bool is_last = part + 1 == x.parts;
    const Ends<T> ends = {part ? own : added, part ? BLOCK : 0, is_last ? nullptr : own,
                          out + row * of.out_row + first, of.out_row, of.columns - first};
    finish<T, M, N>(x.template tile<M, N>(row - begin, part, packed, width, later), ends);
  }

  template <int M>
  void wide(int64_t row, int64_t part, int64_t width, const float* added, int64_t first,
            Ahead& later) const {
    const int64_t vectors = width / LANES;
    if constexpr (WIDE > 2) {
      if (vectors == 4) return tile<M, 4>(row, part, width, added, first, later);
      if (vectors == 3) return tile<M, 3>(row, part, width, added, first, later);
    }
    if (vectors == 2) return tile<M, 2>(row, part, width, added, first, later);
    tile<M, 1>(row, part, width, added, first, later);
  }

  Ahead next(int64_t part) const {
    const bool is_last = part + 1 == x.parts;
    const int64_t other = is_last ? block + 1 : block;
    if (other == of.blocks) return end == of.rows ? after : Ahead{};
    return x.ahead(is_last ? 0 : part + 1, of.first(other), least(of.first(other + 1), of.columns));
  }

  void run() const {
    const int64_t first = of.first(block), width = of.first(block + 1) - first;
    const int64_t last = least(first + width, of.columns), tiles = (end - begin + ROWS - 1) / ROWS;
    alignas(64) float added[BLOCK] = {};
    for (int64_t n = 0; bias && n < last - first; ++n) added[n] = sp::widen(bias[first + n]);
    for (int64_t part = 0; part < x.parts; ++part) {
      x.pack(part, first, last, packed);
      Ahead later = next(part);
      later.section = tiles < MANY_TILES ? SECTION : MOST_STEPS;
      const int64_t fetches = tiles * x.sections(part, later.section);
      later.each_time = (later.lines * later.rows + fetches - 1) / fetches;
      for (int64_t row = begin; row < end;) {
        const int64_t rest = end - row;
        const auto multiplied = [&](auto rows) {
          constexpr int m = rows.value;
          wide<m>(row, part, width, added, first, later);
          row += m;
        };
        if (rest >= ROWS) multiplied(Number<ROWS>{});
        else if (rest >= 4) multiplied(Number<4>{});
        else if (rest >= 2) multiplied(Number<2>{});
        else multiplied(Number<1>{});
      }
    }
  }
};

// All columns of all rows, by panels of rows, of which ``all`` makes itself a picture each time.
// ``after`` is what will be read behind them.
template <class T, bool PAIRED, class Rows>
void multiply_all(const Rows& all, const Shape& of, const T* bias, T* out, double work,
                  const Ahead& after) {
#pragma omp parallel if (work > THREADED_FROM)
  {
    const int64_t wanted = (omp_get_num_threads() + of.blocks - 1) / of.blocks;
    const int64_t fair = (of.rows + wanted - 1) / wanted, some = fair < FEWEST ? FEWEST : fair;
    const int64_t count = (of.rows + least(some, PANEL) - 1) / least(some, PANEL);
    const int64_t height = up_to((of.rows + count - 1) / count, ROWS);
    const int64_t panels = (of.rows + height - 1) / height;
    alignas(64) Word packed[MOST_STEPS * BLOCK];
    alignas(64) float sums[PANEL * BLOCK];
    Rows x = all;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < of.blocks * panels; ++task) {
      const int64_t begin = task / of.blocks * height, end = least(begin + height, of.rows);
      x.look_at(begin, end);
      Task<T, PAIRED, Rows>{x, of, bias, out, task % of.blocks, begin, end, packed, sums, after}
          .run();
    }
  }
}

}  // namespace
}  // namespace blocks
#endif
