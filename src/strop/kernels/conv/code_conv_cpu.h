// Convolutions of int8 codes on a CPU: sums of (x - zero) (w - v) over windows, to int32. Exact.
//
// Pictures lie channels-last; others are copied. A product is made of it (``code_sums.h``): rows are the windows of a panel of
// pixels, whose codes are put behind each other while they are in a cache, columns are the channels of
// the result. Where a window leaves the picture it has ``zero``, which counts nothing. The weight is
// packed once for each content, in the order of a window.
namespace code_convs {
namespace {  // each kernel has its own

using code_sums::HEAD;
using code_sums::PANEL;
using code_sums::Word;

struct Window {
  int64_t batch, height, width, ins, outs, high, wide, down, right, top, left, below, beside;
  int64_t rows, columns;  // of pixels of the result
  int64_t depth() const { return high * wide * ins; }
  int64_t pixels() const { return batch * rows * columns; }
  bool is_point() const {
    return high * wide * down * right == 1 && !top && !left && rows == height && columns == width;
  }
};

template <class T>
struct Room {  // memory for as long as it is in scope: kernels link no library that has ``new``
  T* const begin;
  explicit Room(int64_t count)
      : begin(count ? static_cast<T*>(__builtin_malloc(count * sizeof(T))) : nullptr) {
    if (count && !begin) __builtin_trap();  // there is none left
  }
  Room(const Room&) = delete;
  ~Room() { __builtin_free(begin); }
};

// Puts the codes of the window at one pixel of the result behind each other.
inline void gather(const int8_t* x, const Window& w, int64_t pixel, int8_t zero, int8_t* to) {
  const int64_t column = pixel % w.columns, line = pixel / w.columns % w.rows;
  const int8_t* const picture = x + pixel / (w.columns * w.rows) * w.height * w.width * w.ins;
  const int64_t first = column * w.right - w.left, last = first + (w.wide - 1) * w.beside;
  const bool is_inside = first >= 0 && last < w.width && w.beside == 1;
  const int64_t size = w.wide * w.ins;
  for (int64_t n = 0; n < w.high; ++n, to += size) {
    const int64_t y = line * w.down - w.top + n * w.below;
    if (y < 0 || y >= w.height) {
      __builtin_memset(to, zero, size);
      continue;
    }
    const int8_t* const from = picture + y * w.width * w.ins;
    if (is_inside) {
      __builtin_memcpy(to, from + first * w.ins, size);
      continue;
    }
    for (int64_t m = 0; m < w.wide; ++m) {
      const int64_t at = first + m * w.beside;
      if (at < 0 || at >= w.width) __builtin_memset(to + m * w.ins, zero, w.ins);
      else __builtin_memcpy(to + m * w.ins, from + at * w.ins, w.ins);
    }
  }
}

// Packs a weight of any strides (outs, ins, high, wide).
inline void pack(const int8_t* weight, const int64_t* strides, const Window& w, Word* packed) {
  const int64_t depth = w.depth();
  const Room<int8_t> all(w.outs * depth);
  int8_t* to = all.begin;
  for (int64_t out = 0; out < w.outs; ++out)
    for (int64_t n = 0; n < w.high; ++n)
      for (int64_t m = 0; m < w.wide; ++m) {
        const int8_t* const from = weight + out * strides[0] + n * strides[2] + m * strides[3];
        for (int64_t in = 0; in < w.ins; ++in) *to++ = from[in * strides[1]];
      }
  code_sums::pack(all.begin, w.outs, depth, packed);
}

// ``zeros``: of the columns, or null.
inline void multiply(const int8_t* x, const Window& w, const Word* packed, int32_t zero,
                     const int32_t* zeros, int32_t* out) {
  const int64_t depth = w.depth(), pixels = w.pixels(), parts = (pixels + PANEL - 1) / PANEL;
  const int64_t padded = code_sums::up_to(w.outs, code_sums::LANES);
  const Room<int32_t> begins(code_sums::up_to(w.outs, 16));
  code_sums::begins_of(packed, w.outs, depth, zero, begins.begin);
#pragma omp parallel if (code_sums::work(pixels, w.outs, depth) > code_sums::THREADED_FROM)
  {
    const Room<int8_t> gathered(w.is_point() ? 0 : PANEL * depth);
    const Room<Word> copied(PANEL * code_sums::row_words(depth));
    const Room<int32_t> sums(PANEL * padded);
#pragma omp for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * PANEL, rows = code_sums::least(PANEL, pixels - begin);
      const int8_t* from = x + begin * w.ins;
      if (!w.is_point()) {
        from = gathered.begin;
        for (int64_t n = 0; n < rows; ++n)
          gather(x, w, begin + n, int8_t(zero), gathered.begin + n * depth);
      }
      code_sums::multiply(from, rows, w.outs, depth, packed, begins.begin, copied.begin, sums.begin);
      code_sums::take_off(zeros, from, rows, w.outs, depth, zero, sums.begin, padded);
      for (int64_t row = 0; row < rows; ++row)
        __builtin_memcpy(out + (begin + row) * w.outs, sums.begin + row * padded,
                         w.outs * sizeof(int32_t));
    }
  }
}

// Moves pictures (n, c, h, w) of some strides to others.
template <class T>
void move(const T* from, const int64_t* steps, T* to, const int64_t* others, int64_t batch,
          int64_t channels, int64_t height, int64_t width) {
  for (int64_t n = 0; n < batch; ++n)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x)
        for (int64_t c = 0; c < channels; ++c)
          to[n * others[0] + c * others[1] + y * others[2] + x * others[3]] =
              from[n * steps[0] + c * steps[1] + y * steps[2] + x * steps[3]];
}

