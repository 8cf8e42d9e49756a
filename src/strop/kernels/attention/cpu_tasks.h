// Attention by the tiles of cpu.h: masks, tasks of some queries of one head, and whole calls.
//
// Where each thread has a head or more, it packs the keys and values of one and computes what reads
// them while they lie in its cache, and fetches the rows of the next. Otherwise all are packed first.
#ifndef STROP_CPU_ATTENTION_TASKS
#define STROP_CPU_ATTENTION_TASKS

extern "C" {
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace attention {
namespace {  // each kernel has its own

// ---- masks -------------------------------------------------------------------------------------

inline float number(bool x) { return x ? 0.0f : LOWEST; }
inline float number(float x) { return x; }
inline float number(sp::bf16 x) { return sp::widen(x); }

template <class T>
void read_mask(const T* row, int64_t stride, int64_t count, float* to) {
  if (stride == 1) {
#pragma omp simd
    for (int64_t key = 0; key < count; ++key) to[key] = number(row[key]);
  } else {
    for (int64_t key = 0; key < count; ++key) to[key] = number(row[key * stride]);
  }
}

// Marks side by side, by vectors: g++ takes them one by one.
inline void read_mask(const bool* row, int64_t stride, int64_t count, float* to) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
  int64_t key = 0;
  for (; stride == 1 && key + LANES <= count; key += LANES) {
    const Bytes marks = *reinterpret_cast<const Bytes*>(row + key);
    const Words is_hidden = Words(__builtin_convertvector(marks, Words) == Words{});
    store(to + key, is_hidden & splat(bits(LOWEST)));
  }
  for (; key < count; ++key) to[key] = number(row[key * stride]);
}

inline void add(const float* numbers, int64_t count, float* to) {
#pragma omp simd
  for (int64_t key = 0; key < count; ++key) to[key] += numbers[key];
}

// Tells whether any of some numbers is another than 0.
inline bool is_any(const float* numbers, int64_t count) {
  uint32_t found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t key = 0; key < count; ++key) found |= numbers[key] != 0.0f;
  return found;
}

constexpr int SOME = LANES < 8 ? 8 : LANES;  // marks

// Tells whether SOME marks are all set.
inline bool are_set(const bool* marks) {
  typedef uint64_t Marks __attribute__((aligned(1), may_alias));
  constexpr uint64_t all = 0x0101010101010101u;
  uint64_t found = all;
  for (int n = 0; n < SOME; n += 8) found &= *reinterpret_cast<const Marks*>(marks + n);
  return found == all;
}

// Marks side by side: what they hide of the scores of one row becomes -infinity.
inline void hide(const bool* marks, int64_t count, float* to) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
  int64_t key = 0;
  for (; key + LANES <= count; key += LANES) {
    if (key + SOME <= count && are_set(marks + key)) continue;
    const Bytes found = *reinterpret_cast<const Bytes*>(marks + key);
    const Words is_hidden = Words(__builtin_convertvector(found, Words) == Words{});
    store(to + key, load(to + key) + Floats(is_hidden & splat(bits(LOWEST))));
  }
  for (; key < count; ++key) to[key] += number(marks[key]);
}

// ---- one task ----------------------------------------------------------------------------------

// Where the rows of the head begin that is next: they are fetched while this one is computed.
struct Next {
  const char* q = nullptr;
  const char* k = nullptr;
  const char* v = nullptr;
};

