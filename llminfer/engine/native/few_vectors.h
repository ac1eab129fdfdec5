// Products with few vectors: weights are read from memory once, each group of rows meets all vectors of a tile.
#pragma once

#include "matrix.h"

static inline float8 load_row(const float* from) { return load8(from); }
static inline float8 load_row(const uint16_t* from) { return load8_half(from); }

// One group of eight rows times T vectors: weights that are floats or halves
template <int T, class W>
static inline void times_numbers(const uint8_t* group, const Vectors& x, long first, long columns, float8* out) {
  constexpr int S = sizeof(W) == 4 ? 2 : 4;  // as many sums as hide what a product waits for the one before
  const W* w = reinterpret_cast<const W*>(group);
  float8 sums[S][T] = {};
  const float* from[T];
  for (int t = 0; t < T; ++t) from[t] = x.values + (first + t) * x.stride;
  long c = 0;
  for (; c + S <= columns; c += S) {
    __builtin_prefetch(w + c * GROUP + FLOAT_AHEAD / sizeof(W));
    for (int i = 0; i < S; ++i) {
      const float8 weights = load_row(w + (c + i) * GROUP);
      for (int t = 0; t < T; ++t) sums[i][t] += weights * from[t][c + i];
    }
  }
  for (; c < columns; ++c)
    for (int t = 0; t < T; ++t) sums[0][t] += load_row(w + c * GROUP) * from[t][c];
  for (int t = 0; t < T; ++t) {
    out[t] = sums[0][t] + sums[1][t];
    if constexpr (S == 4) out[t] += sums[2][t] + sums[3][t];
  }
}

// The same for integers, in blocks
template <int T, Format F>
static inline void times_integers(const uint8_t* w, const Vectors& x, long first, long columns, float8* out) {
  constexpr long bytes = F == INT8 ? INT8_BLOCK_BYTES : INT4_BLOCK_BYTES;
  const long blocks = blocks_of(columns);
  float8 total[T] = {};
  for (long b = 0; b < blocks; ++b, w += bytes) {
    for (long at = 0; at < bytes - 16; at += 64) __builtin_prefetch(w + INTEGER_AHEAD + at);
    const float8 scale = load8_half(reinterpret_cast<const uint16_t*>(w));
    Sums even[T], odd[T];
    for (int t = 0; t < T; ++t) even[t] = odd[t] = no_sums();
    for (int p = 0; p < (F == INT8 ? 16 : 4); p += F == INT8 ? 2 : 1) {
      Pairs pairs[4];
      if constexpr (F == INT8) {
        pairs[0] = pairs_int8(w + 16 + p * 16), pairs[1] = pairs_int8(w + 32 + p * 16);
      } else {
        pairs_int4(w + 32 + p * 32, pairs);
      }
      for (int t = 0; t < T; ++t) {
        const int16_t* values = x.integers + ((first + t) * blocks + b) * BLOCK + 2 * p;
        even[t] = add_product(even[t], pairs[0], values);
        odd[t] = add_product(odd[t], pairs[1], values + (F == INT8 ? 2 : 8));
        if constexpr (F == INT4) {
          even[t] = add_product(even[t], pairs[2], values + 16);
          odd[t] = add_product(odd[t], pairs[3], values + 24);
        }
      }
    }
    for (int t = 0; t < T; ++t) {
      const long at = (first + t) * blocks + b;
      const float8 product = to_floats(even[t]) + to_floats(odd[t]);
      if constexpr (F == INT8) {
        total[t] += product * (scale * x.scales[at]);
      } else {
        const float8 minimum = load8_half(reinterpret_cast<const uint16_t*>(w) + 8);
        total[t] += product * (scale * x.scales[at]) + minimum * x.sums[at];
      }
    }
  }
  for (int t = 0; t < T; ++t) out[t] = total[t];
}

template <int T>
static inline void times(const Matrix& m, const uint8_t* group, const Vectors& x, long first, float8* out) {
  switch (m.format) {
    case FLOAT32: return times_numbers<T, float>(group, x, first, m.columns, out);
    case FLOAT16: return times_numbers<T, uint16_t>(group, x, first, m.columns, out);
    case INT8: return times_integers<T, INT8>(group, x, first, m.columns, out);
    default: return times_integers<T, INT4>(group, x, first, m.columns, out);
  }
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
