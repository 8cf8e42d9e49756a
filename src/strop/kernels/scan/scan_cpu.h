// Linear recurrences on a CPU: h[t] = a[t] * h[t - 1] + b[t] over (batch, rows, steps, inner).
//
// Vectors lie along the innermost dim. Some rows are walked in turns, a few steps each, so that what
// they write beside each other is a whole cache line while it is in the first cache. Each element is walked by itself, so that its bits depend on nothing beside it.
#ifndef STROP_SCANS
#define STROP_SCANS

namespace scans {
namespace {  // each kernel has its own

constexpr int64_t MOST = 512;         // elements beside each other that one task walks
constexpr int64_t TOGETHER = 64;      // that rows are to have which one task walks
constexpr int64_t AT_ONCE = 16;       // steps of a row before those of the next
constexpr int64_t MOST_APART = 16;    // the same, where each lies in a cache line of its own
constexpr int64_t THREADED_FROM = 65536;  // elements: 20 us of one core

struct Strides {
  int64_t batch, row, step, inner;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Some steps of one row of WIDTH elements, or of ``count`` where WIDTH is 0, which lie side by side
// (DENSE) or not. The first step of all begins from nothing.
template <class T, class State, int WIDTH, bool DENSE>
[[gnu::always_inline]] inline void walk(const T* a, const T* b, T* out, State* states, int64_t step,
                                        int64_t last, int64_t count, const Strides* of) {
  const int64_t width = WIDTH ? WIDTH : count;
  const int64_t by_a = DENSE ? 1 : of[0].inner, by_b = DENSE ? 1 : of[1].inner;
  const int64_t by_out = DENSE ? 1 : of[2].inner;
  if (step == 0) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      states[i] = State(sp::widen(b[i * by_b]));
      out[i * by_out] = b[i * by_b];
    }
    ++step;
  }
  for (; step < last; ++step) {
    const T* const factors = a + step * of[0].step;
    const T* const added = b + step * of[1].step;
    T* const to = out + step * of[2].step;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      states[i] = State(sp::widen(factors[i * by_a])) * states[i] + State(sp::widen(added[i * by_b]));
      to[i * by_out] = sp::narrow<T>(states[i]);
    }
  }
}

// One task: all steps of some rows.
template <class T, class State, int WIDTH, bool DENSE>
inline void task(const T* a, const T* b, T* out, int64_t steps, int64_t rows, int64_t count,
                 const Strides* of) {
  State states[MOST];
  for (int64_t step = 0; step < steps; step += AT_ONCE) {
    const int64_t last = least(step + AT_ONCE, steps);
    for (int64_t row = 0; row < rows; ++row)
      walk<T, State, WIDTH, DENSE>(a + row * of[0].row, b + row * of[1].row, out + row * of[2].row,
                                   states + row * count, step, last, count, of);
  }
}

template <class T, class State>
void scan(void* const* buffers, const int64_t* scalars) {
  const int64_t* s = scalars;
  int64_t batches = s[0], rows = s[1], inner = s[3];
  const int64_t steps = s[2];
  Strides of[3] = {{s[4], s[5], s[6], s[7]}, {s[8], s[9], s[10], s[11]}, {s[12], s[13], s[14], s[15]}};
  if (inner == 1) {  // the last dim is the one that is walked: its neighbours are walked together
    inner = rows;
    rows = 1;
    for (Strides& each : of) each = {each.batch, 0, each.step, each.row};
  }
  if (inner == 1) {
    inner = batches;
    batches = 1;
    for (Strides& each : of) each = {0, 0, each.step, each.batch};
  }
  const T* const a = static_cast<const T*>(buffers[0]);
  const T* const b = static_cast<const T*>(buffers[1]);
  T* const out = static_cast<T*>(buffers[2]);
  const bool is_dense = of[0].inner == 1 && of[1].inner == 1 && of[2].inner == 1;
  const int64_t most = is_dense ? MOST : MOST_APART;
  const int64_t parts = (inner + most - 1) / most;
  const int64_t together = parts == 1 ? least(rows, (TOGETHER + inner - 1) / inner) : 1;
  const int64_t blocks = (rows + together - 1) / together;
#pragma omp parallel for schedule(static) if (batches * rows * steps * inner > THREADED_FROM)
  for (int64_t number = 0; number < batches * blocks * parts; ++number) {
    const int64_t batch = number / parts / blocks, row = number / parts % blocks * together;
    const int64_t first = number % parts * most;
    const int64_t count = least(inner - first, most), some = least(rows - row, together);
    const auto at = [&](const Strides& by) {
      return batch * by.batch + row * by.row + first * by.inner;
    };
    const T *from_a = a + at(of[0]), *from_b = b + at(of[1]);
    T* const to = out + at(of[2]);
    if (!is_dense) task<T, State, 0, false>(from_a, from_b, to, steps, some, count, of);
    else if (count == 8) task<T, State, 8, true>(from_a, from_b, to, steps, some, count, of);
    else if (count == 16) task<T, State, 16, true>(from_a, from_b, to, steps, some, count, of);
    else task<T, State, 0, true>(from_a, from_b, to, steps, some, count, of);
  }
}

}  // namespace
}  // namespace scans

#endif
