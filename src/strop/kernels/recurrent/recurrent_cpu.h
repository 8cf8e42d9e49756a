// One layer of a recurrent network over all steps: gates (T, B, G * H) and the product of the last
// hidden state with a weight (G * H, H) give the next.
//
// The weight is packed once a call: for each vector of units the numbers of all gates lie beside
// each other, one step of the sums behind the other. A tile is all gates of one vector of units of
// some rows. Threads share rows where there are many, and units where there are few; what a number
// is depends on neither.
#ifndef STROP_RECURRENT
#define STROP_RECURRENT

extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();

namespace recurrent {
namespace {  // each kernel has its own

using namespace attention;

enum Kind { LSTM, GRU, RNN_TANH, RNN_RELU };
constexpr int gates_of(Kind kind) { return kind == LSTM ? 4 : kind == GRU ? 3 : 1; }
constexpr int64_t PART = 32;  // steps that are summed by themselves: errors grow with their number
constexpr int SUMS = LANES == 16 ? 24 : 12;  // vectors, beside which others fit into the registers
// rows of a tile
constexpr int rows_of(Kind kind) { return SUMS / gates_of(kind) < 6 ? SUMS / gates_of(kind) : 6; }

struct Layer {
  int64_t steps, batch, units, is_reversed, has_bias;
  int64_t gate_step, gate_row, gate_unit;  // strides
  int64_t weight_row, weight_unit, hidden_row, hidden_unit, cell_row, cell_unit, bias_unit;
  const float *gates, *weight, *hidden, *cell, *bias;
  float *out, *packed;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + sp::exp(-x)); }

// Packs the units of one vector: [step of the sums][gate][lane], and zeros behind the last unit.
template <int G>
void pack(const Layer& of, int64_t block) {
  float* to = of.packed + block * of.units * G * LANES;
  const int64_t first = block * LANES, count = least(of.units - first, LANES);
  for (int gate = 0; gate < G; ++gate)
    for (int lane = 0; lane < LANES; ++lane) {
      float* const lanes = to + gate * LANES + lane;
      const float* const row = of.weight + (gate * of.units + first + lane) * of.weight_row;
      if (lane < count)
        for (int64_t k = 0; k < of.units; ++k) lanes[k * G * LANES] = row[k * of.weight_unit];
      else
        for (int64_t k = 0; k < of.units; ++k) lanes[k * G * LANES] = 0.0f;
    }
}

// What a step adds to the sums of products: [row][gate][lane].
template <int R, int G>
struct Sums {
  alignas(64) float at[R][G][LANES];
};

inline Floats some(const float* from, int64_t stride, int64_t count) {
  if (stride == 1 && count == LANES) return load(from);
  Floats found = {};
  for (int64_t lane = 0; lane < count; ++lane) found[lane] = from[lane * stride];
  return found;
}

// Sums of the hidden states of R rows, ``hidden`` with strides, by one vector of units of each gate.
template <int R, int G>
[[gnu::always_inline]] inline void multiply(Sums<R, G>& sums, const float* hidden, int64_t row,
                                            int64_t unit, const float* packed, int64_t units) {
  for (int64_t part = 0; part < units; part += PART) {
    const int64_t end = least(part + PART, units);
    Floats found[R][G] = {};
    for (int64_t k = part; k < end; ++k, packed += G * LANES) {
      Floats columns[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) columns[g] = load(packed + g * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats state = splat(hidden[r * row + k * unit]);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) found[r][g] += state * columns[g];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) store(sums.at[r][g], load(sums.at[r][g]) + found[r][g]);
  }
}

// One step of R rows and one vector of units. ``before`` has the hidden states of the last step.
template <Kind KIND, int R>
void tile(const Layer& of, int64_t step, int64_t row, int64_t block, const float* before,
          int64_t before_row, int64_t before_unit) {
  constexpr int G = gates_of(KIND);
  const int64_t first = block * LANES, count = least(of.units - first, LANES);
  const float* const gates = of.gates + step * of.gate_step + row * of.gate_row;
  Sums<R, G> sums;
  float added[R][LANES];  // to a GRU's last gate, behind the product with another
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) {
      const int64_t unit = g * of.units + first;
      const float* const from = gates + r * of.gate_row + unit * of.gate_unit;
      const Floats own = some(from, of.gate_unit, count);
      const Floats bias = of.has_bias ? some(of.bias + unit * of.bias_unit, of.bias_unit, count) : Floats{};
      const bool is_last = KIND == GRU && g == 2;
      if (is_last) store(added[r], own);
      store(sums.at[r][g], is_last ? bias : own + bias);
    }
  multiply<R, G>(sums, before + row * before_row, before_row, before_unit,
                 of.packed + block * of.units * G * LANES, of.units);
  float* const cells = of.out + of.steps * of.batch * of.units;  // an LSTM's
  for (int r = 0; r < R; ++r) {
    const float(&s)[G][LANES] = sums.at[r];
    const int64_t place = (row + r) * of.units + first;
    float last[LANES] = {}, next[LANES], kept[LANES];
    if constexpr (KIND == LSTM) store(last, some(cells + place, 1, count));
    if constexpr (KIND == GRU)
      store(last, some(before + (row + r) * before_row + first * before_unit, before_unit, count));
#pragma omp simd
    for (int n = 0; n < LANES; ++n) {
      if constexpr (KIND == LSTM) {
        kept[n] = sigmoid(s[1][n]) * last[n] + sigmoid(s[0][n]) * sp::tanh(s[2][n]);
        next[n] = sigmoid(s[3][n]) * sp::tanh(kept[n]);
      } else if constexpr (KIND == GRU) {
        const float fresh = sp::tanh(added[r][n] + sigmoid(s[0][n]) * s[2][n]);
        next[n] = fresh + sigmoid(s[1][n]) * (last[n] - fresh);
      } else if constexpr (KIND == RNN_TANH) {
        next[n] = sp::tanh(s[0][n]);
      } else {
        next[n] = s[0][n] > 0.0f || s[0][n] != s[0][n] ? s[0][n] : 0.0f;
      }
    }
    float* const to = of.out + step * of.batch * of.units + place;
    for (int64_t n = 0; n < count; ++n) to[n] = next[n];
    if constexpr (KIND == LSTM)
      for (int64_t n = 0; n < count; ++n) cells[place + n] = kept[n];
  }
}

