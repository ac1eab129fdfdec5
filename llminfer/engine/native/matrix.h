// Weights packed for products with few or many vectors.
//
// Rows go in groups of eight, interleaved, so that one vector lane is one row and no product needs a sum
// across lanes. Formats, per group of eight rows (rows are padded with zeros to a multiple of eight):
//
//   FLOAT32  [column][8] float
//   FLOAT16  [column][8] half
//   INT8     per block of 32 columns: [8] half scales, then [16 pairs of columns][8 rows][2] int8
//   INT4     per block of 32 columns: [8] half scales, [8] half minima, then [4][8 rows][2] 16-bit words, whose
//            four nibbles are from the pairs p, p + 4, p + 8 and p + 12 of columns, the lowest first
//
// A weight is scale * q, or scale * q + minimum: the arithmetic of GGUF's q8_0, q4_0 and q4_1, so weights that
// came from such blocks keep their values. Vectors meet INT8 and INT4 as 16-bit integers in blocks of 32 with a scale each,
// whose error is far below that of the weights.
#pragma once

#include <algorithm>
#include <vector>

#include "threads.h"
#include "vectors.h"

enum Format : int32_t { FLOAT32 = 0, FLOAT16 = 1, INT8 = 2, INT4 = 3 };

constexpr long GROUP = 8, BLOCK = 32;
// bytes that weights are asked for before they are used, as measured: integers take longer to work on
constexpr long FLOAT_AHEAD = 1024, INTEGER_AHEAD = 4096;
constexpr long INT8_BLOCK_BYTES = 16 + GROUP * BLOCK, INT4_BLOCK_BYTES = 32 + GROUP * BLOCK / 2;

struct Matrix {
  int32_t format;
  int32_t unused;
  int64_t rows, columns;
  const uint8_t* data;
  const float* bias;  // null: none
};

static inline long groups_of(long rows) { return (rows + GROUP - 1) / GROUP; }
static inline long blocks_of(long columns) { return (columns + BLOCK - 1) / BLOCK; }

static inline long group_bytes(int32_t format, long columns) {
  switch (format) {
    case FLOAT32: return columns * GROUP * 4;
    case FLOAT16: return columns * GROUP * 2;
    case INT8: return blocks_of(columns) * INT8_BLOCK_BYTES;
    default: return blocks_of(columns) * INT4_BLOCK_BYTES;
  }
}

// Vectors to multiply with, one after another: as floats, and for the integer formats as 16-bit blocks.
struct Vectors {
  const float* values;
  long stride;
  const int16_t* integers = nullptr;  // [vector][block * 32]
  const float* scales = nullptr;      // [vector][block]
  const float* sums = nullptr;        // [vector][block]: of the values
};

struct IntegerStore {
  std::vector<int16_t> integers;
  std::vector<float> scales, sums;

  Vectors fill(const float* values, long stride, long columns, long count) {
    const long blocks = blocks_of(columns);
    if (static_cast<long>(scales.size()) < blocks * count) {
      integers.resize(blocks * count * BLOCK);
      scales.resize(blocks * count);
      sums.resize(blocks * count);
    }
    for (long v = 0; v < count; ++v)
      for (long b = 0; b < blocks; ++b) quantize(values + v * stride, b, columns, v * blocks + b);
    return {values, stride, integers.data(), scales.data(), sums.data()};
  }

 private:
  void quantize(const float* vector, long block, long columns, long at) {
    const long first = block * BLOCK, filled = std::min(BLOCK, columns - first);
    float padded[BLOCK] = {};
    std::memcpy(padded, vector + first, filled * sizeof(float));
    float largest = 0, poison = 0;  // which is NaN where a value is no finite number, and is not to be rounded away
    for (long i = 0; i < BLOCK; ++i) largest = std::max(largest, std::fabs(padded[i])), poison += padded[i] * 0.0f;
    if (poison != 0) std::fill(padded, padded + BLOCK, 0.0f);  // no integer stands for them: the scale carries it
    const float inverse = largest > 0 ? 32767.0f / largest : 0.0f;
    int16_t* to = integers.data() + at * BLOCK;
    int32_t sum = 0;
    for (long i = 0; i < BLOCK; ++i) {
      // round to nearest by the exponent of the sum, which vectorises
      const int32_t q = static_cast<int32_t>((padded[i] * inverse + 12582912.0f) - 12582912.0f);
      to[i] = static_cast<int16_t>(q);
      sum += q;
    }
    scales[at] = largest / 32767.0f + poison;
    sums[at] = static_cast<float>(sum) * scales[at];
  }
};

