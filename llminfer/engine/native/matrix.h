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

// One group of eight rows times T vectors: the formats

template <int T>
static inline void times_floats(const float* w, const Vectors& x, long first, long columns, float8* out) {
  float8 even[T] = {}, odd[T] = {};
  const float* from[T];
  for (int t = 0; t < T; ++t) from[t] = x.values + (first + t) * x.stride;
  long c = 0;
  for (; c + 2 <= columns; c += 2) {
    __builtin_prefetch(w + c * GROUP + FLOAT_AHEAD / 4);
    const float8 w0 = load8(w + c * GROUP), w1 = load8(w + (c + 1) * GROUP);
    for (int t = 0; t < T; ++t) {
      even[t] += w0 * from[t][c];
      odd[t] += w1 * from[t][c + 1];
    }
  }
  if (c < columns)
    for (int t = 0; t < T; ++t) even[t] += load8(w + c * GROUP) * from[t][c];
  for (int t = 0; t < T; ++t) out[t] = even[t] + odd[t];
}

template <int T>
static inline void times_halves(const uint16_t* w, const Vectors& x, long first, long columns, float8* out) {
  float8 sums[4][T] = {};  // as many as hide what a product waits for the one before
  const float* from[T];
  for (int t = 0; t < T; ++t) from[t] = x.values + (first + t) * x.stride;
  long c = 0;
  for (; c + 4 <= columns; c += 4) {
    __builtin_prefetch(w + c * GROUP + FLOAT_AHEAD / 2);
    for (int i = 0; i < 4; ++i) {
      const float8 weights = load8_half(w + (c + i) * GROUP);
      for (int t = 0; t < T; ++t) sums[i][t] += weights * from[t][c + i];
    }
  }
  for (; c < columns; ++c)
    for (int t = 0; t < T; ++t) sums[0][t] += load8_half(w + c * GROUP) * from[t][c];
  for (int t = 0; t < T; ++t) out[t] = (sums[0][t] + sums[1][t]) + (sums[2][t] + sums[3][t]);
}

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

template <int T>
static inline void times_int8(const uint8_t* w, const Vectors& x, long first, long columns, float8* out) {
  const long blocks = blocks_of(columns);
  float8 total[T] = {};
  for (long b = 0; b < blocks; ++b, w += INT8_BLOCK_BYTES) {
    __builtin_prefetch(w + INTEGER_AHEAD);
    __builtin_prefetch(w + INTEGER_AHEAD + 64);
    __builtin_prefetch(w + INTEGER_AHEAD + 128);
    __builtin_prefetch(w + INTEGER_AHEAD + 192);
    const float8 scale = load8_half(reinterpret_cast<const uint16_t*>(w));
    Sums even[T], odd[T];
    for (int t = 0; t < T; ++t) even[t] = odd[t] = no_sums();
    for (int p = 0; p < 16; p += 2) {
      const Pairs w0 = pairs_int8(w + 16 + p * 16), w1 = pairs_int8(w + 32 + p * 16);
      for (int t = 0; t < T; ++t) {
        const int16_t* values = x.integers + ((first + t) * blocks + b) * BLOCK + 2 * p;
        even[t] = add_product(even[t], w0, values);
        odd[t] = add_product(odd[t], w1, values + 2);
      }
    }
    for (int t = 0; t < T; ++t)
      total[t] += (to_floats(even[t]) + to_floats(odd[t])) * (scale * x.scales[(first + t) * blocks + b]);
  }
  for (int t = 0; t < T; ++t) out[t] = total[t];
}

template <int T>
static inline void times_int4(const uint8_t* w, const Vectors& x, long first, long columns, float8* out) {
  const long blocks = blocks_of(columns);
  float8 total[T] = {};
  for (long b = 0; b < blocks; ++b, w += INT4_BLOCK_BYTES) {
    __builtin_prefetch(w + INTEGER_AHEAD);
    __builtin_prefetch(w + INTEGER_AHEAD + 64);
    __builtin_prefetch(w + INTEGER_AHEAD + 128);
    const float8 scale = load8_half(reinterpret_cast<const uint16_t*>(w));
    const float8 minimum = load8_half(reinterpret_cast<const uint16_t*>(w) + 8);
    Sums even[T], odd[T];
    for (int t = 0; t < T; ++t) even[t] = odd[t] = no_sums();
    for (int p = 0; p < 4; ++p) {
      Pairs pairs[4];
      pairs_int4(w + 32 + p * 32, pairs);
      for (int t = 0; t < T; ++t) {
        const int16_t* values = x.integers + ((first + t) * blocks + b) * BLOCK + 2 * p;
        even[t] = add_product(even[t], pairs[0], values);
        odd[t] = add_product(odd[t], pairs[1], values + 8);
        even[t] = add_product(even[t], pairs[2], values + 16);
        odd[t] = add_product(odd[t], pairs[3], values + 24);
      }
    }
    for (int t = 0; t < T; ++t) {
      const long at = (first + t) * blocks + b;
      total[t] += (to_floats(even[t]) + to_floats(odd[t])) * (scale * x.scales[at]) + minimum * x.sums[at];
    }
  }
  for (int t = 0; t < T; ++t) out[t] = total[t];
}

