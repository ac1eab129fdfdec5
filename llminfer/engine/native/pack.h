// From rows of floats to the packed formats.
#pragma once

#include "matrix.h"

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
