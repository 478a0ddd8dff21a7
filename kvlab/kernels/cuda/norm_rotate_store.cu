// From the qkv projection's output to rotated queries and 4-bit cells, in one pass. Compile-time: HEAD_DIM (128), NUM_KV_HEADS and
// GROUP, the query heads of a KV head. A *vector* is one token and head, 256 bytes of bf16; a warp multiplies 32 of them by a matrix.
#include "refit.cuh"
#include "region.cuh"

constexpr float LARGEST_HALF = 65504.f;

// What the warps of a block tell each other of the vectors they store: these prepared, and when all have read them, sums.
__shared__ union {
  alignas(16) uint32_t prepared[HELD / 2][PIECES][2][32][4];
  Sums sums;
} exchange;

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
    __shared__ float factors[VECTORS];
    Vector mine;
#pragma unroll
    for (int c = 0; c < PIECES; c++) unpack(mine[c], now.pieces[c]);
    const float factor = to_half(mine, normalise, eps) * affine.unscale;
#pragma unroll
    for (int c = 0; c < PIECES; c++)
#pragma unroll
      for (int word = 0; word < 4; word++)
        exchange.prepared[me.warp / 2][c][word / 2][me.lane][word_in_tile(me.warp, word)] = mine[c][word];
    if (me.t == 0) factors[8 * me.warp + me.g] = factor;
    __syncthreads();
    Tile x;
#pragma unroll
    for (int m = 0; m < HELD / 2; m++)
#pragma unroll
      for (int c = 0; c < PIECES; c++)
#pragma unroll
        for (int p = 0; p < 2; p++) unpack(x[m][c][p], *reinterpret_cast<const uint4*>(exchange.prepared[m][c][p][me.lane]));
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

// 32 keys or values into the cells of their slots.
template <bool REFIT, int FINE>
__device__ __forceinline__ void store_cells(const float (&y)[HELD][PIECE], const Cells& cells, int first_token,
                                            const int64_t (&slots)[HELD], const Cache& cache) {
  const Lane me;
  const int d = 32 * me.warp + PIECE * me.t;
  Range range[HELD];
  find_ranges(range, y);
  Stored fitted[HELD];
  if constexpr (REFIT) refit<FINE>(fitted, y, range, (cells.tokens - first_token + 7) / 8, exchange.sums);
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int row = first_token + 8 * i + me.g;
    if (cells.debug && row < cells.tokens)
#pragma unroll
      for (int k = 0; k < PIECE; k++) cells.debug[(int64_t(row) * NUM_KV_HEADS + cells.kv_head) * HEAD_DIM + d + k] = y[i][k];
    if (slots[i] < 0) continue;
    const Stored stored = REFIT ? fitted[i] : encode<FINE>(y[i], range[i], d);
    const uint32_t region_index = uint32_t(slots[i] / REGION_TOKENS);
    const int token = int(slots[i] % REGION_TOKENS);
    uint8_t* region = cache.base + region_index / cache.regions_per_block * cache.block_stride + cells.kv_head * cache.head_stride +
                      region_index % cache.regions_per_block * REGION_BYTES;
    if (cells.is_value) {
      *reinterpret_cast<uint16_t*>(region + value_at(token, d)) = uint16_t(stored.codes);
      *reinterpret_cast<uint16_t*>(region + value_at(token, d + 4)) = uint16_t(stored.codes >> 16);
    } else {
      *reinterpret_cast<uint32_t*>(region + key_at(token, d)) = stored.codes;
    }
    if (me.warp == 0 && me.t == 0) {
      *reinterpret_cast<uint16_t*>(region + metadata_at(cells.is_value ? VALUE_SCALE : KEY_SCALE, token)) = stored.scale;
      *reinterpret_cast<uint16_t*>(region + metadata_at(cells.is_value ? VALUE_OFFSET : KEY_OFFSET, token)) = stored.offset;
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
      if (FINE_KEYS > 0 && !is_value) {
        store_cells<REFIT_KEYS, FINE_KEYS>(y, cells, first, now.slots, cache);
      } else if (is_value ? REFIT_VALUES : REFIT_KEYS) {
        store_cells<true, 0>(y, cells, first, now.slots, cache);
      } else {
        store_cells<false, 0>(y, cells, first, now.slots, cache);
      }
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