inline void fetch(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// The packed keys and values of one head, and some queries of it.
template <class T, bool PAIRED>
struct Task {
  const Sizes& of;
  const Word* keys;
  const Word* values;
  const T* q;        // row 0 of the head
  T* out;
  const void* mask;  // at its row 0
  Next next;
  int64_t begin, count;

  // no aggregate, which would be filled with zeros
  Task(const Sizes& of, const Word* keys, const Word* values, const T* q, T* out, const void* mask,
       const Next& next, int64_t begin, int64_t count)
      : of(of), keys(keys), values(values), q(q), out(out), mask(mask), next(next), begin(begin),
        count(count) {}

  static constexpr int64_t EACH = PAIRED ? 2 : 1;
  alignas(64) Word queries[QUERIES * MOST_HEAD];
  alignas(64) float sums[QUERIES * MOST_HEAD];
  alignas(64) float scores[ROWS * KEYS];
  alignas(64) Word powers[PAIRED ? ROWS * KEYS / 2 : LANES];
  alignas(64) float numbers[KEYS];
  bool adds = false;  // numbers that all rows share, and that are not all 0
  RowState rows[QUERIES];

  int64_t steps() const { return (of.head + EACH - 1) / EACH; }
  int64_t row_words() const { return up_to(steps(), LANES); }
  int64_t columns() const { return up_to(of.values, LANES); }

  // Tells whether queries can be read as words where they lie. Of many, rows that are not yet in a
  // cache would each be waited for.
  bool are_words() const {
    constexpr bool is_word = sizeof(T) * EACH == sizeof(Word);
    return is_word && of.queries <= KEYS && of.q.column == 1 && of.head % EACH == 0 && of.q.row % EACH == 0 &&
           reinterpret_cast<uintptr_t>(q) % sizeof(Word) == 0;
  }

  void run() {
    for (int64_t n = are_words() ? count / ROWS * ROWS : 0; n < up_to(count, ROWS) && n < QUERIES; ++n)
      for (int64_t step = 0; step < steps(); step += LANES)
        store(queries + n * row_words() + step,
              n < count ? words<T, PAIRED>(q + (begin + n) * of.q.row, of.q.column, of.head, step)
                        : Words{});
    const int64_t seen = of.is_causal ? least(of.keys, begin + count) : of.keys;
    for (int64_t first = 0; first < seen; first += KEYS) {
      if (of.mask_kind != NONE && of.mask.row == 0) {
        read(0, first);
        adds = is_any(numbers, least(KEYS, of.keys - first));
      }
      for (int64_t n = 0; n < count; n += ROWS) {
        const int64_t rest = count - n;
        if (next.q && !first) fetch_next(begin + n, begin + n + least(rest, ROWS));
        if (rest > 4) part<6>(n, first);
        else if (rest > 2) part<4>(n, first);
        else if (rest > 1) part<2>(n, first);
        else part<1>(n, first);
      }
    }
    finish();
  }

  // Of the next head as many rows as these queries are of this one.
  void fetch_next(int64_t from, int64_t to) const {
    for (int64_t row = from; row < to; ++row)
      fetch(next.q + row * of.q.row * int64_t(sizeof(T)), of.head * sizeof(T));
    if (!next.k) return;
    for (int64_t row = from * of.keys / of.queries; row < to * of.keys / of.queries; ++row) {
      fetch(next.k + row * of.k.row * int64_t(sizeof(T)), of.head * sizeof(T));
      fetch(next.v + row * of.v.row * int64_t(sizeof(T)), of.values * sizeof(T));
    }
  }

  // not inline: each place of it would have all of its loops
  [[gnu::noinline]] void read(int64_t row, int64_t first) {
    const int64_t at = row * of.mask.row + first * of.mask.column;
    const int64_t some = least(KEYS, of.keys - first);
    if (of.mask_kind == MARKS)
      read_mask(static_cast<const bool*>(mask) + at, of.mask.column, some, numbers);
    else
      read_mask(static_cast<const T*>(mask) + at, of.mask.column, some, numbers);
  }

  // The keys of a chunk that a row attends to.
  int64_t seen_by(int64_t row, int64_t first) const {
    const int64_t rest = of.is_causal ? least(of.keys, begin + row + 1) : of.keys;
    const int64_t some = least(KEYS, rest - first);
    return some < 0 ? 0 : some;
  }

  // Queries ``n`` to ``n`` + M over the chunk of keys that begins at ``first``.
  template <int M>
  void part(int64_t n, int64_t first) {
    const int64_t last = least(n + M, count) - 1, most = seen_by(last, first);
    if (most == 0) return;
    const int64_t padded = up_to(most, LANES);
    const bool is_there = are_words() && n + M <= count / ROWS * ROWS;
    const Word* const rows_of =
        is_there ? reinterpret_cast<const Word*>(q + (begin + n) * of.q.row) : queries + n * row_words();
    const int64_t rows_step = is_there ? of.q.row / EACH : row_words();
    for (int64_t key = 0; key < padded; key += BLOCK) {
      const int64_t width = least(up_to(of.keys - first - key, LANES), BLOCK);
      const int vectors = int(least(padded - key, width) / LANES);
      const Word* const packed = keys + (first + key) * steps();
      accumulate_wide<PAIRED, M>(vectors, {rows_of, rows_step, packed, width, steps()}, nullptr,
                                 float(of.scale), scores + key, KEYS);
    }
    float factors[M];
    for (int i = 0; i < M; ++i) {
      float* const own = scores + i * KEYS;
      Word* const to = PAIRED ? powers + i * (KEYS / 2) : reinterpret_cast<Word*>(own);
      if (n + i > last) {  // beside the last query: what comes of it is not stored
        factors[i] = 0.0f;
        for (int64_t at = 0; at < padded; at += LANES) store_power<PAIRED>(to, at, Floats{});
        continue;
      }
      const int64_t some = seen_by(n + i, first);
      if (of.mask_kind == MARKS && of.mask.row != 0 && of.mask.column == 1) {
        hide(static_cast<const bool*>(mask) + (begin + n + i) * of.mask.row + first, some, own);
      } else if (of.mask_kind != NONE) {
        if (of.mask.row != 0) read(begin + n + i, first);
        if (of.mask.row != 0 || adds) add(numbers, some, own);
      }
      factors[i] = soften<PAIRED>(own, to, some, padded, rows[n + i]);
    }
    const Word* const weights = PAIRED ? powers : reinterpret_cast<const Word*>(scores);
    const int64_t row = PAIRED ? KEYS / 2 : KEYS, used = (most + EACH - 1) / EACH;
    const int64_t all = columns() / LANES, blocks = (all + WIDE - 1) / WIDE;
    for (int64_t block = 0, column = 0; block < blocks; ++block) {
      const int vectors = int((all - column) / (blocks - block) + ((all - column) % (blocks - block) != 0));
      const Word* const packed = values + first / EACH * columns() + column * LANES;
      accumulate_wide<PAIRED, M>(vectors, {weights, row, packed, columns(), used},
                                 first ? factors : nullptr, 1.0f,
                                 sums + n * columns() + column * LANES, columns());
      column += vectors;
    }
  }

  void finish() {
    for (int64_t n = 0; n < count; ++n) {
      // a row without any weight is 0, and NaN where values are
      const float sum = rows[n].sum, divisor = sum == 0.0f ? 1.0f : sum, inverse = 1.0f / divisor;
      const float* const from = sums + n * columns();
      T* const to = out + (begin + n) * of.out.row;
      if (of.out.column == 1) {
#pragma omp simd
        for (int64_t c = 0; c < of.values; ++c)  // a product loses nothing that a half shows
          to[c] = sp::narrow<T>(sizeof(T) == 2 ? from[c] * inverse : from[c] / divisor);
      } else {
        for (int64_t c = 0; c < of.values; ++c)
          to[c * of.out.column] = sp::narrow<T>(from[c] / divisor);
      }
    }
  }
};

// ---- one call ----------------------------------------------------------------------------------

inline Strides strides(const int64_t* from) { return {from[0], from[1], from[2], from[3]}; }

inline Sizes sizes(const int64_t* s) {
  return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], __builtin_bit_cast(double, s[9]),
          strides(s + 10), strides(s + 14), strides(s + 18), strides(s + 22), strides(s + 26)};
}