template <int T>
static inline void times(const Matrix& m, const uint8_t* group, const Vectors& x, long first, float8* out) {
  switch (m.format) {
    case FLOAT32: return times_floats<T>(reinterpret_cast<const float*>(group), x, first, m.columns, out);
    case FLOAT16: return times_halves<T>(reinterpret_cast<const uint16_t*>(group), x, first, m.columns, out);
    case INT8: return times_int8<T>(group, x, first, m.columns, out);
    default: return times_int4<T>(group, x, first, m.columns, out);
  }
}

static inline void put(const Matrix& m, long row, float8 value, float* y) {
  const long filled = std::min<long>(GROUP, m.rows - row);
  float lanes[GROUP];
  store8(lanes, value);
  for (long r = 0; r < filled; ++r) y[row + r] = lanes[r] + (m.bias ? m.bias[row + r] : 0.0f);
}

// Ask for the beginning of a thread's share of a matrix, so that it is on its way while the thread waits for others.
static inline void ask_for(const Matrix& m, int thread, int threads) {
  const long bytes = group_bytes(m.format, m.columns);
  const Range mine = share(groups_of(m.rows), thread, threads);
  const uint8_t* from = m.data + mine.begin * bytes;
  const long wanted = std::min<long>(INTEGER_AHEAD, (mine.end - mine.begin) * bytes);
  for (long at = 0; at < wanted; at += 64) __builtin_prefetch(from + at);
}

// Groups [begin, end) of the rows times `count` vectors, for few vectors: weights are read from memory once.
// y is [vector][stride], the matrix's row 0 at y[0].
static void multiply_few(const Matrix& m, long begin, long end, const Vectors& x, long count, float* y, long stride) {
  const long bytes = group_bytes(m.format, m.columns);
  for (long g = begin; g < end; ++g) {
    const uint8_t* group = m.data + g * bytes;
    float8 out[4];
    long first = 0;
    for (; first + 4 <= count; first += 4) {
      times<4>(m, group, x, first, out);
      for (int t = 0; t < 4; ++t) put(m, g * GROUP, out[t], y + (first + t) * stride);
    }
    for (; first < count; ++first) {
      times<1>(m, group, x, first, out);
      put(m, g * GROUP, out[0], y + first * stride);
    }
  }
}

// Many vectors: tiles of weights become floats once and meet all vectors of a chunk

// from so many vectors on; integers are taken apart either way
static inline long many_from(int32_t format) { return takes_integers(format) ? 32 : 12; }
constexpr long TILE_COLUMNS = 512;     // 16 rows of them stay in the second-level cache
constexpr long CHUNK_VECTORS = 120;    // so do their vectors

// A block of 32 columns of one group as floats: [column][8].
static inline void block_to_floats(const Matrix& m, const uint8_t* block, float* out) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
  const float8 scale = load8_half(halves);
  float8 even, odd;
  if (m.format == INT8) {
    for (int p = 0; p < 16; ++p) {
      columns_of(pairs_int8(block + 16 + p * 16), &even, &odd);
      store8(out + 2 * p * GROUP, even * scale);
      store8(out + (2 * p + 1) * GROUP, odd * scale);
    }
    return;
  }
  const float8 minimum = load8_half(halves + 8);
  for (int p = 0; p < 4; ++p) {
    Pairs pairs[4];
    pairs_int4(block + 32 + p * 32, pairs);
    for (int n = 0; n < 4; ++n) {
      columns_of(pairs[n], &even, &odd);
      store8(out + (2 * p + 8 * n) * GROUP, even * scale + minimum);
      store8(out + (2 * p + 8 * n + 1) * GROUP, odd * scale + minimum);
    }
  }
}

