// From the qkv projection's output to rotated queries and 4-bit cells, in one pass. Compile-time: HEAD_DIM (128), NUM_KV_HEADS and
// GROUP, the query heads of a KV head. A *vector* is one token and head, 256 bytes of bf16; a warp multiplies 32 of them by a matrix.
#include "region.cuh"
#include "rotate.cuh"

constexpr float LARGEST_HALF = 65504.f;
constexpr float LARGEST_CODE = 15.f;
constexpr float TO_INTEGER = 12582912.f;  // 1.5 * 2^23: numbers of this size are integers, so that adding it rounds half to even

// The queries of one KV head, vector r being token r / GROUP and head r % GROUP of the group.
struct Queries {
  const uint16_t* qkv;
  int64_t token_stride;
  int vectors, kv_head;
  uint16_t* out;

  // Start copying the lane's part of 32 vectors to shared memory.
  __device__ __forceinline__ void fetch(uint4* tile, int first_vector) const {
    const Lane me;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int r = min(first_vector + 8 * i + me.g, vectors - 1);
      const uint16_t* from = qkv + r / GROUP * token_stride + (kv_head * GROUP + r % GROUP) * HEAD_DIM + PIECE * me.t;
#pragma unroll
      for (int c = 0; c < PIECES; c++) copy_16(tile + (i * PIECES + c) * 32 + me.lane, from + 32 * c);
    }
  }

  __device__ __forceinline__ void store(const Product& y, const float (&factor)[HELD], int first_vector, int quarter) const {
    const Lane me;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int r = first_vector + 8 * i + me.g;
      if (r >= vectors) break;
      uint32_t pairs[4];
#pragma unroll
      for (int k = 0; k < 4; k++) pairs[k] = pack_bfloat(at(y, i, 2 * k) * factor[i], at(y, i, 2 * k + 1) * factor[i]);
      const int64_t vector = int64_t(r / GROUP) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP;
      store_16(out + vector * HEAD_DIM + 32 * quarter + PIECE * me.t, pairs);
    }
  }
};

// Rotate parts warp, warp + warps, ... of the queries; a part is `quarters` quarters of 32 vectors.
__device__ __forceinline__ void rotate_queries(const Queries& queries, int warp, int warps, int quarters, float unscale, float eps) {
  const Lane me;
  const int parts = QUARTERS / quarters, last = (queries.vectors + VECTORS - 1) / VECTORS * parts;
  uint4* tile = shared_matrix + TERM_FRAGMENTS + me.warp * TILE_FRAGMENTS;
  if (warp < last) queries.fetch(tile, warp / parts * VECTORS);
  for (int part = warp; part < last; part += warps) {
    const int first_vector = part / parts * VECTORS, first_quarter = part % parts * quarters;
    Tile x;
    float factor[HELD];
    wait_for_copies();
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      Vector vector;
#pragma unroll
      for (int c = 0; c < PIECES; c++) unpack(vector[c], tile[(i * PIECES + c) * 32 + me.lane]);
      factor[i] = to_half(vector, true, eps) * unscale;
#pragma unroll
      for (int c = 0; c < PIECES; c++)
#pragma unroll
        for (int word = 0; word < 4; word++) x[i / 2][c][word / 2][word_in_tile(i, word)] = vector[c][word];
    }
    if (part + warps < last) queries.fetch(tile, (part + warps) / parts * VECTORS);
    for (int quarter = first_quarter; quarter < first_quarter + quarters; quarter++) {
      Product y;
      multiply<1>(y, x, quarter, me.lane);
      queries.store(y, factor, first_vector, quarter);
    }
  }
}

// Keys or values of one KV head.
struct Cells {
  const uint16_t* vectors;
  int64_t token_stride;
  const int64_t* slot_mapping;
  int tokens, kv_head;
  bool is_value;
  float* debug;
};
struct Fetched {
  uint4 pieces[HELD];
  int64_t slots[HELD];
};