// Operands, and where packed keys and values lie.
template <class T, bool PAIRED>
struct Call {
  static constexpr int64_t EACH = PAIRED ? 2 : 1;
  Sizes of;
  const T* q;
  const T* k;
  const T* v;
  T* out;
  const char* mask;
  int64_t steps, columns, key_words, value_words, sources, blocks, parts;
  Word* packed;

  Call(void* const* buffers, const int64_t* scalars)
      : of(sizes(scalars)), q(static_cast<const T*>(buffers[0])),
        k(static_cast<const T*>(buffers[1])), v(static_cast<const T*>(buffers[2])),
        out(static_cast<T*>(buffers[3])),
        mask(of.mask_kind == NONE ? nullptr : static_cast<const char*>(buffers[5])),
        steps((of.head + EACH - 1) / EACH), columns(up_to(of.values, LANES)),
        key_words(up_to(of.keys, LANES) * steps),
        value_words(up_to((of.keys + EACH - 1) / EACH * columns, LANES)),
        sources(of.heads / of.shared), blocks((of.keys + BLOCK - 1) / BLOCK),
        parts((of.queries + QUERIES - 1) / QUERIES),
        packed(reinterpret_cast<Word*>((reinterpret_cast<uintptr_t>(buffers[4]) + 63) / 64 * 64)) {}

