// Convolutions on a CPU, by blocks (gemm/blocks_cpu.h): pictures (B, H, W, C), in whatever order their
// dims are numbered, times a weight (O, C, h, w) of any strides.
//
// Rows of the product are pixels of the result. A tile reads each tap of the window where the pixels
// of the picture lie, whose channels are dense, and zeros where the window leaves it. A part of a sum
// is some channels of all taps, so that a weight whose taps lie together is read line by line. Few
// columns would leave most lanes of a tile empty: their sums run along the channels.
#ifndef STROP_CONVOLUTIONS
#define STROP_CONVOLUTIONS

namespace convolutions {
namespace {  // each kernel has its own

using namespace blocks;

constexpr int64_t MOST_TAPS = 64;     // as MOST_TAPS of conv_cpu.py has it
constexpr int64_t MOST_WORDS = 128;   // channels of a part, in words
constexpr int64_t FEW_COLUMNS = 4;    // as of linears
constexpr int64_t FEW_WORDS = 8192;   // of a weight of few columns: 32 KB
alignas(64) constexpr Word ZEROS[MOST_WORDS] = {};

struct Window {
  int64_t height, width, channels, high, wide, down, right, top, left, below, beside, rows, columns;
  Strides x, w;  // batch or output, channel as ``head``, row, column; in elements
  int64_t taps() const { return high * wide; }
};

// Where the window of a pixel begins, in elements, and which of its taps are in the picture.
struct Pixel {
  int64_t at;
  uint64_t inside;
};

// Calls f(number, pixel) for some pixels of the result.
template <class F>
inline void each_pixel(const Window& of, int64_t begin, int64_t end, F f) {
  int64_t column = begin % of.columns, line = begin / of.columns % of.rows;
  int64_t picture = begin / of.columns / of.rows;
  for (int64_t number = begin; number < end; ++number) {
    const int64_t x = column * of.right - of.left, y = line * of.down - of.top;
    uint64_t row = 0, inside = 0;
    for (int64_t n = 0; n < of.wide; ++n)
      row |= uint64_t(uint64_t(x + n * of.beside) < uint64_t(of.width)) << n;
    for (int64_t n = 0; n < of.high; ++n)
      if (uint64_t(y + n * of.below) < uint64_t(of.height)) inside |= row << n * of.wide;
    f(number, Pixel{picture * of.x.batch + y * of.x.row + x * of.x.column, inside});
    if (++column < of.columns) continue;
    column = 0;
    if (++line == of.rows) line = 0, ++picture;
  }
}

template <class T, bool PAIRED>
struct Pictures {
  static constexpr int64_t EACH = PAIRED ? 2 : 1;
  const T* x;
  const T* w;
  Window of;
  int64_t all, at_once, parts;  // words of channels, those of a part
  int64_t moves[MOST_TAPS];     // of the taps of a window, in elements
  Pixel pixels[PANEL];

  Pictures(const T* pictures, const T* weight, const Window& window)
      : x(pictures), w(weight), of(window), all(of.channels / EACH),
        at_once(least(MOST_STEPS / of.taps(), MOST_WORDS)), parts((all + at_once - 1) / at_once) {
    for (int64_t tap = 0; tap < of.taps(); ++tap)
      moves[tap] = tap / of.wide * of.below * of.x.row + tap % of.wide * of.beside * of.x.column;
  }

  int64_t steps(int64_t part) const { return least(all - part * at_once, at_once); }

  void look_at(int64_t begin, int64_t end) {
    each_pixel(of, begin, end, [&](int64_t row, Pixel found) { pixels[row - begin] = found; });
  }

  // Words by tap and channel, then by column.
  void pack(int64_t part, int64_t first, int64_t last, Word* to) const {
    const int64_t width = up_to(last - first, LANES), count = steps(part);
    const T* const from = w + part * at_once * EACH * of.w.head;
    if (of.w.head == 1) {
      for (int64_t tap = 0; tap < of.taps(); ++tap, to += count * width) {
        const T* const own = from + tap / of.wide * of.w.row + tap % of.wide * of.w.column;
        pack_keys<T, PAIRED>(own, {0, 0, of.w.batch, 1}, first, last, count * EACH, to);
      }
    } else {
      pack_taps(from, first, last, count, to);
    }
  }

