// A number of 64 bits that tells whether memory holds the same bits as before.
//
// Each word goes through a step that is one to one, in the word and in what was there before it, so
// that two contents which differ in one word never have one number; others share one by a chance of
// 2^-64. A share of the memory is read at eight places at once: a processor fetches several streams
// ahead, and one stream had less than half of the bandwidth.
#ifndef STROP_FINGERPRINT
#define STROP_FINGERPRINT

namespace fingerprint {
namespace {  // each kernel has its own

constexpr int STREAMS = 8, LANES = 16;  // words beside each other: two vectors of AVX-512
constexpr int64_t WORD = 8, STRIPE = LANES * WORD, BLOCK = STREAMS * STRIPE;
constexpr int64_t SHARE = 256 << 10;  // bytes of a task: what it gives depends on sizes alone
constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15ull;  // odd, so that products are one to one

inline uint64_t mixed(uint64_t before, uint64_t word) {
  before ^= word;
  return ((before << 29) | (before >> 35)) * FACTOR;
}

inline uint64_t word_at(const char* place) {
  uint64_t word;
  __builtin_memcpy(&word, place, WORD);
  return word;
}

uint64_t of_share(const char* from, int64_t size) {
  uint64_t states[STREAMS][LANES];
  for (int n = 0; n < STREAMS; n++)
    for (int i = 0; i < LANES; i++) states[n][i] = n * LANES + i;
  const int64_t length = size / BLOCK * STRIPE;  // of a stream
  for (int64_t at = 0; at < length; at += STRIPE)
    for (int n = 0; n < STREAMS; n++)
      for (int i = 0; i < LANES; i++)
        states[n][i] = mixed(states[n][i], word_at(from + n * length + at + i * WORD));
  uint64_t all = size;
  for (int n = 0; n < STREAMS; n++)
    for (int i = 0; i < LANES; i++) all = mixed(all, states[n][i]);
  int64_t at = STREAMS * length;
  for (; at + WORD <= size; at += WORD) all = mixed(all, word_at(from + at));
  for (; at < size; at++) all = mixed(all, (unsigned char)from[at]);
  return all;
}

// found: room for a number of each share, behind that of the whole
void of_memory(const char* from, uint64_t* found, int64_t size) {
  const int64_t shares = (size + SHARE - 1) / SHARE;
#pragma omp parallel for if (shares > 1)
  for (int64_t n = 0; n < shares; n++) {
    const int64_t first = n * SHARE, left = size - first;
    found[1 + n] = of_share(from + first, left < SHARE ? left : SHARE);
  }
  uint64_t all = size;
  for (int64_t n = 0; n < shares; n++) all = mixed(all, found[1 + n]);
  found[0] = all;
}

}  // namespace
}  // namespace fingerprint
#endif