// Columns [from, to) of one group as floats, [column][8]; `from` starts a block, and the last block is whole.
static void group_to_floats(const Matrix& m, long g, long from, long to, float* out) {
  const uint8_t* group = m.data + g * group_bytes(m.format, m.columns);
  if (m.format == FLOAT32) {
    std::memcpy(out, group + from * GROUP * 4, (to - from) * GROUP * 4);
  } else if (m.format == FLOAT16) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(group);
    for (long c = from; c < to; ++c) store8(out + (c - from) * GROUP, load8_half(w + c * GROUP));
  } else {
    const long bytes = m.format == INT8 ? INT8_BLOCK_BYTES : INT4_BLOCK_BYTES;
    for (long b = from / BLOCK; b < blocks_of(to); ++b)
      block_to_floats(m, group + b * bytes, out + (b * BLOCK - from) * GROUP);
  }
}

// Two groups of rows times T vectors over a tile of columns, added to what y holds unless `fresh`.
template <int T>
static void tile(const float* w0, const float* w1, const float* x, long x_stride, long columns, bool fresh, float* y,
                 long y_stride) {
  float8 a[T], b[T];
  for (int t = 0; t < T; ++t) {
    a[t] = fresh ? all8(0) : load8(y + t * y_stride);
    b[t] = fresh ? all8(0) : load8(y + t * y_stride + GROUP);
  }
  for (long c = 0; c < columns; ++c) {
    const float8 u = load8(w0 + c * GROUP), v = load8(w1 + c * GROUP);
    for (int t = 0; t < T; ++t) {
      const float value = x[t * x_stride + c];
      a[t] += u * value;
      b[t] += v * value;
    }
  }
  for (int t = 0; t < T; ++t) {
    store8(y + t * y_stride, a[t]);
    store8(y + t * y_stride + GROUP, b[t]);
  }
}

static void tile_of(long count, const float* w0, const float* w1, const float* x, long x_stride, long columns,
                    bool fresh, float* y, long y_stride) {
  switch (count) {
    case 1: return tile<1>(w0, w1, x, x_stride, columns, fresh, y, y_stride);
    case 2: return tile<2>(w0, w1, x, x_stride, columns, fresh, y, y_stride);
    case 3: return tile<3>(w0, w1, x, x_stride, columns, fresh, y, y_stride);
    case 4: return tile<4>(w0, w1, x, x_stride, columns, fresh, y, y_stride);
    case 5: return tile<5>(w0, w1, x, x_stride, columns, fresh, y, y_stride);
    default: return tile<6>(w0, w1, x, x_stride, columns, fresh, y, y_stride);
  }
}

// Groups [begin, end) of the rows times `count` vectors.
static void multiply_many(const Matrix& m, long begin, long end, const Vectors& x, long count, float* y, long stride) {
  std::vector<float> weights(2 * GROUP * TILE_COLUMNS), sums(CHUNK_VECTORS * 2 * GROUP);
  for (long chunk = 0; chunk < count; chunk += CHUNK_VECTORS) {
    const long vectors = std::min(CHUNK_VECTORS, count - chunk);
    const float* values = x.values + chunk * x.stride;
    for (long g = begin; g < end; g += 2) {
      const bool pair = g + 1 < end;
      for (long c = 0; c < m.columns; c += TILE_COLUMNS) {
        const long columns = std::min<long>(TILE_COLUMNS, m.columns - c);
        const float *w0 = weights.data(), *w1 = weights.data() + GROUP * TILE_COLUMNS;
        if (m.format == FLOAT32) {
          const long bytes = group_bytes(FLOAT32, m.columns);
          w0 = reinterpret_cast<const float*>(m.data + g * bytes) + c * GROUP;
          w1 = pair ? reinterpret_cast<const float*>(m.data + (g + 1) * bytes) + c * GROUP : w0;
        } else {
          group_to_floats(m, g, c, c + columns, weights.data());
          if (pair) group_to_floats(m, g + 1, c, c + columns, weights.data() + GROUP * TILE_COLUMNS);
          if (!pair) w1 = w0;
        }
        for (long v = 0; v < vectors; v += 6)
          tile_of(std::min(6L, vectors - v), w0, w1, values + v * x.stride + c, x.stride, columns, c == 0,
                  sums.data() + v * 2 * GROUP, 2 * GROUP);
      }
      for (long v = 0; v < vectors; ++v) {
        put(m, g * GROUP, load8(sums.data() + v * 2 * GROUP), y + (chunk + v) * stride);
        if (pair) put(m, (g + 1) * GROUP, load8(sums.data() + v * 2 * GROUP + GROUP), y + (chunk + v) * stride);
      }
    }
  }
}

// Packing

