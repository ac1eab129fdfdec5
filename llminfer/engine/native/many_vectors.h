// Products with many vectors: tiles of weights become floats once and meet all vectors of a chunk.
#pragma once

#include "matrix.h"

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

// One row as floats, by way of `group`, which has room for its whole blocks.
static void row_to_floats(const Matrix& m, long row, std::vector<float>& group, float* out) {
  group_to_floats(m, row / GROUP, 0, m.columns, group.data());
  for (long c = 0; c < m.columns; ++c) out[c] = group[c * GROUP + row % GROUP];
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

constexpr int TILE_VECTORS = 6;

// A tile of `count` vectors, T of them at most.
template <int T = TILE_VECTORS, class... Arguments>
static void tile_of(long count, Arguments... arguments) {
  if constexpr (T > 1)
    if (count < T) return tile_of<T - 1>(count, arguments...);
  tile<T>(arguments...);
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
        const auto floats_of = [&](long group, float* room) -> const float* {
          if (m.format == FLOAT32) return reinterpret_cast<const float*>(m.data) + (group * m.columns + c) * GROUP;
          group_to_floats(m, group, c, c + columns, room);
          return room;
        };
        const float* w0 = floats_of(g, weights.data());
        const float* w1 = pair ? floats_of(g + 1, weights.data() + GROUP * TILE_COLUMNS) : w0;
        for (long v = 0; v < vectors; v += TILE_VECTORS)
          tile_of(std::min<long>(TILE_VECTORS, vectors - v), w0, w1, values + v * x.stride + c, x.stride, columns, c == 0,
                  sums.data() + v * 2 * GROUP, 2 * GROUP);
      }
      for (long v = 0; v < vectors; ++v) {
        put(m, g * GROUP, load8(sums.data() + v * 2 * GROUP), y + (chunk + v) * stride);
        if (pair) put(m, (g + 1) * GROUP, load8(sums.data() + v * 2 * GROUP + GROUP), y + (chunk + v) * stride);
      }
    }
  }
}