struct Steps { int64_t each[4]; };  // from one picture, channel, row and pixel to the next

inline Steps channels_last(int64_t channels, int64_t height, int64_t width) {
  return {{height * width * channels, 1, width * channels, channels}};
}

inline bool lies(const int64_t* steps, const Steps& wanted, int64_t batch, int64_t channels,
                 int64_t height, int64_t width) {
  const int64_t sizes[] = {batch, channels, height, width};
  bool found = true;
  for (int n = 0; n < 4; ++n) found &= sizes[n] == 1 || steps[n] == wanted.each[n];
  return found;
}

// ``given``: x, weight, result, kept words, and maybe zero points of the columns.
inline void convolve(void* const* given, const int64_t* scalars, bool has_zeros) {
  const int64_t* const s = scalars;
  const Window w{s[0], s[1], s[2],  s[3],  s[4],  s[5],  s[6], s[7],
                 s[8], s[9], s[10], s[11], s[12], s[13], s[14]};
  const int8_t* const weight = static_cast<const int8_t*>(given[1]);
  Word* const kept = static_cast<Word*>(given[3]);
  const int64_t size = 1 + (w.outs - 1) * s[16] + (w.ins - 1) * s[17] + (w.high - 1) * s[18] +
                       (w.wide - 1) * s[19];  // of memory, gaps included
  const auto anew = [&](Word* packed) { pack(weight, s + 16, w, packed); };
  const Word* const packed = code_sums::made_once(weight, size, kept, anew);
  const Room<int32_t> zeros(has_zeros ? w.outs : 0);
  bool is_used = false;
  for (int64_t n = 0; has_zeros && n < w.outs; ++n) {
    zeros.begin[n] = int32_t(static_cast<const int64_t*>(given[4])[n * s[28]]);
    is_used |= zeros.begin[n] != 0;
  }
  const int8_t* x = static_cast<const int8_t*>(given[0]);
  int32_t* const out = static_cast<int32_t*>(given[2]);
  const Steps of_x = channels_last(w.ins, w.height, w.width);
  const Steps of_out = channels_last(w.outs, w.rows, w.columns);
  const bool is_x = lies(s + 20, of_x, w.batch, w.ins, w.height, w.width);
  const bool is_out = lies(s + 24, of_out, w.batch, w.outs, w.rows, w.columns);
  const Room<int8_t> laid(is_x ? 0 : w.batch * of_x.each[0]);
  const Room<int32_t> sums(is_out ? 0 : w.batch * of_out.each[0]);
  if (!is_x) {
    move(x, s + 20, laid.begin, of_x.each, w.batch, w.ins, w.height, w.width);
    x = laid.begin;
  }
  multiply(x, w, packed, int32_t(s[15]), is_used ? zeros.begin : nullptr,
           is_out ? out : sums.begin);
  if (!is_out) move(sums.begin, of_out.each, out, s + 24, w.batch, w.outs, w.rows, w.columns);
}

}  // namespace
}  // namespace code_convs