// Ask for what 32 tokens need, ahead of its use: the lane's whole part of one vector for a matrix, else its piece of all four.
__device__ __forceinline__ Fetched fetch(const Cells& cells, int first_token, bool whole) {
  static_assert(HELD == WARPS && HELD == PIECES, "a lane prepares one vector of the four it holds");
  const Lane me;
  Fetched next;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int token = min(first_token + 8 * (whole ? me.warp : i) + me.g, cells.tokens - 1);
    next.pieces[i] = load_16(cells.vectors + token * cells.token_stride + 32 * (whole ? i : me.warp) + PIECE * me.t);
    const int row = first_token + 8 * i + me.g;
    next.slots[i] = row < cells.tokens ? cells.slot_mapping[row] : -1;
  }
  return next;
}

// The warp's quarter of the block's 32 vectors, in float32 and within fp16's range; NaN becomes 0.
__device__ __forceinline__ void rotate_cells(float (&y)[HELD][PIECE], const Fetched& now, bool normalise, const Affine& affine,
                                             float eps) {
  const Lane me;
  const int d = 32 * me.warp + PIECE * me.t;
  if (affine.fragments) {
    // Each warp prepares 8 of the vectors that all four multiply.
    __shared__ alignas(16) uint32_t prepared[HELD / 2][PIECES][2][32][4];
    __shared__ float factors[VECTORS];
    Vector mine;
#pragma unroll
    for (int c = 0; c < PIECES; c++) unpack(mine[c], now.pieces[c]);
    const float factor = to_half(mine, normalise, eps) * affine.unscale;
#pragma unroll
    for (int c = 0; c < PIECES; c++)
#pragma unroll
      for (int word = 0; word < 4; word++)
        prepared[me.warp / 2][c][word / 2][me.lane][word_in_tile(me.warp, word)] = mine[c][word];
    if (me.t == 0) factors[8 * me.warp + me.g] = factor;
    __syncthreads();
    Tile x;
#pragma unroll
    for (int m = 0; m < HELD / 2; m++)
#pragma unroll
      for (int c = 0; c < PIECES; c++)
#pragma unroll
        for (int p = 0; p < 2; p++) unpack(x[m][c][p], *reinterpret_cast<const uint4*>(prepared[m][c][p][me.lane]));
    Product product;
    multiply<2>(product, x, me.warp, me.lane);
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
      for (int k = 0; k < PIECE; k++) y[i][k] = at(product, i, k) * factors[8 * i + me.g];
  } else {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      uint32_t pairs[4];
      unpack(pairs, now.pieces[i]);
#pragma unroll
      for (int k = 0; k < PIECE / 2; k++) y[i][2 * k] = bfloat_low(pairs[k]), y[i][2 * k + 1] = bfloat_high(pairs[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < PIECE; k++) {
    const float shift = shared_bias[d + k];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const float z = y[i][k] + shift;
      y[i][k] = z == z ? fminf(fmaxf(z, -LARGEST_HALF), LARGEST_HALF) : 0.f;
    }
  }
}

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

// The codec's codes of a piece, four bits each, the first in the lowest.
__device__ __forceinline__ uint32_t encode(const float (&y)[PIECE], float scale, float offset) {
  const float reciprocal = __fdividef(1.f, scale);
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < PIECE; k++) {
    const float code = fminf(fmaxf(divide(y[k] - offset, scale, reciprocal), 0.f), LARGEST_CODE);
    word |= (__float_as_uint(code + TO_INTEGER) & 15) << 4 * k;
  }
  return scale > 0.f ? word : 0;
}

