// Weights of products of int8 codes that stay packed from call to call, for ``code_sums.h`` and
// ``code_sums_arm.h`` alike.
#ifndef STROP_KEPT_CODES
#define STROP_KEPT_CODES

namespace code_sums {
namespace {  // each kernel has its own

// Words in front of a weight that is packed once: whether there is one, how often it was packed, and
// a number that its bits have (fingerprint.h), 64 bits each.
constexpr int64_t HEAD = 16;
typedef uint64_t Head __attribute__((may_alias));

// Returns what ``pack`` makes of the ``size`` bytes at w, which lies in ``kept`` behind HEAD. It is
// made anew where w holds other bits than those. Threads that pack the same bits at once write the
// same words; who writes to w meanwhile is seen, as its bits are looked at again.
template <class Pack>
const Word* made_once(const int8_t* w, int64_t size, Word* kept, Pack pack) {
  Head* const head = reinterpret_cast<Head*>(kept);
  Word* const packed = kept + HEAD;
  uint64_t found[1 + (size + fingerprint::SHARE - 1) / fingerprint::SHARE];
  const auto bits = [&] {
    fingerprint::of_memory(reinterpret_cast<const char*>(w), found, size);
    return found[0];
  };
  uint64_t now = bits(), before;
  if (__atomic_load_n(head, __ATOMIC_ACQUIRE) && head[2] == now) return packed;
  do {
    __atomic_store_n(head, 0, __ATOMIC_SEQ_CST);
    pack(packed);
    before = now;
    now = bits();
  } while (before != now);
  head[1] += 1;
  head[2] = now;
  __atomic_store_n(head, 1, __ATOMIC_RELEASE);
  return packed;
}

// Returns the packed codes of w (columns, depth). ``kept``: HEAD and ``packed_words`` words.
inline const Word* pack_once(const int8_t* w, int64_t columns, int64_t depth, Word* kept) {
  const auto all = [&](Word* packed) { pack(w, columns, depth, packed); };
  return made_once(w, columns * depth, kept, all);
}

// Looking at the bits takes half of the time of packing, and brings the weight into the caches beside
// what was packed of it: with more rows than these it is packed in each call, into ``working``, which
// other kernels use, too.
constexpr int64_t FEW_ROWS = 2 * PANEL;

inline const Word* packed_for(int64_t rows, const int8_t* w, int64_t columns, int64_t depth,
                              Word* kept, Word* working) {
  if (rows <= FEW_ROWS) return pack_once(w, columns, depth, kept);
  pack(w, columns, depth, working);
  return working;
}

// ---- zero points of a weight, one for each column of sums --------------------------------------

// Returns them in ``room``, or null where all of them are 0, as those of a symmetric weight: then
// nothing is taken off.
inline const int32_t* used_zeros(const int64_t* zeros, int64_t columns, int32_t* room) {
  int64_t any = 0;
  for (int64_t n = 0; n < columns; ++n) any |= zeros[n], room[n] = int32_t(zeros[n]);
  return any ? room : nullptr;
}

// Takes off sums of rows what the zero points of columns have added: these times the sum of x - zero.
inline void take_off(const int32_t* zeros, const int8_t* x, int64_t rows, int64_t columns,
                     int64_t depth, int32_t zero, int32_t* sums, int64_t to_row) {
  for (int64_t row = 0; zeros && row < rows; ++row, x += depth, sums += to_row) {
    uint32_t all = -uint32_t(zero) * uint32_t(depth);
    for (int64_t n = 0; n < depth; ++n) all += int32_t(x[n]);
    for (int64_t n = 0; n < columns; ++n) sums[n] = int32_t(sums[n] - zeros[n] * all);
  }
}

}  // namespace
}  // namespace code_sums
#endif
