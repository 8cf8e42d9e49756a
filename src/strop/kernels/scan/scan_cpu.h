// Linear recurrences on a CPU: h[t] = a[t] * h[t - 1] + b[t] over (outer, steps, inner).
//
// Vectors lie along the innermost dim, whose states stay in registers where it has as many elements
// as vectors have lanes, and else, some hundred at a time, in the first cache. Each element is
// walked by itself, so that its bits depend on nothing beside it.
#ifndef STROP_SCANS
#define STROP_SCANS

namespace scans {
namespace {  // each kernel has its own

constexpr int64_t MOST = 512;         // elements beside each other that one task walks
constexpr int64_t MOST_APART = 16;    // the same, where each lies in a cache line of its own
constexpr int64_t THREADED_FROM = 65536;  // elements: 20 us of one core

struct Strides {
  int64_t outer, step, inner;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// One task: ``steps`` of WIDTH elements, or of ``count`` where WIDTH is 0, which lie side by side
// (DENSE) or not.
template <class T, class State, int WIDTH, bool DENSE>
inline void walk(const T* a, const T* b, T* out, int64_t steps, int64_t count, const Strides& of_a,
                 const Strides& of_b, const Strides& of_out) {
  const int64_t width = WIDTH ? WIDTH : count;
  const int64_t by_a = DENSE ? 1 : of_a.inner, by_b = DENSE ? 1 : of_b.inner;
  const int64_t by_out = DENSE ? 1 : of_out.inner;
  State states[WIDTH ? WIDTH : MOST];
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    states[i] = State(sp::widen(b[i * by_b]));
    out[i * by_out] = b[i * by_b];
  }
  for (int64_t step = 1; step < steps; ++step) {
    a += of_a.step;
    b += of_b.step;
    out += of_out.step;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      states[i] = State(sp::widen(a[i * by_a])) * states[i] + State(sp::widen(b[i * by_b]));
      out[i * by_out] = sp::narrow<T>(states[i]);
    }
  }
}

template <class T, class State>
void scan(void* const* buffers, const int64_t* scalars) {
  const int64_t* s = scalars;
  int64_t outer = s[0], inner = s[2];
  const int64_t steps = s[1];
  Strides of[3] = {{s[3], s[4], s[5]}, {s[6], s[7], s[8]}, {s[9], s[10], s[11]}};
  if (inner == 1) {  // the last dim is the one that is walked: its neighbours are walked together
    inner = outer;
    outer = 1;
    for (Strides& each : of) each = {0, each.step, each.outer};
  }
  const T* const a = static_cast<const T*>(buffers[0]);
  const T* const b = static_cast<const T*>(buffers[1]);
  T* const out = static_cast<T*>(buffers[2]);
  const bool is_dense = of[0].inner == 1 && of[1].inner == 1 && of[2].inner == 1;
  const int64_t most = is_dense ? MOST : MOST_APART;
  const int64_t parts = (inner + most - 1) / most;
#pragma omp parallel for schedule(static) if (outer * steps * inner > THREADED_FROM)
  for (int64_t task = 0; task < outer * parts; ++task) {
    const int64_t row = task / parts, first = task % parts * most;
    const int64_t count = least(inner - first, most);
    const T* const from_a = a + row * of[0].outer + first * of[0].inner;
    const T* const from_b = b + row * of[1].outer + first * of[1].inner;
    T* const to = out + row * of[2].outer + first * of[2].inner;
#define STROP_WALK(WIDTH, DENSE) \
  walk<T, State, WIDTH, DENSE>(from_a, from_b, to, steps, count, of[0], of[1], of[2])
    if (!is_dense) STROP_WALK(0, false);
    else if (count == 8) STROP_WALK(8, true);
    else if (count == 16) STROP_WALK(16, true);
    else if (count == 32) STROP_WALK(32, true);
    else if (count == 64) STROP_WALK(64, true);
    else STROP_WALK(0, true);
#undef STROP_WALK
  }
}

}  // namespace
}  // namespace scans

#endif