  // The same where taps lie together: vectors of each tap and channel in turn, put in their places.
  void pack_taps(const T* from, int64_t first, int64_t last, int64_t count, Word* to) const {
    const int64_t width = up_to(last - first, LANES), taps = of.taps();
    const bool is_dense = of.w.column == 1 && of.w.row == of.wide && of.w.head == taps;
    alignas(64) Word lines[MOST_STEPS * LANES];
    for (int64_t column = first; column < last; column += LANES) {
      Word* const own = to + column - first;
      const int64_t end = least(column + LANES, last);
      if (is_dense) {
        pack_keys<T, PAIRED>(from, {0, 0, of.w.batch, 1}, column, end, count * EACH * taps, lines);
        for (int64_t n = 0; n < count; ++n)
          for (int64_t tap = 0; tap < taps; ++tap)
            store(own + (tap * count + n) * width, word_of(lines, n, tap, taps));
      } else {
        for (int64_t tap = 0; tap < taps; ++tap) {
          const T* const other = from + tap / of.wide * of.w.row + tap % of.wide * of.w.column;
          pack_keys<T, PAIRED>(other, {0, 0, of.w.batch, of.w.head}, column, end, count * EACH, lines);
          for (int64_t n = 0; n < count; ++n)
            store(own + (tap * count + n) * width, *reinterpret_cast<const LooseWords*>(lines + n * LANES));
        }
      }
    }
  }

  // Word ``n`` of a tap, of lines of numbers by channel, then by tap. Pairs of bf16 in a line are of
  // two taps, and those that are wanted are of two channels.
  static Words word_of(const Word* lines, int64_t n, int64_t tap, int64_t taps) {
    const auto line = [&](int64_t at) {
      return *reinterpret_cast<const LooseWords*>(lines + at * LANES);
    };
    if constexpr (!PAIRED) return line(n * taps + tap);
    const int64_t a = 2 * n * taps + tap, b = a + taps;
    const Words low = a % 2 ? line(a / 2) >> 16 : line(a / 2) & 0xFFFF;
    return low | (b % 2 ? line(b / 2) & 0xFFFF0000 : line(b / 2) << 16);
  }

  Ahead ahead(int64_t part, int64_t first, int64_t last) const {
    const int64_t taps = of.taps();
    if (of.w.column != 1 || of.w.row != of.wide || of.w.head != taps) return {};
    const int64_t unit = sizeof(T), row = of.w.batch * unit;
    const T* const from = w + part * at_once * EACH * taps + first * of.w.batch;
    return Ahead::of(from, row, steps(part) * EACH * taps * unit, last - first);
  }

  int64_t sections(int64_t, int64_t) const { return of.taps(); }