static void pack_int8_row(const float* w, long columns, long row_in_group, uint8_t* group) {
  for (long b = 0; b < blocks_of(columns); ++b) {
    uint8_t* block = group + b * INT8_BLOCK_BYTES;
    const long first = b * BLOCK, filled = std::min(BLOCK, columns - first);
    float largest = 0;
    for (long i = 0; i < filled; ++i) largest = std::max(largest, std::fabs(w[first + i]));
    const uint16_t half = float_to_half(largest / 127.0f);
    const float scale = half_to_float(half);
    reinterpret_cast<uint16_t*>(block)[row_in_group] = half;
    for (long i = 0; i < BLOCK; ++i) {
      const float q = i < filled && scale > 0 ? std::nearbyint(w[first + i] / scale) : 0.0f;
      block[16 + i / 2 * 16 + row_in_group * 2 + i % 2] =
          static_cast<uint8_t>(static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, q))));
    }
  }
}

static inline void put_nibble(uint8_t* block, long row_in_group, long column, int q) {
  const long pair = column / 2, nibble = pair / 4;
  uint8_t& byte = block[32 + pair % 4 * 32 + (row_in_group * 2 + column % 2) * 2 + nibble / 2];
  byte |= q << (nibble % 2 * 4);
}

// A block's weights with a scale and a minimum: rounds them, returns the squared error.
static float round_int4(const float* w, long count, uint16_t half_scale, uint16_t half_minimum, int* q) {
  const float scale = half_to_float(half_scale), minimum = half_to_float(half_minimum);
  float error = 0;
  for (long i = 0; i < count; ++i) {
    const float position = scale != 0 ? std::nearbyint((w[i] - minimum) / scale) : 0.0f;
    q[i] = static_cast<int>(std::max(0.0f, std::min(15.0f, position)));
    const float off = w[i] - (scale * q[i] + minimum);
    error += off * off;
  }
  return error;
}

// The scale and minimum with the least error, tried from where common quantizers put them (the whole range in
// 15 parts, or the extreme at eight scales below zero), so that weights which were made of such blocks are found
// exactly; then the line through (quant, weight) is fitted until that no longer helps.
static void fit_int4(const float* w, long count, uint16_t* scale, uint16_t* minimum, int* q) {
  float low = w[0], high = w[0];
  for (long i = 1; i < count; ++i) low = std::min(low, w[i]), high = std::max(high, w[i]);
  const float extreme = -low > high ? low : high;
  const float tries[2][2] = {{(high - low) / 15.0f, low}, {extreme / -8.0f, extreme}};
  float best = INFINITY;
  int now[BLOCK];
  for (const auto& start : tries) {
    if (best == 0) break;
    float d = start[0], m = start[1], before = INFINITY;
    for (int round = 0; round < 4; ++round) {
      const uint16_t half_d = float_to_half(d), half_m = float_to_half(m);
      const float error = round_int4(w, count, half_d, half_m, now);
      if (error < best) {
        best = error, *scale = half_d, *minimum = half_m;
        std::copy(now, now + count, q);
      }
      float sum_q = 0, sum_qq = 0, sum_w = 0, sum_qw = 0;
      for (long i = 0; i < count; ++i)
        sum_q += now[i], sum_qq += now[i] * now[i], sum_w += w[i], sum_qw += now[i] * w[i];
      const float spread = count * sum_qq - sum_q * sum_q;
      if (!(error < before) || error == 0 || spread <= 0) break;
      before = error;
      d = (count * sum_qw - sum_q * sum_w) / spread;
      m = (sum_w - d * sum_q) / count;
    }
  }
}

static void pack_int4_row(const float* w, long columns, long row_in_group, uint8_t* group) {
  for (long b = 0; b < blocks_of(columns); ++b) {
    uint8_t* block = group + b * INT4_BLOCK_BYTES;
    const long first = b * BLOCK, filled = std::min(BLOCK, columns - first);
    uint16_t scale = 0, minimum = 0;
    int q[BLOCK] = {};
    fit_int4(w + first, filled, &scale, &minimum, q);
    reinterpret_cast<uint16_t*>(block)[row_in_group] = scale;
    reinterpret_cast<uint16_t*>(block)[8 + row_in_group] = minimum;
    for (long i = 0; i < BLOCK; ++i) put_nibble(block, row_in_group, i, q[i]);
  }
}

// One row of floats into its place in a group.
static void pack_row(int32_t format, const float* w, long columns, long row_in_group, uint8_t* group) {
  if (format == FLOAT32) {
    float* to = reinterpret_cast<float*>(group);
    for (long c = 0; c < columns; ++c) to[c * GROUP + row_in_group] = w[c];
  } else if (format == FLOAT16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(group);
    for (long c = 0; c < columns; ++c) to[c * GROUP + row_in_group] = float_to_half(w[c]);
  } else if (format == INT8) {
    pack_int8_row(w, columns, row_in_group, group);
  } else {
    pack_int4_row(w, columns, row_in_group, group);
  }
}