  double work() const {
    return 2.0 * of.batch * of.heads * of.queries * of.keys * (of.head + of.values);
  }
  const T* head(const T* all, const Strides& by, int64_t which, int64_t heads) const {
    return all + which / heads * by.batch + which % heads * by.head;
  }
  Word* keys_at(int64_t place) const { return packed + place * key_words; }
  Word* values_at(int64_t place) const {
    return packed + of.batch * sources * key_words + place * value_words;
  }

  // One block of the keys and values that some heads of queries share, to a place in memory.
  void pack(int64_t source, int64_t block, int64_t place) const {
    const int64_t begin = block * BLOCK;
    pack_keys<T, PAIRED>(head(k, of.k, source, sources), of.k, begin, of.keys, of.head,
                         keys_at(place) + begin * steps);
    pack_values<T, PAIRED>(head(v, of.v, source, sources), of.v, begin, of.keys, of.values,
                           values_at(place) + begin / EACH * columns);
  }

  // One part of the queries of a head ``which`` (of all of all batches).
  void run(int64_t which, int64_t part, int64_t place, const Next& next) const {
    const int64_t begin = part * QUERIES, unit = of.mask_kind == MARKS ? sizeof(bool) : sizeof(T);
    const int64_t mask_at = which / of.heads * of.mask.batch + which % of.heads * of.mask.head;
    T* const to = out + which / of.heads * of.out.batch + which % of.heads * of.out.head;
    Task<T, PAIRED> mine(of, keys_at(place), values_at(place), head(q, of.q, which, of.heads), to,
                         mask ? mask + mask_at * unit : nullptr, next, begin,
                         least(QUERIES, of.queries - begin));
    mine.run();
  }

  // What follows a head, where its rows lie side by side and keys are one chunk at most.
  Next next_of(int64_t which, int64_t end) const {
    const bool has_rows = of.q.column == 1 && of.k.column == 1 && of.v.column == 1;
    if (which + 1 >= end || !has_rows || of.keys > KEYS) return {};
    const auto* const queries = reinterpret_cast<const char*>(head(q, of.q, which + 1, of.heads));
    if ((which + 1) % of.shared) return {queries};
    const int64_t source = (which + 1) / of.shared;
    return {queries, reinterpret_cast<const char*>(head(k, of.k, source, sources)),
            reinterpret_cast<const char*>(head(v, of.v, source, sources))};
  }

  // Packs keys and values, and computes what reads them while they lie in a cache.
  void run_source(int64_t source, int64_t place) const {
    for (int64_t block = 0; block < blocks; ++block) pack(source, block, place);
    for (int64_t n = 0; n < of.shared; ++n) {
      const int64_t which = source * of.shared + n;
      const Next next = next_of(which, of.batch * of.heads);
      for (int64_t part = 0; part < parts; ++part) run(which, part, place, next);
    }
  }
};

template <class T, bool PAIRED>
void attend(void* const* buffers, const int64_t* scalars) {
  const Call<T, PAIRED> of(buffers, scalars);
  const int64_t all = of.of.batch * of.sources, heads = of.of.batch * of.of.heads;
#pragma omp parallel if (of.work() > THREADED_FROM)
  {
    const int64_t threads = omp_get_num_threads();
    if (all >= 4 * threads || all % threads == 0) {  // each has as many as the others, or nearly so
#pragma omp for schedule(static)
      for (int64_t source = 0; source < all; ++source) of.run_source(source, omp_get_thread_num());
    } else {
#pragma omp for schedule(static)
      for (int64_t at = 0; at < all * of.blocks; ++at)
        of.pack(at / of.blocks, at % of.blocks, at / of.blocks);
#pragma omp for schedule(static, 1)
      for (int64_t task = 0; task < heads * of.parts; ++task) {
        const int64_t which = task / of.parts;
        of.run(which, task % of.parts, which / of.of.shared, {});
      }
    }
  }
}

}  // namespace
}  // namespace attention
#endif
