// Products with few vectors: weights are read from memory once, each group of rows meets all vectors of a tile.
#pragma once

#include "matrix.h"

// One group of eight rows times T vectors, by format
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
