// Eight floats at a time, in the compiler's own vector types: AVX2, AVX-512, NEON or plain code, as the
// machine that compiles it has. Only what they cannot say is written per processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(LLMINFER_PORTABLE)
#include <immintrin.h>
#define LLMINFER_AVX2 1
#endif

typedef float float8 __attribute__((vector_size(32)));
typedef float float8_at __attribute__((vector_size(32), aligned(4)));  // at any address
typedef int32_t int8x32 __attribute__((vector_size(32)));

static inline float8 load8(const float* from) { return *reinterpret_cast<const float8_at*>(from); }
static inline void store8(float* to, float8 value) { *reinterpret_cast<float8_at*>(to) = value; }
static inline float8 all8(float value) { return float8{value, value, value, value, value, value, value, value}; }

static inline float sum8(float8 v) {
#ifdef LLMINFER_AVX2
  __m256 a = (__m256)v;
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
#else
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

// IEEE half precision

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
  uint32_t bits;
  if (exponent == 0) {
    const float tiny = std::ldexp(static_cast<float>(mantissa), -24);
    std::memcpy(&bits, &tiny, 4);
    bits |= sign;
  } else {
    bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to nearest, ties to even; beyond the range becomes infinity.
static inline uint16_t float_to_half(float value) {
#ifdef LLMINFER_AVX2
  return static_cast<uint16_t>(_cvtss_sh(value, 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (!(magnitude < 65520.0f)) return sign | (std::isnan(value) ? 0x7e00u : 0x7c00u);
  if (magnitude < 6.103515625e-05f)
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  std::memcpy(&bits, &magnitude, 4);
  bits += 0xfffu + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((bits >> 13) - (112u << 10));
#endif
}

static inline float8 load8_half(const uint16_t* from) {
#ifdef LLMINFER_AVX2
  return (float8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  float8 value;
  for (int i = 0; i < 8; ++i) value[i] = half_to_float(from[i]);
  return value;
#endif
}

// e to the power of each, within two units in the last place; 0 below about -87.
static inline float8 exp8(float8 x) {
  const float8 low = all8(-87.33654f), high = all8(88.0f);
  const auto vanishes = x < low;
  x = x > high ? high : x;
  x = vanishes ? low : x;
  // x = n ln 2 + r: two to the n by the exponent's bits, e to the r by a polynomial
  const float8 shifter = all8(12582912.0f);
  const float8 n = (x * all8(1.44269504088896341f) + shifter) - shifter;
  float8 r = x - n * all8(0.693359375f);
  r = r - n * all8(-2.12194440e-4f);
  float8 p = all8(1.9875691500e-4f);
  p = p * r + all8(1.3981999507e-3f);
  p = p * r + all8(8.3334519073e-3f);
  p = p * r + all8(4.1665795894e-2f);
  p = p * r + all8(1.6666665459e-1f);
  p = p * r + all8(5.0000001201e-1f);
  p = p * r * r + r + all8(1.0f);
  const int8x32 exponent = (__builtin_convertvector(n, int8x32) + 127) << 23;
  const float8 result = p * (float8)exponent;
  return vanishes ? all8(0.0f) : result;
}