  template <int M, int N>
  [[gnu::always_inline]] inline Tile<M, N> tile(int64_t row, int64_t part, const Word* b,
                                                int64_t width, Ahead& later) const {
    const int64_t count = steps(part), taps = of.taps();
    const T* const from = x + part * at_once * EACH;
    if (part + 1 < parts)  // lines of other channels, which no processor foresees
      each<M>(NUMBERED {
        __builtin_prefetch(from + pixels[row + i.value].at + moves[taps / 2] + at_once * EACH, 0, 2);
      });
    Tile<M, N> sums;
    clear(sums);
    for (int64_t tap = 0; tap < taps; ++tap, b += count * width) {
      const Word* a[M];
      each<M>(NUMBERED {
        const Pixel& own = pixels[row + i.value];
        const T* const there = from + own.at + moves[tap];
        a[i.value] = own.inside >> tap & 1 ? reinterpret_cast<const Word*>(there) : ZEROS;
      });
      later.fetch();
      multiply_more<PAIRED, M, N>(sums, a, b, width, count);
    }
    return sums;
  }
};

// ---- few columns -------------------------------------------------------------------------------

// Two pixels by four columns, along the channels of all taps. ``w``: words by column, tap, channel.
template <class T, bool PAIRED>
void two(const Pictures<T, PAIRED>& all, const Pixel (&pixels)[2], const Word* w, float (&found)[2][4]) {
  const int64_t taps = all.of.taps(), words = all.all;
  Floats sums[2][4] = {};
  for (int64_t tap = 0; tap < taps; ++tap) {
    const Word* rows[2];
    int64_t unit[2];
    for (int n = 0; n < 2; ++n) {
      const bool is_inside = pixels[n].inside >> tap & 1;
      rows[n] = is_inside ? reinterpret_cast<const Word*>(all.x + pixels[n].at + all.moves[tap]) : ZEROS;
      unit[n] = is_inside ? -1 : 0;
    }
    for (int64_t at = 0; at < words; at += LANES)
      each<4>(NUMBERED {
        const Word* const own = w + (i.value * taps + tap) * words + at;
        const Words column = *reinterpret_cast<const LooseWords*>(own);
        fuse<PAIRED>(sums[0][i.value], *reinterpret_cast<const LooseWords*>(rows[0] + (at & unit[0])), column);
        fuse<PAIRED>(sums[1][i.value], *reinterpret_cast<const LooseWords*>(rows[1] + (at & unit[1])), column);
      });
  }
  each<8>(NUMBERED { found[i.value / 4][i.value % 4] = total(sums[i.value / 4][i.value % 4]); });
}

template <class T, bool PAIRED>
void along_channels(const Pictures<T, PAIRED>& all, const Shape& of, const T* bias, T* out, double work) {
  const Window& window = all.of;
  const int64_t taps = window.taps();
  alignas(64) Word packed[FEW_WORDS] = {};
  T* to = reinterpret_cast<T*>(packed);
  for (int64_t column = 0; column < of.columns; ++column)
    for (int64_t tap = 0; tap < taps; ++tap) {
      const T* const from = all.w + column * window.w.batch + tap / window.wide * window.w.row +
                            tap % window.wide * window.w.column;
      for (int64_t n = 0; n < window.channels; ++n) *to++ = from[n * window.w.head];
    }
#pragma omp parallel for schedule(static) if (work > THREADED_FROM)
  for (int64_t row = 0; row < of.rows; row += 2) {
    Pixel pixels[2];
    each_pixel(window, row, row + 2, [&](int64_t n, Pixel own) { pixels[n - row] = own; });
    if (row + 1 == of.rows) pixels[1].inside = 0;
    float found[2][4];
    two<T, PAIRED>(all, pixels, packed, found);
    for (int64_t n = 0; n < 2 && row + n < of.rows; ++n)
      for (int64_t column = 0; column < of.columns; ++column)
        out[(row + n) * of.out_row + column] =
            sp::narrow<T>(bias ? found[n][column] + sp::widen(bias[column]) : found[n][column]);
  }
}

// ---- all ---------------------------------------------------------------------------------------

// From one pixel of the result to the next: the step of a dim that has more than one.
inline int64_t step_of(const Window& of, const int64_t* strides) {
  return of.columns > 1 ? strides[3] : of.rows > 1 ? strides[2] : strides[0];
}

// Buffers: x, w, the result, and the bias where scalar 27 says that there is one. Four scalars behind
// that tell what the next kernel reads.
template <class T, bool PAIRED>
void convolve(void* const* buffers, const int64_t* s) {
  const int64_t batch = s[0], outs = s[1], words = PAIRED ? s[4] / 2 : s[4];
  const Window window = {s[2],  s[3],  s[4],  s[5],  s[6],  s[7],  s[8],
                         s[9],  s[10], s[11], s[12], s[13], s[14],
                         {s[15], s[16], s[17], s[18]}, {s[19], s[20], s[21], s[22]}};
  const T* const x = static_cast<const T*>(buffers[0]);
  const T* const w = static_cast<const T*>(buffers[1]);
  T* const out = static_cast<T*>(buffers[2]);
  const T* const bias = s[27] ? static_cast<const T*>(buffers[3]) : nullptr;
  const Pictures<T, PAIRED> all(x, w, window);
  const Shape of(batch * window.rows * window.columns, outs, step_of(window, s + 23));
  const double work = 2.0 * of.rows * outs * window.channels * window.taps();
  const bool has_few = outs <= FEW_COLUMNS && words % LANES == 0;
  if (has_few && 4 * window.taps() * words <= FEW_WORDS)
    return along_channels<T, PAIRED>(all, of, bias, out, work);
  multiply_all<T, PAIRED>(all, of, bias, out, work, of_next_kernel(s + 28));
}

#undef NUMBERED

}  // namespace
}  // namespace convolutions

#endif
