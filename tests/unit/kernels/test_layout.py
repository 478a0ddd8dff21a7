import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import codec
from kvlab.kernels import layout

pytestmark = pytest.mark.unit

FIXED = settings(deadline=None, derandomize=True, max_examples=25)
head_dims = st.sampled_from(layout.HEAD_DIMS)
seeds = st.integers(0, 2**31)


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("head_dim", "cell", "region"), [(64, 72, 2304), (128, 136, 4352), (256, 264, 8448)])
def test_sizes(head_dim, cell, region):
    assert layout.cell_bytes(head_dim) == cell
    assert layout.region_bytes(head_dim) == region


@pytest.mark.parametrize("head_dim", layout.HEAD_DIMS)
def test_addresses_of_every_code_and_number(head_dim):
    half = head_dim // 2
    keys, values = random_bytes(32, half + 4, seed=1), random_bytes(32, half + 4, seed=2)
    region = layout.pack_regions(keys, values).tolist()
    keys, values = keys.tolist(), values.tolist()

    def code(cell, dim):
        return cell[dim % half] >> 4 * (dim >= half) & 15

    for token in range(32):
        j, t, e = token >> 3, token >> 1 & 3, token & 1
        for dim in range(head_dim):
            key_at = (dim >> 6) * 1024 + token * 32 + ((dim & 63) >> 1)
            value_at = 16 * head_dim + j * 4 * head_dim + (dim >> 2 & 7) * half + t * (head_dim // 8)
            value_at += (dim >> 5) * 4 + e * 2 + ((dim & 3) >> 1)
            assert region[key_at] >> 4 * (dim & 1) & 15 == code(keys[token], dim)
            assert region[value_at] >> 4 * (dim & 1) & 15 == code(values[token], dim)
        numbers = (keys[token][half:][:2], keys[token][half:][2:], values[token][half:][:2], values[token][half:][2:])
        for row, number in enumerate(numbers):
            at = 32 * head_dim + 64 * row + 2 * (8 * t + 2 * j + e)
            assert region[at : at + 2] == number


@FIXED
@given(head_dims, st.integers(1, 3), seeds)
def test_packing_is_a_bijection_of_bytes(head_dim, count, seed):
    regions = random_bytes(count, layout.region_bytes(head_dim), seed=seed)
    keys, values = layout.unpack_regions(regions)
    assert keys.shape == values.shape == (count, 32, head_dim // 2 + 4)
    assert torch.equal(layout.pack_regions(keys, values), regions)


@FIXED
@given(head_dims, st.integers(0, 31), seeds)
def test_a_token_owns_whole_bytes(head_dim, token, seed):
    regions = random_bytes(1, layout.region_bytes(head_dim), seed=seed)
    keys, values = layout.unpack_regions(regions)
    keys[:, token] ^= 0xFF
    values[:, token] ^= 0xFF
    changed = layout.pack_regions(keys, values) ^ regions
    # Every bit of its bytes, and no bit of another's.
    assert set(changed.unique().tolist()) == {0, 0xFF}
    assert (changed == 0xFF).sum() == layout.cell_bytes(head_dim)


@FIXED
@given(head_dims, st.sampled_from([32, 64, 96, 160]), st.integers(1, 4), st.integers(0, 40), st.booleans(), seeds)
def test_cells_come_back_and_others_stay(head_dim, block_size, num_kv_heads, tokens, padded, seed):
    num_blocks, width = 3, head_dim + 8
    size = num_kv_heads * block_size * width
    memory = random_bytes(num_blocks, size + 16 * padded, seed=seed)
    cache = memory[:, :size].unflatten(1, (num_kv_heads, block_size, width))
    before, memory_before = cache.clone(), memory.clone()
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    slots[::3] = -1
    keys, values = (random_bytes(tokens, num_kv_heads, head_dim // 2 + 4, seed=seed + n) for n in (1, 2))
    layout.write_cells(cache, slots, keys, values)

    blocks = torch.arange(num_blocks, dtype=torch.int32)
    expected = layout.read_cells(before, blocks, num_blocks * block_size)
    kept = slots >= 0
    for cells, written, now in zip(
        expected, (keys, values), layout.read_cells(cache, blocks, num_blocks * block_size), strict=True
    ):
        cells = cells.clone()
        cells[:, slots[kept]] = written[kept].transpose(0, 1)
        assert torch.equal(now, cells)
    assert torch.equal(memory[:, size:], memory_before[:, size:])


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 128])
def test_reading_follows_the_block_table(tokens):
    cache = random_bytes(4, 2, 64, 72)
    keys, _ = layout.read_cells(cache, torch.tensor([3, 1], dtype=torch.int32), tokens)
    third, _ = layout.read_cells(cache, torch.tensor([3]), 64)
    first, _ = layout.read_cells(cache, torch.tensor([1]), 64)
    assert torch.equal(keys, torch.cat([third, first], 1)[:, :tokens])


def test_what_the_codec_wrote_decodes_from_the_cache():
    x = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(0))
    cache = random_bytes(2, 2, 32, 136)
    layout.write_cells(cache, torch.tensor([40, 7, 63]), codec.encode(x), codec.encode(-x))
    keys, values = layout.read_cells(cache, torch.tensor([0, 1]), 64)
    for cells, expected in ((keys, x), (values, -x)):
        decoded = codec.decode(cells[:, [40, 7, 63]].contiguous())
        assert torch.equal(decoded, codec.decode(codec.encode(expected)).transpose(0, 1))


def test_regions_are_a_view():
    cache = torch.zeros(3, 2, 64, 136, dtype=torch.uint8)
    regions = layout.region_view(cache)
    assert regions.shape == (3, 2, 2, 4352)
    regions[1, 1, 1, -1] = 7
    assert cache[1, 1, 63, 135] == 7


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        ([1], TypeError, "cache is a list; accepted: a torch.uint8 tensor"),
        (torch.zeros(1, 1, 32, 136), TypeError, "cache is a torch.float32; accepted"),
        (torch.zeros(1, 32, 136).byte(), ValueError, r"cache has shape \[1, 32, 136\]; accepted: \[num_blocks"),
        (torch.zeros(1, 1, 32, 128).byte(), ValueError, r"cache has shape .*head_dim 64, 128 or 256"),
        (torch.zeros(1, 1, 48, 136).byte(), ValueError, "cache has block_size 48; accepted: a multiple of 32 tokens"),
        (torch.zeros(1, 1, 0, 136).byte(), ValueError, "cache has block_size 0; accepted"),
        (
            torch.zeros(1, 32, 2, 136).byte().transpose(1, 2),
            ValueError,
            r"cache has strides .*each \(block, head\) dense",
        ),
        (torch.zeros(1, 1, 32, 272).byte()[..., ::2], ValueError, r"cache has strides .*dense"),
        (
            torch.zeros(2 * 4360).byte().as_strided((2, 1, 32, 136), (4360, 4352, 136, 1)),
            ValueError,
            r"cache has strides .*multiples of 16 bytes",
        ),
    ],
    ids=["list", "float", "3d", "width", "block-48", "block-0", "transposed", "strided", "unaligned"],
)
def test_other_caches_are_refused_in_one_line(cache, error, message):
    with pytest.raises(error, match=message) as caught:
        layout.region_view(cache)
    assert "\n" not in str(caught.value)
