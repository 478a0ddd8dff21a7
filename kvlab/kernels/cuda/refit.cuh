// The encoder of kvlab/quantizers/refit.py, with its own clips and round: of four ranges the one of least squared error; then scale and
// offset of least squared error for its codes, and codes anew, kept where they err less. It writes what the codec writes. With FINE
// channels of unequal bits, RefitUnequalInteger of kvlab/quantizers/unequal.py: they err as finely as they are stored, no range is taken
// that cuts one off, the last FINE components, copies of the first, do not count, and the regression is of the channels between.
//
// Sums run over a vector's 16 lanes in four warps. Four numbers are summed at once: see `sum_of_lanes`.
#pragma once
#include "codec.cuh"

constexpr float CLIP = 5.f / 128.f;             // share of the range that may be cut from either end
constexpr int CANDIDATES = 4;                   // the range, cut above, cut below, cut at both ends
constexpr float CLEARLY_LESS = 1.f - 0x1p-18f;  // times the other error: beyond what rounding does to two sums

// Of each quarter of a vector.
struct alignas(16) Sums {
  float errors[QUARTERS][VECTORS][CANDIDATES];
  float moments[QUARTERS][VECTORS][4];
  float refit_errors[QUARTERS][VECTORS];
};

// Evenly spaced numbers: offset + scale * code, scale and offset as fp16 holds them. Codes are held as TO_INTEGER + code.
struct Grid {
  uint16_t scale_bits, offset_bits;
  float scale, offset, reciprocal;
  float first = TO_INTEGER, last = TO_INTEGER + LARGEST_CODE;

  // Without a scale all codes are 0, which a reciprocal of 0 makes of any number.
  __device__ __forceinline__ Grid(uint16_t scale_bits, uint16_t offset_bits)
      : scale_bits(scale_bits), offset_bits(offset_bits), scale(from_half(scale_bits)), offset(from_half(offset_bits)),
        reciprocal(scale > 0.f ? __fdividef(1.f, scale) : 0.f) {}

  // The codec's for a range; numbers outside of it take the codes of its ends.
  static __device__ __forceinline__ Grid over(const Range& range) {
    const uint16_t offset_bits = offset_of(range);
    Grid grid(scale_of(range, from_half(offset_bits)), offset_bits);
    const float first = grid.nearest(range.low), last = grid.nearest(range.high);
    grid.first = first, grid.last = last;
    return grid;
  }

  __device__ __forceinline__ float nearest(float x) const { return within(divide(x - offset, scale, reciprocal) + TO_INTEGER); }
  // The other one where x is as good as half-way between two: either errs the same.
  __device__ __forceinline__ float one_of_nearest(float x) const { return within(fmaf(x - offset, reciprocal, TO_INTEGER)); }
  __device__ __forceinline__ float squared_error(float x, float code, float steps = 1.f) const {
    const float error = fmaf((code - TO_INTEGER) * (1.f / steps), scale, offset) - x;
    return error * error;
  }
  // FINE_STEPS times as fine, held alike.
  __device__ __forceinline__ float fine_steps(float x) const { return FINE_STEPS * divide(x - offset, scale, reciprocal); }
  __device__ __forceinline__ float nearest_fine(float x) const {
    return fminf(fmaxf(fine_steps(x), 0.f), FINE_STEPS * LARGEST_CODE) + TO_INTEGER;
  }
  // What channel d errs; `code` is one of the nearest in four bits. Of a range that must hold it, a fine channel outside errs infinitely.
  template <int FINE>
  __device__ __forceinline__ float squared_error_of(float x, float code, int d, bool must_hold) const {
    if (FINE > 0 && d >= HEAD_DIM - FINE) return 0.f;
    if (FINE == 0 || d >= FINE) return squared_error(x, code);
    const float steps = fine_steps(x);
    if (must_hold && (steps < -.5f || steps > FINE_STEPS * LARGEST_CODE + .5f)) return __int_as_float(0x7f800000);
    return squared_error(x, nearest_fine(x), FINE_STEPS);
  }
  // The four bits that are stored in the place of channel d.
  template <int FINE>
  __device__ __forceinline__ uint32_t bits_of(float x, float code, int d) const {
    if (FINE > 0 && (d < FINE || d >= HEAD_DIM - FINE)) return __float_as_uint(nearest_fine(x)) >> (d < FINE ? 4 : 0) & 15;
    return __float_as_uint(code) & 15;
  }
  __device__ __forceinline__ float within(float code) const { return fminf(fmaxf(code, first), last); }
};

// The grid of candidate c. Products and sums are rounded one by one, as in the library, or ranges would differ from its.
__device__ __forceinline__ Grid clipped(const Range& range, int c) {
  const float cut = __fmul_rn(range.high - range.low, CLIP);
  return Grid::over({c & 2 ? __fadd_rn(range.low, cut) : range.low, c & 1 ? __fadd_rn(range.high, -cut) : range.high});
}

