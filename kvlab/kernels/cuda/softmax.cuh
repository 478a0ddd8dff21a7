// What a warp does with a region: scores, online softmax, weighted sum of values. The folder's README explains the arithmetic.
// Roles in a warp: g = lane / 4 and t = lane % 4, as the tensor cores number them (hopper.cuh).
#pragma once
#include "query.cuh"

constexpr int COLUMNS = HEAD_DIM / 8;  // tiles of the product of probabilities and values

// Probabilities are kept as 2^(score - reference) with a reference that lets the largest begin at 2^HEADROOM and grow to 2^LIMIT
// before the reference moves: far above fp16's subnormal numbers, far below its overflow.
constexpr float HEADROOM = 4;
constexpr uint32_t HALF_LIMIT = 0x6400;  // 2^10
// Probabilities times value scales are fp16 too: scales above 2^LIMIT / 32 are taken down by a power of two.
constexpr uint32_t HALF_32 = 0x50005000;

// 1024 + c and 1024 + 16c as fp16 are the codes c in the low or high nibble of a byte under these bits.
constexpr uint32_t LOW_NIBBLES = 0x000F000F, HIGH_NIBBLES = 0x00F000F0, PLUS_1024 = 0x64006400;
// The same with the second of two tokens negated and its code complemented, -(1024 + 15 - c): a sum over many tokens then wanders about
// zero. One that grows would lose digits, since tensor cores truncate when they accumulate.
constexpr uint32_t LOW_ALTERNATING = 0xE40F6400, HIGH_ALTERNATING = 0xE4F06400;
// What to take off so that the rest, too, wanders about zero: 1031 of the first token and -1031 of the second leave c - 7 and c - 8, and
// 1136 and -1136 leave 16 times that. Equal magnitudes are truncated alike. The value offsets take in those 7 and 8 scales.
constexpr uint32_t LOW_CONSTANTS = 0xE4076407, HIGH_CONSTANTS = 0xE4706470, HALF_CENTRES = 0x48004700;
constexpr uint32_t HALF_ONES = 0x3C003C00;

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ uint4 masked(const uint4& v, const uint32_t (&keep)[4]) {
  return {v.x & keep[0], v.y & keep[1], v.z & keep[2], v.w & keep[3]};
}
__device__ __forceinline__ bool exceeds(uint32_t pair, uint32_t limit) { return (pair & 0xffff) > limit || (pair >> 16) > limit; }

// What a warp knows of its rows after some regions. Each lane has two rows, g and g + 8.
struct State {
  float reference[2];         // added to scores: minus the maximum, plus HEADROOM
  float rows[4];              // per row: sum of probability times offset of the centre, sum of probability
  float correction[4];        // what the constants in the codes have added to the columns, low and high nibbles
  float columns[COLUMNS][4];  // per row: sum of probability times value scale times code (or 16 times)
  uint32_t shrink;            // power of two on value scales, an fp16 pair

  __device__ __forceinline__ void clear() {
    shrink = HALF_ONES;
    reference[0] = reference[1] = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      rows[i] = correction[i] = 0;
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) columns[column][i] = 0;
    }
  }

  __device__ __forceinline__ void scale_values(float low_row, float high_row) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float factor = i < 2 ? low_row : high_row;
      correction[i] *= factor;
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) columns[column][i] *= factor;
    }
  }
};

// Scores of 32 tokens in units of the key's scale: token 8j + 2t (+ 1) of row g (+ 8).
__device__ __forceinline__ void multiply_keys(float (&scores)[4][4], uint32_t region, const uint4 (&query)[QUERY_WORDS], int lane) {
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[j][i] = __uint_as_float(word(query[QUERY_START], i));
#pragma unroll
  for (int half = 0; half < HEAD_DIM / 64; half++) {
    uint2 words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = load_shared_8(region + half * 1024 + j * 256 + lane * 8);
#pragma unroll
    for (int step = 4 * half; step < 4 * half + 4; step++) {
      const uint32_t rows[4] = {query[step].x, query[step].y, query[step].z, query[step].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t eight = step & 2 ? words[j].y : words[j].x, codes = step & 1 ? eight >> 8 : eight;
        multiply_half(scores[j], rows, bitwise<AND_OR>(codes, LOW_NIBBLES, PLUS_1024), bitwise<AND_OR>(codes, HIGH_NIBBLES, PLUS_1024));
      }
    }
  }
}

__device__ __forceinline__ void exponentials(uint32_t (&p)[4][2], const float (&scores)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    p[j][0] = pack_half(exp2_fast(scores[j][0]), exp2_fast(scores[j][1]));
    p[j][1] = pack_half(exp2_fast(scores[j][2]), exp2_fast(scores[j][3]));
  }
}

__device__ __forceinline__ uint32_t largest(const uint32_t (&p)[4][2]) {
  uint32_t top = half_pair_max(p[0][0], p[0][1]);
#pragma unroll
  for (int j = 1; j < 4; j++) top = half_pair_max(top, half_pair_max(p[j][0], p[j][1]));
  return top;
}

// Moves the references up to the new maxima (or, for the first region, to them).
__device__ __forceinline__ void move_reference(State& state, float (&scores)[4][4], bool first) {
  float factor[2];
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float top = NO_SCORE;
#pragma unroll
    for (int j = 0; j < 4; j++) top = fmaxf(top, fmaxf(scores[j][2 * row], scores[j][2 * row + 1]));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
    const float move = first ? top - HEADROOM : fmaxf(top - HEADROOM, 0);
    factor[row] = first ? 0 : exp2_fast(-move);
    state.reference[row] -= move;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      scores[j][2 * row] -= move;
      scores[j][2 * row + 1] -= move;
    }
    state.rows[2 * row] *= factor[row];
    state.rows[2 * row + 1] *= factor[row];
  }
  state.scale_values(factor[0], factor[1]);
}

