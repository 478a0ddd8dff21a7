// Decode attention over the paged 4-bit cache, for Hopper. The folder's README explains the design.
//
// A warp is an independent worker with its own ring of regions in shared memory and its own online softmax; the warps of a thread
// block meet once per segment.
#include "schedule.cuh"
#include "output.cuh"
#include "query.cuh"
#include "softmax.cuh"

template <bool VALUE>
struct Constant {
  static constexpr bool value = VALUE;
};

struct Tables {
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
};

// The regions of a segment that one warp works through, and its copies of them into shared memory.
struct Stream {
  const uint8_t* head;   // of the segment's KV head, in block 0
  const int* blocks;     // of the sequence
  int first, count;      // regions of the sequence
  int now, next;         // block of region first + 32 k + lane, for this window of 32 and the next

  __device__ __forceinline__ int block_of(int i) const { return i < count ? blocks[(first + i) / BLOCK_REGIONS] : 0; }
  __device__ __forceinline__ void open(int lane) {
    now = block_of(lane);
    next = block_of(32 + lane);
  }
  __device__ __forceinline__ void advance(int lane, int i) {
    now = next;
    next = block_of(i + 32 + lane);
  }
  // Called by the lane that holds the block.
  __device__ __forceinline__ void copy(const Cache& cache, int i, uint32_t to, uint32_t barrier) const {
    copy_once(to, head + now * cache.block_stride + (first + i) % BLOCK_REGIONS * REGION_BYTES, REGION_BYTES, barrier);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
decode(const uint16_t* q, Cache cache, Tables tables, const Share* shares, float* partial, float2* partial_softmax, Output output,
       int num_heads, int num_kv_heads, float scale_log2) {
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* rings = shared;                                                          // [WARPS][STAGES] regions
  float* staged = reinterpret_cast<float*>(rings + WARPS * STAGES * REGION_BYTES);  // [WARPS][BLOCK_ROWS][HEAD_DIM]
  uint8_t* query_memory = reinterpret_cast<uint8_t*>(staged + WARPS * BLOCK_ROWS * HEAD_DIM);
  float2* softmax = reinterpret_cast<float2*>(query_memory + QUERY_BYTES);          // [WARPS][TILE_ROWS]
  uint64_t* barriers = reinterpret_cast<uint64_t*>(softmax + WARPS * TILE_ROWS);    // [WARPS][STAGES]
  const int lane = lane_of_warp(), warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const uint32_t ring = shared_address(rings) + warp * STAGES * REGION_BYTES;
  const uint32_t barrier = shared_address(barriers) + warp * STAGES * 8;
  let_next_kernel_start();
  if (lane == 0) {
    for (int stage = 0; stage < STAGES; stage++) barrier_init(barrier + 8 * stage, 1);
    barrier_inits_done();
  }
  __syncwarp();

  const int row_block = blockIdx.x % ROW_BLOCKS, first_row = row_block * BLOCK_ROWS, share_index = blockIdx.x / ROW_BLOCKS;
  Share share = shares[share_index];
  if (share.regions <= 0) return;
  int stage = 0;
  uint32_t phase = 0;
  int kv_head, regions, count;  // of the segment: all its regions, and how many are this block's
  Stream stream;
  QueryRows query_rows;
  auto open_segment = [&] {
    regions = regions_of(share.seq_len);
    kv_head = share.offset / regions;
    const int start = share.offset - kv_head * regions;
    count = min(regions - start, share.regions);
    const int mine = count * warp / WARPS;
    stream.head = cache.base + kv_head * cache.head_stride;
    stream.blocks = tables.block_table + share.sequence * tables.block_table_stride;
    stream.first = start + mine;
    stream.count = count * (warp + 1) / WARPS - mine;
    stream.open(lane);
    if (warp == 0) query_rows.load(q, share.sequence, kv_head, first_row, num_heads);
  };
  auto fill_ring = [&](int from, int to) {
    if (lane >= from && lane < min(to, stream.count)) {
      const int slot = (stage + lane) % STAGES;
      stream.copy(cache, lane, ring + slot * REGION_BYTES, barrier + 8 * slot);
    }
  };
  open_segment();
  // One region per warp first, the others once the query is ready: asked for together, none would arrive early.
  fill_ring(0, 1);
  while (true) {
    const int sequence = share.sequence, head = kv_head, segment = sequence * num_kv_heads + head;
    const bool large_query = __syncthreads_or(warp == 0 && query_rows.prepare(query_memory, scale_log2));
    fill_ring(1, STAGES);
    uint4 query[QUERY_WORDS];
#pragma unroll
    for (int i = 0; i < QUERY_WORDS; i++) query[i] = load_shared_16(shared_address(query_memory) + i * 512 + lane * 16);
    State state;
    state.clear();
    const int mine = stream.count, sees_all = share.seq_len - Q_LEN + 1;
    auto work = [&](auto large) {
      for (int i = 0; i < mine; i++) {
        barrier_wait(barrier + 8 * stage, phase);
        const uint32_t region = ring + stage * REGION_BYTES;
        const int visible = min(sees_all - (stream.first + i) * REGION_TOKENS, REGION_TOKENS);
        add_region<decltype(large)::value>(state, region, query, first_row, visible, i == 0, lane);
        __syncwarp();
        const int ahead = i + STAGES;
        if (ahead < mine && lane == ahead % 32) stream.copy(cache, ahead, region, barrier + 8 * stage);
        if (ahead % 32 == 31) stream.advance(lane, ahead + 1);
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
    };
    if (large_query) work(Constant<true>{}); else work(Constant<false>{});

    // The next segment's blocks are looked up and its first copies started before this one's warps meet.
    const bool whole = count == regions;
    share.regions -= count;
    share.offset += count;
    const bool more = share.regions > 0;
    if (more) {
      if (share.offset == regions * num_kv_heads) {
        share.offset = 0;
        do share.seq_len = tables.seq_lens[++share.sequence];
        while (share.seq_len == 0);
      }
      open_segment();
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (t == half)
        softmax[warp * TILE_ROWS + g + 8 * half] = {mine ? -state.reference[half] : NO_SCORE, state.rows[2 * half + 1]};
    __syncthreads();
    const float unshrink = 1 / from_half_pair(state.shrink).x;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = g + 8 * half;
      if (row >= BLOCK_ROWS) continue;
      float top = NO_SCORE;
#pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, softmax[w * TILE_ROWS + row].x);
      const float factor = mine ? exp2_fast(-state.reference[half] - top) : 0, offset = state.rows[2 * half];
      const float low = state.correction[2 * half], high = state.correction[2 * half + 1];
#pragma unroll
      for (int i = 0; i < COLUMNS / 4; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float(*column)[4] = &state.columns[4 * i];
          const int at = 2 * half + c;
          const float4 x = {((column[0][at] - low) * unshrink + offset) * factor,
                            ((column[1][at] - high) * (unshrink / 16) + offset) * factor,
                            ((column[2][at] - low) * unshrink + offset) * factor,
                            ((column[3][at] - high) * (unshrink / 16) + offset) * factor};
          // Odd rows swap halves of 32 bytes: eight lanes that store together then meet no bank twice.
          const int dim = 32 * i + 8 * t + 4 * (c ^ (g & 1));
          *reinterpret_cast<float4*>(staged + (warp * BLOCK_ROWS + row) * HEAD_DIM + dim) = x;
        }
    }
    if (more) fill_ring(0, 1);
    __syncthreads();
    for (int e = threadIdx.x; e < BLOCK_ROWS * HEAD_DIM / 4; e += WARPS * 32) {
      const int row = e / (HEAD_DIM / 4), dim4 = e % (HEAD_DIM / 4), query_row = first_row + row;
      if (query_row >= ROWS) break;
      float4 sum = {0, 0, 0, 0};
      float2 merged = {NO_SCORE, 0};
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        add_scaled(sum, reinterpret_cast<const float4*>(staged)[(w * BLOCK_ROWS + row) * (HEAD_DIM / 4) + (dim4 ^ (row & 1))], 1);
        merged = merge(merged, softmax[w * TILE_ROWS + row]);
      }
      if (whole) {
        const int64_t token = int64_t(sequence) * Q_LEN + query_row / GROUP;
        output.write(token * num_heads + head * GROUP + query_row % GROUP, head, dim4, sum, merged);
      } else {
        const int64_t at = partial_row(share_index, segment, row_block, row);
        reinterpret_cast<float4*>(partial)[at * (HEAD_DIM / 4) + dim4] = sum;
        if (dim4 == 0) partial_softmax[at] = merged;
      }
    }
    if (!more) break;
  }
}
