// Codes of some spans of tokens to the numbers they stand for, dense: what FlashAttention reads during prefill.
// A block does one region: 32 tokens of one head arrive by one bulk copy, every thread then writes runs of 16 bytes.
#include "region.cuh"

constexpr float FP16_MAX = 65504.f;
constexpr int THREADS = 128;
constexpr int RUN = 8;  // numbers in 16 bytes
constexpr int RUNS = HEAD_DIM / RUN;
constexpr int PAIRS = REGION_TOKENS / 2;  // a word of the values holds four numbers of two neighbouring tokens

// The odd part of 2^23 + code is the code: a conversion without the slow integer-to-float unit.
__device__ __forceinline__ float number(uint32_t codes, int place, float scale, float offset) {
  const float code = __uint_as_float(((codes >> (4 * place)) & 15) | 0x4B000000u) - 8388608.f;
  return fmaf(scale, code, offset);  // scale * code is exact: fused or not is the same
}
__device__ __forceinline__ float saturated(float x) { return fabsf(x) > FP16_MAX ? copysignf(FP16_MAX, x) : x; }
__device__ __forceinline__ uint32_t rounded(float low, float high) {
  return BFLOAT ? pack_bfloat(low, high) : pack_half(saturated(low), saturated(high));
}
__device__ __forceinline__ void write_run(uint16_t* out, uint32_t codes, uint32_t scale_bits, uint32_t offset_bits) {
  const float scale = from_half(uint16_t(scale_bits)), offset = from_half(uint16_t(offset_bits)) + 0.f;  // no -0
  uint32_t words[RUN / 2];
#pragma unroll
  for (int i = 0; i < RUN / 2; i++)
    words[i] = rounded(number(codes, 2 * i, scale, offset), number(codes, 2 * i + 1, scale, offset));
  *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
}

// spans: four rows of num_spans + 1: row of the block table, first token, place in the workspace, first region's block.
extern "C" __global__ void __launch_bounds__(THREADS)
expand(Cache cache, int num_heads, const int* block_table, int64_t table_stride, const int* spans, int num_spans,
       uint16_t* keys, uint16_t* values) {
  __shared__ alignas(16) uint8_t region[REGION_BYTES];
  __shared__ uint64_t arrived;
  const int columns = num_spans + 1, head = blockIdx.x % num_heads, nth = blockIdx.x / num_heads;
  const int *sequence = spans, *start = spans + columns, *place = start + columns, *first = place + columns;
  int span = 0;
  for (int end = num_spans; end - span > 1;) {
    const int middle = (span + end) / 2;
    (first[middle] <= nth ? span : end) = middle;
  }
  const int index = start[span] / REGION_TOKENS + nth - first[span];

  if (threadIdx.x == 0) {
    const int64_t block = block_table[sequence[span] * table_stride + index / cache.regions_per_block];
    barrier_init(shared_address(&arrived), 1);
    barrier_inits_done();
    copy_once(shared_address(region),
              cache.base + block * cache.block_stride + head * cache.head_stride +
                  index % cache.regions_per_block * REGION_BYTES,
              REGION_BYTES, shared_address(&arrived));
  }
  __syncthreads();  // the barrier exists
  barrier_wait(shared_address(&arrived), 0);

  const auto word = [&](int at) { return *reinterpret_cast<const uint32_t*>(region + at); };
  const int tokens = place[span + 1] - place[span];
  for (int i = threadIdx.x; i < PAIRS * RUNS; i += THREADS) {
    const int token = i / RUNS * 2, d = i % RUNS * RUN, at = index * REGION_TOKENS + token - start[span];
    const uint32_t low = word(value_at(token, d)), high = word(value_at(token, d + 4));
    const uint32_t key_scale = word(metadata_at(KEY_SCALE, token)), key_offset = word(metadata_at(KEY_OFFSET, token));
    const uint32_t value_scale = word(metadata_at(VALUE_SCALE, token)),
                   value_offset = word(metadata_at(VALUE_OFFSET, token));
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      if (at + odd < 0 || at + odd >= tokens) continue;
      const int64_t to = (int64_t(place[span] + at + odd) * num_heads + head) * HEAD_DIM + d;
      const uint32_t codes = odd ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
      write_run(keys + to, word(key_at(token + odd, d)), key_scale >> 16 * odd, key_offset >> 16 * odd);
      write_run(values + to, codes, value_scale >> 16 * odd, value_offset >> 16 * odd);
    }
  }
}