// Takes value scales above 32 down to at most 16, for good: `top` is the lane's largest pair.
__device__ __forceinline__ void shrink_values(State& state, uint32_t top) {
  const float2 pair = from_half_pair(top);
  float most = fmaxf(pair.x, pair.y);
  most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
  most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
  const float now = from_half_pair(state.shrink).x;
  if (most * now <= 32) return;
  float next = now;
  while (most * next > 16) next *= 0.5f;
  state.shrink = pack_half(next, next);
  state.scale_values(next / now, next / now);
}

__device__ __forceinline__ void multiply_values(State& state, const uint32_t (&p)[4][2], const uint4& scale, const uint4& offset,
                                                uint32_t region, int lane) {
  const bool odd_column = (lane >> 2) & 1;
  const uint32_t constants = odd_column ? HIGH_CONSTANTS : LOW_CONSTANTS;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {  // 16 tokens each
    const uint32_t plain[4] = {p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]};
    uint32_t weights[4];
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i] = half_pair_times(plain[i], word(scale, j + i / 2));
    // Even columns sum the offsets, odd ones the probabilities.
    multiply_half(state.rows, plain, odd_column ? HALF_ONES : word(offset, j), odd_column ? HALF_ONES : word(offset, j + 1));
    multiply_half(state.correction, weights, constants, constants);
    const uint4 first = load_shared_16(region + KEY_BYTES + j * (4 * HEAD_DIM) + lane * 16);
    const uint4 second = load_shared_16(region + KEY_BYTES + (j + 1) * (4 * HEAD_DIM) + lane * 16);
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
      const uint32_t a = word(first, column / 4), b = word(second, column / 4);
      const uint32_t x = column & 2 ? a >> 8 : a, y = column & 2 ? b >> 8 : b;
      const uint32_t nibbles = column & 1 ? HIGH_NIBBLES : LOW_NIBBLES, with = column & 1 ? HIGH_ALTERNATING : LOW_ALTERNATING;
      multiply_half(state.columns[column], weights, bitwise<AND_XOR>(x, nibbles, with), bitwise<AND_XOR>(y, nibbles, with));
    }
  }
}

// Adds 32 tokens. `visible`: how many of them the first new token of the sequence sees, or 32 where all rows see all of them.
template <bool LARGE_QUERY>
__device__ __forceinline__ void add_region(State& state, uint32_t region, const uint4 (&query)[QUERY_WORDS], int first_row, int visible,
                                           bool first, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float scores[4][4];
  multiply_keys(scores, region, query, lane);
  auto metadata = [&](Metadata row) { return load_shared_16(region + METADATA_AT + row * METADATA_ROW + t * 16); };
  const uint4 key_scale = metadata(KEY_SCALE), key_offset = metadata(KEY_OFFSET);
  uint4 value_scale = metadata(VALUE_SCALE), value_offset = metadata(VALUE_OFFSET);
  const float sum[2] = {__uint_as_float(query[QUERY_SUMS].x), __uint_as_float(query[QUERY_SUMS].y)};
  const float grow[2] = {__uint_as_float(query[QUERY_SUMS].z), __uint_as_float(query[QUERY_SUMS].w)};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 scale = from_half_pair(word(key_scale, j)), offset = from_half_pair(word(key_offset, j));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (LARGE_QUERY) scores[j][i] *= grow[i / 2];
      scores[j][i] = fmaf(i & 1 ? scale.y : scale.x, scores[j][i], fmaf(i & 1 ? offset.y : offset.x, sum[i / 2], state.reference[i / 2]));
    }
  }
  if (visible < REGION_TOKENS) {
    uint32_t keep[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = 8 * j + 2 * t;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = first_row + g + 8 * (i / 2);
        if (token + (i & 1) >= visible + row / GROUP) scores[j][i] = NO_SCORE;
      }
      // Beyond the sequence the bytes are stale: a NaN there would pass through a probability of zero.
      keep[j] = (token < visible + Q_LEN - 1 ? 0xffffu : 0u) | (token + 1 < visible + Q_LEN - 1 ? 0xffff0000u : 0u);
    }
    value_scale = masked(value_scale, keep);
    value_offset = masked(value_offset, keep);
  }
  value_offset = {half_pair_fma(value_scale.x, HALF_CENTRES, value_offset.x), half_pair_fma(value_scale.y, HALF_CENTRES, value_offset.y),
                  half_pair_fma(value_scale.z, HALF_CENTRES, value_offset.z), half_pair_fma(value_scale.w, HALF_CENTRES, value_offset.w)};
  uint32_t p[4][2];
  exponentials(p, scores);
  const uint32_t top_scale = half_pair_max(half_pair_max(value_scale.x, value_scale.y), half_pair_max(value_scale.z, value_scale.w));
  // 2^10 against 2^5: one test for both limits.
  const uint32_t tested = half_pair_max(largest(p), half_pair_times(half_pair_times(top_scale, state.shrink), HALF_32));
  if (__any_sync(ALL_LANES, first || exceeds(tested, HALF_LIMIT))) {
    move_reference(state, scores, first);
    exponentials(p, scores);
    shrink_values(state, top_scale);
  }
  value_scale = {half_pair_times(value_scale.x, state.shrink), half_pair_times(value_scale.y, state.shrink),
                 half_pair_times(value_scale.z, state.shrink), half_pair_times(value_scale.w, state.shrink)};
  multiply_values(state, p, value_scale, value_offset, region, lane);
}