// 32 keys or values into the cells of their slots.
__device__ __forceinline__ void store_cells(const float (&y)[HELD][PIECE], const Cells& cells, int first_token,
                                            const int64_t (&slots)[HELD], const Cache& cache) {
  const Lane me;
  const int d = 32 * me.warp + PIECE * me.t;
  Range range[HELD];
  find_ranges(range, y);
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int row = first_token + 8 * i + me.g;
    if (cells.debug && row < cells.tokens)
#pragma unroll
      for (int k = 0; k < PIECE; k++) cells.debug[(int64_t(row) * NUM_KV_HEADS + cells.kv_head) * HEAD_DIM + d + k] = y[i][k];
    if (slots[i] < 0) continue;
    // Adding 0 makes the zero positive, as the codec does.
    const uint16_t offset_bits = half_bits(range[i].low + 0.f);
    const float offset = from_half(offset_bits);
    const uint16_t scale_bits = half_bits(divide(fmaxf(range[i].high - offset, 0.f), LARGEST_CODE, 1.f / LARGEST_CODE));
    const uint32_t codes = encode(y[i], from_half(scale_bits), offset);
    const uint32_t region_index = uint32_t(slots[i] / REGION_TOKENS);
    const int token = int(slots[i] % REGION_TOKENS);
    uint8_t* region = cache.base + region_index / cache.regions_per_block * cache.block_stride + cells.kv_head * cache.head_stride +
                      region_index % cache.regions_per_block * REGION_BYTES;
    if (cells.is_value) {
      *reinterpret_cast<uint16_t*>(region + value_at(token, d)) = uint16_t(codes);
      *reinterpret_cast<uint16_t*>(region + value_at(token, d + 4)) = uint16_t(codes >> 16);
    } else {
      *reinterpret_cast<uint32_t*>(region + key_at(token, d)) = codes;
    }
    if (me.warp == 0 && me.t == 0) {
      *reinterpret_cast<uint16_t*>(region + metadata_at(cells.is_value ? VALUE_SCALE : KEY_SCALE, token)) = scale_bits;
      *reinterpret_cast<uint16_t*>(region + metadata_at(cells.is_value ? VALUE_OFFSET : KEY_OFFSET, token)) = offset_bits;
    }
  }
}

// Each block keeps one matrix and walks the vectors that need it. Of every KV head, first `cell_blocks` blocks store keys, 32 tokens
// at a time; then as many store values; then `query_blocks` rotate queries, a warp `quarters` quarters of 32 vectors at a time.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3)
norm_rotate_store(const uint16_t* qkv, int64_t token_stride, int tokens, const int64_t* slot_mapping, int slots, int cell_blocks,
                  int query_blocks, int quarters, float eps, const Affine q, const Affine k, const Affine v, const Cache cache,
                  uint16_t* out, float* debug_keys, float* debug_values) {
  let_next_kernel_start();
  const int storing = 2 * NUM_KV_HEADS * cell_blocks;
  if (int(blockIdx.x) < storing) {
    const int kv_head = blockIdx.x / cell_blocks % NUM_KV_HEADS;
    const bool is_value = blockIdx.x / cell_blocks >= NUM_KV_HEADS;
    const Affine affine = is_value ? v.of_head(kv_head) : k.of_head(kv_head);
    if (affine.fragments) load_matrix<2>(affine.fragments);
    shared_bias[threadIdx.x] = affine.bias ? __ldg(affine.bias + threadIdx.x) : 0.f;
    __syncthreads();
    wait_for_previous_kernel();
    const Cells cells = {qkv + ((GROUP + is_value) * NUM_KV_HEADS + kv_head) * HEAD_DIM, token_stride, slot_mapping, slots, kv_head,
                         is_value, is_value ? debug_values : debug_keys};
    const int step = cell_blocks * VECTORS;
    Fetched next = fetch(cells, blockIdx.x % cell_blocks * VECTORS, affine.fragments);
    for (int first = blockIdx.x % cell_blocks * VECTORS; first < slots; first += step) {
      const Fetched now = next;
      if (first + step < slots) next = fetch(cells, first + step, affine.fragments);
      float y[HELD][PIECE];
      rotate_cells(y, now, !is_value, affine, eps);
      store_cells(y, cells, first, now.slots, cache);
      // Before shared memory is written again.
      __syncthreads();
    }
  } else {
    const int block = blockIdx.x - storing, kv_head = block / query_blocks;
    const Affine affine = q.of_head(kv_head);
    load_matrix<1>(affine.fragments);
    __syncthreads();
    wait_for_previous_kernel();
    rotate_queries({qkv, token_stride, tokens * GROUP, kv_head, out}, block % query_blocks * WARPS + threadIdx.x / 32,
                   query_blocks * WARPS, quarters, affine.unscale, eps);
  }
}