// Rows ``begin`` to ``end`` of one step, by vectors of units ``first`` to ``last``.
template <Kind KIND>
void advance(const Layer& of, int64_t count, int64_t begin, int64_t end, int64_t first, int64_t last) {
  constexpr int R = rows_of(KIND), HALF = (R + 1) / 2;
  const int64_t step = of.is_reversed ? of.steps - 1 - count : count;
  const float* before = of.hidden;
  int64_t before_row = of.hidden_row, before_unit = of.hidden_unit;
  if (count) {
    before = of.out + (of.is_reversed ? step + 1 : step - 1) * of.batch * of.units;
    before_row = of.units, before_unit = 1;
  }
  for (int64_t block = first; block < last; ++block)
    for (int64_t row = begin; row < end;) {
      const int64_t rest = end - row;
      const auto advanced = [&](auto rows) {
        tile<KIND, rows.value>(of, step, row, block, before, before_row, before_unit);
        row += rows.value;
      };
      if (rest >= R && rest != R + 1) advanced(Number<R>{});  // two halves are less than R and one
      else if (rest >= HALF) advanced(Number<HALF>{});
      else advanced(Number<1>{});
    }
}

// A share of ``size``: from where the ``number``th of ``count`` begins.
inline int64_t share(int64_t size, int64_t number, int64_t count) { return size * number / count; }

template <Kind KIND>
void walk(void* const* buffers, const int64_t* scalars) {
  const auto at = [&](int place) { return static_cast<float*>(buffers[place]); };
  const int64_t* s = scalars;
  const Layer of = {s[0],  s[1],  s[2],  s[3],  s[4],  s[5],  s[6],  s[7],  s[8],  s[9],  s[10],
                    s[11], s[12], s[13], s[14], at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
  constexpr int G = gates_of(KIND), R = rows_of(KIND);
  const int64_t blocks = (of.units + LANES - 1) / LANES;
  const double work = 2.0 * of.steps * of.batch * G * of.units * of.units;
#pragma omp parallel if (work > THREADED_FROM)
  {
    const int64_t threads = omp_get_num_threads(), number = omp_get_thread_num();
    const int64_t first = share(blocks, number, threads), last = share(blocks, number + 1, threads);
    const int64_t from = share(of.batch, number, threads), to = share(of.batch, number + 1, threads);
    for (int64_t block = first; block < last; ++block) pack<G>(of, block);
    if constexpr (KIND == LSTM) {
      float* const cells = of.out + of.steps * of.batch * of.units;
      for (int64_t row = from; row < to; ++row)
        for (int64_t unit = 0; unit < of.units; ++unit)
          cells[row * of.units + unit] = of.cell[row * of.cell_row + unit * of.cell_unit];
    }
#pragma omp barrier
    if (of.batch >= R * threads) {
      for (int64_t count = 0; count < of.steps; ++count) advance<KIND>(of, count, from, to, 0, blocks);
    } else {
      for (int64_t count = 0; count < of.steps; ++count) {
        advance<KIND>(of, count, 0, of.batch, first, last);
#pragma omp barrier
      }
    }
  }
}

}  // namespace
}  // namespace recurrent
#endif
