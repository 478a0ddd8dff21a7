// The 4-bit codec, as kvlab/codec.py defines it, of 32 vectors of which each of a block's four warps has a quarter: a lane a piece of
// four of them.
#pragma once
#include "rotate.cuh"

constexpr float LARGEST_CODE = 15.f;
constexpr float FINE_STEPS = 17.f;  // of eight bits to one of four on the same range
constexpr float TO_INTEGER = 12582912.f;  // 1.5 * 2^23: numbers of this size are integers, so that adding it rounds half to even

// What is stored of a vector: the codes of a piece, four bits each, the first in the lowest; and two fp16 numbers.
struct Stored {
  uint32_t codes;
  uint16_t scale, offset;
};

struct Range {
  float low, high;
};
// Smallest and largest component of the block's 32 vectors: of a piece, of the 4 lanes, of the 4 warps.
__device__ __forceinline__ void find_ranges(Range (&range)[HELD], const float (&y)[HELD][PIECE]) {
  const Lane me;
  __shared__ Range of_quarter[VECTORS][QUARTERS];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    float low = y[i][0], high = y[i][0];
#pragma unroll
    for (int k = 1; k < PIECE; k++) low = fminf(low, y[i][k]), high = fmaxf(high, y[i][k]);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      low = fminf(low, __shfl_xor_sync(ALL_LANES, low, step));
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, step));
    }
    if (me.t == 0) of_quarter[8 * i + me.g][me.warp] = {low, high};
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    range[i] = of_quarter[8 * i + me.g][0];
#pragma unroll
    for (int q = 1; q < QUARTERS; q++) {
      const Range other = of_quarter[8 * i + me.g][q];
      range[i] = {fminf(range[i].low, other.low), fmaxf(range[i].high, other.high)};
    }
  }
}

// x / divisor, correctly rounded, for a divisor of at most 11 bits and a reciprocal of it good to an ulp or two: the quotient of a
// 24-bit number is then at least 2^-12 ulp from where rounding changes, and one correction leaves an error far below.
__device__ __forceinline__ float divide(float x, float divisor, float reciprocal) {
  const float quotient = x * reciprocal;
  return fmaf(fmaf(-divisor, quotient, x), reciprocal, quotient);
}

// The nearest integer from 0 to largest, at most 255, half to even.
__device__ __forceinline__ uint32_t to_integer(float x, float largest) {
  return __float_as_uint(fminf(fmaxf(x, 0.f), largest) + TO_INTEGER) & 255;
}

// The fp16 numbers that the codec gives a range. Adding 0 makes the zero positive, as the codec does.
__device__ __forceinline__ uint16_t offset_of(const Range& range) { return half_bits(range.low + 0.f); }
__device__ __forceinline__ uint16_t scale_of(const Range& range, float offset) {
  return half_bits(divide(fmaxf(range.high - offset, 0.f), LARGEST_CODE, 1.f / LARGEST_CODE));
}

// The codec's codes of a piece whose first component is channel d of its vector. With FINE channels of unequal bits, the last FINE
// components are copies of the first: these keep the high halves of eight bits, those the low ones.
template <int FINE>
__device__ __forceinline__ Stored encode(const float (&y)[PIECE], const Range& range, int d) {
  const uint16_t offset_bits = offset_of(range);
  const float offset = from_half(offset_bits);
  const uint16_t scale_bits = scale_of(range, offset);
  const float scale = from_half(scale_bits), reciprocal = __fdividef(1.f, scale);
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < PIECE; k++) {
    const float steps = divide(y[k] - offset, scale, reciprocal);
    uint32_t code;
    if (FINE > 0 && (d + k < FINE || d + k >= HEAD_DIM - FINE)) {
      code = to_integer(FINE_STEPS * steps, FINE_STEPS * LARGEST_CODE) >> (d + k < FINE ? 4 : 0) & 15;
    } else {
      code = to_integer(steps, LARGEST_CODE);
    }
    word |= code << 4 * k;
  }
  return {scale > 0.f ? word : 0, scale_bits, offset_bits};
}