// Four sums over the 4 lanes of a vector, in three exchanges: lane t gets sum t.
__device__ __forceinline__ float sum_of_lanes(const float (&x)[4]) {
  const Lane me;
  const bool upper = me.t & 2, odd = me.t & 1;
  const float even_sum = (upper ? x[2] : x[0]) + __shfl_xor_sync(ALL_LANES, upper ? x[0] : x[2], 2);
  const float odd_sum = (upper ? x[3] : x[1]) + __shfl_xor_sync(ALL_LANES, upper ? x[1] : x[3], 2);
  return (odd ? odd_sum : even_sum) + __shfl_xor_sync(ALL_LANES, odd ? even_sum : odd_sum, 1);
}

// Four sums over the quarters of a vector, the same in every lane.
__device__ __forceinline__ void sum_of_quarters(float (&sum)[4], const float (&of_quarter)[QUARTERS][VECTORS][4], int vector) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll
  for (int q = 0; q < QUARTERS; q++) {
    const float4 part = *reinterpret_cast<const float4*>(of_quarter[q][vector]);
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
}

// The grid of least squared error for codes c of n numbers x: `moments` are the sums of c, c^2, x - offset and c (x - offset).
__device__ __forceinline__ Grid regress(const float (&moments)[4], float offset, float n) {
  const float codes = moments[0], squares = moments[1], above = moments[2], products = moments[3];
  // Of integers, and exact.
  const float spread = squares * n - codes * codes;
  const float slope = spread > 0.f ? __fdiv_rn(products * n - codes * above, spread) : 0.f;
  const uint16_t new_offset = half_bits(offset + (above - slope * codes) * (1.f / n));
  // The best scale for the offset as fp16 holds it.
  const float product = products - (from_half(new_offset) - offset) * codes;
  return {half_bits(squares > 0.f ? fmaxf(__fdiv_rn(product, squares), 0.f) : 0.f), new_offset};
}

// Encode the block's vectors, of each eight the first `held`.
template <int FINE>
__device__ __forceinline__ void refit(Stored (&stored)[HELD], const float (&y)[HELD][PIECE], const Range (&range)[HELD], int held,
                                      Sums& sums) {
  const Lane me;
  const int d = 32 * me.warp + PIECE * me.t;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (i >= held) break;
    float errors[CANDIDATES] = {};
#pragma unroll
    for (int c = 0; c < CANDIDATES; c++) {
      const Grid grid = clipped(range[i], c);
#pragma unroll
      for (int k = 0; k < PIECE; k++) errors[c] += grid.squared_error_of<FINE>(y[i][k], grid.one_of_nearest(y[i][k]), d + k, c > 0);
    }
    sums.errors[me.warp][8 * i + me.g][me.t] = sum_of_lanes(errors);
  }
  __syncthreads();
  float least[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (i >= held) break;
    float errors[CANDIDATES];
    sum_of_quarters(errors, sums.errors, 8 * i + me.g);
    int best = 0;
    least[i] = errors[0];
#pragma unroll
    for (int c = 1; c < CANDIDATES; c++)
      if (errors[c] < least[i] * CLEARLY_LESS) best = c, least[i] = errors[c];
    const Grid grid = clipped(range[i], best);
    float moments[4] = {};
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < PIECE; k++) {
      const float held_code = grid.nearest(y[i][k]), code = held_code - TO_INTEGER, above = y[i][k] - grid.offset;
      if (FINE == 0 || (d + k >= FINE && d + k < HEAD_DIM - FINE))
        moments[0] += code, moments[1] += code * code, moments[2] += above, moments[3] += code * above;
      word |= grid.bits_of<FINE>(y[i][k], held_code, d + k) << 4 * k;
    }
    stored[i] = {word, grid.scale_bits, grid.offset_bits};
    sums.moments[me.warp][8 * i + me.g][me.t] = sum_of_lanes(moments);
  }
  __syncthreads();
  Stored refitted[HELD];
  float errors[HELD] = {};
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (i >= held) break;
    float moments[4];
    sum_of_quarters(moments, sums.moments, 8 * i + me.g);
    const Grid grid = regress(moments, from_half(stored[i].offset), HEAD_DIM - 2 * FINE);
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < PIECE; k++) {
      const float code = grid.nearest(y[i][k]);
      errors[i] += grid.squared_error_of<FINE>(y[i][k], code, d + k, true);
      word |= grid.bits_of<FINE>(y[i][k], code, d + k) << 4 * k;
    }
    refitted[i] = {word, grid.scale_bits, grid.offset_bits};
  }
  // The four sums are here of the four vectors.
  static_assert(HELD == 4, "a lane sums one number of each vector that it holds");
  sums.refit_errors[me.warp][8 * me.t + me.g] = sum_of_lanes(errors);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (i >= held) break;
    float error = 0.f;
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) error += sums.refit_errors[q][8 * i + me.g];
    // An offset or scale beyond fp16 errs infinitely, or is not comparable, and is not taken.
    if (error < least[i] * CLEARLY_LESS) stored[i] = refitted[i];
  }
}