static inline bool takes_integers(int32_t format) { return format == INT8 || format == INT4; }

// Pairs of integer weights, and their products with pairs of 16-bit values

#ifdef LLMINFER_AVX2
typedef __m256i Sums;
static inline Sums no_sums() { return _mm256_setzero_si256(); }
static inline float8 to_floats(Sums sums) { return (float8)_mm256_cvtepi32_ps(sums); }
// 16-bit weights of two columns by eight rows, times two 16-bit values
typedef __m256i Pairs;
static inline Sums add_product(Sums sums, Pairs weights, const int16_t* values) {
  int32_t two;
  std::memcpy(&two, values, 4);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, _mm256_set1_epi32(two)));
}
static inline Pairs pairs_int8(const uint8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
static inline void pairs_int4(const uint8_t* from, Pairs pairs[4]) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), mask = _mm256_set1_epi16(15);
  pairs[0] = _mm256_and_si256(words, mask);
  pairs[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), mask);
  pairs[2] = _mm256_and_si256(_mm256_srli_epi16(words, 8), mask);
  pairs[3] = _mm256_srli_epi16(words, 12);
}
static inline void columns_of(Pairs pairs, float8* even, float8* odd) {
  *even = (float8)_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16));
  *odd = (float8)_mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16));
}
#else
typedef int32_t Sums __attribute__((vector_size(32)));
typedef int16_t Pairs __attribute__((vector_size(32)));
static inline Sums no_sums() { return Sums{}; }
static inline float8 to_floats(Sums sums) { return __builtin_convertvector(sums, float8); }
static inline Sums add_product(Sums sums, Pairs weights, const int16_t* values) {
  for (int r = 0; r < 8; ++r) sums[r] += weights[2 * r] * values[0] + weights[2 * r + 1] * values[1];
  return sums;
}
static inline Pairs pairs_int8(const uint8_t* from) {
  Pairs pairs;
  for (int i = 0; i < 16; ++i) pairs[i] = static_cast<int8_t>(from[i]);
  return pairs;
}
static inline void pairs_int4(const uint8_t* from, Pairs pairs[4]) {
  for (int i = 0; i < 16; ++i)
    for (int n = 0; n < 4; ++n) pairs[n][i] = from[2 * i + n / 2] >> (n % 2 * 4) & 15;
}
static inline void columns_of(Pairs pairs, float8* even, float8* odd) {
  for (int r = 0; r < 8; ++r) {
    (*even)[r] = pairs[2 * r];
    (*odd)[r] = pairs[2 * r + 1];
  }
}
#endif

// Eight rows of a product into place, with their bias; rows that only fill the group up are left out.
static inline void put(const Matrix& m, long row, float8 value, float* y) {
  const long filled = std::min<long>(GROUP, m.rows - row);
  float lanes[GROUP];
  store8(lanes, value);
  for (long r = 0; r < filled; ++r) y[row + r] = lanes[r] + (m.bias ? m.bias[row + r] : 0.0f);
}

// Ask for the beginning of a thread's share of a matrix, so that it is on its way while the thread waits for others.
static inline void prefetch(const Matrix& m, int thread, int threads) {
  const long bytes = group_bytes(m.format, m.columns);
  const Range mine = share(groups_of(m.rows), thread, threads);
  const uint8_t* from = m.data + mine.begin * bytes;
  const long wanted = std::min<long>(INTEGER_AHEAD, (mine.end - mine.begin) * bytes);
  for (long at = 0; at < wanted; at += 64) __builtin_prefetch(from + at);
}
