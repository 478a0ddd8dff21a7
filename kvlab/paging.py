"""How vLLM lays a model's cache out: pages, groups and blocks, in plain arithmetic.

vLLM gives every layer pages of ``block_size`` tokens, makes all pages equally large, puts layers of one kind into
groups that share a block table, and hands out blocks (one page for each layer of a group) from one pool. So what a
session costs is a number of blocks, not of bytes. A test holds this module to vLLM's own allocator, block by block; the
rules are those of vLLM 0.29 (v1/core/kv_cache_utils.py, ``unify_kv_cache_spec_page_size`` and
``_get_kv_cache_groups_uniform_page_size``) for layouts in which the pages of one layer lie together.

A scheme is what the full-attention layers store. ``bf16`` and ``fp8`` are vLLM's own formats, of which the whole cache
is; beside every other scheme the sliding-window layers stay FP8, as in `kvlab.serving`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlab.checks import LARGEST, check_choice, check_integer
from kvlab.kernels.layout import REGION_TOKENS
from kvlab.models.kolibri1_config import kolibri1_config
from kvlab.schemes import Scheme, get_scheme

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
PLAIN_BITS = (8, 16)
"""Formats without scales: vLLM's own cache types."""

BLOCK_TOKENS = 16
"""vLLM's block of a plain format: its default, and the smallest that its FlashAttention backend takes."""

STEPS = 2
"""Steps of a session that are not processed yet: asynchronous scheduling runs one while it prepares the next."""

MOST_LAYERS = 10**4
"""More than any model has; each is an entry of a list here."""

STATES = 2
"""States of a linear-attention layer: with prefix caching, vLLM's default, one is kept beside the one in use."""

STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in a linear-attention state."""

OTHER_CACHES = (
    "kv_lora_rank",
    "num_kv_shared_layers",
    "cross_attention_layers",
    "conv_L_cache",
    "is_encoder_decoder",
)
"""Fields of transformers' configs whose models keep something else than keys and values of every layer and head."""


@dataclass(frozen=True)
class Pages:
    """The pages of one layer, on one GPU.

    Attributes
    ----------
    kind
        ``"full_attention"``, ``"sliding_attention"`` or ``"linear_attention"``.
    page_bytes
        Of one block, padding included.
    block_size
        Tokens of a block; of a linear-attention layer None, since its state is of no number of tokens.
    window
        Of a sliding-window layer: tokens, the current one included.
    """

    kind: str
    page_bytes: int
    block_size: int | None = None
    window: int | None = None

    def blocks(self, context: int) -> int:
        """Return the most blocks that a session holds while it decodes up to ``context`` tokens.

        ``n`` tokens in a row touch at most ``ceil((n - 1) / block_size) + 1`` blocks; beside a window those of the
        steps that are not processed yet are held (`kvlab.serving.capacity.decoding_blocks` names vLLM's lines).
        """
        if self.kind == LINEAR:
            return STATES
        blocks = -(-context // self.block_size)
        if self.kind == SLIDING:
            kept = self.window - 1 + STEPS
            blocks = min(blocks, -(-(kept - 1) // self.block_size) + 1)
        return blocks

    def blocks_reserved(self, context: int, max_num_batched_tokens: int) -> int:
        """Return the blocks that vLLM reserves for a session of ``context`` tokens whose prefill is in flight."""
        if self.kind == SLIDING:
            kept = min(self.window - 1 + STEPS * max_num_batched_tokens, context)
            return -(-kept // self.block_size) + 1
        return self.blocks(context)


@dataclass(frozen=True)
class Plan:
    """How vLLM lays a model's cache out.

    Attributes
    ----------
    groups
        The pages of each group, all of one size; a session has a block table for each.
    block_bytes
        One page for each layer of the largest group: what a block takes on one GPU.
    """

    groups: tuple[Pages, ...]
    block_bytes: int

    def blocks(self, context: int) -> int:
        """Return the blocks that one session of ``context`` tokens holds while it decodes."""
        return sum(pages.blocks(context) for pages in self.groups)

    def blocks_reserved(self, context: int, max_num_batched_tokens: int) -> int:
        """Return the blocks by which vLLM counts the concurrency that it logs."""
        return sum(pages.blocks_reserved(context, max_num_batched_tokens) for pages in self.groups)


def plan_cache(scheme: str | Scheme, config: PretrainedConfig | None = None, *, tp: int = 1) -> Plan:
    """Plan the cache of a model whose full-attention layers store ``scheme``.

    Parameters
    ----------
    scheme
        A name or a `Scheme`; one that stores each token on its own.
    config
        A transformers config whose ``layer_types`` are full, sliding-window or linear attention; None is Kolibri-1's.
        Without ``layer_types`` (Llama, Mistral, Mixtral, Phi-3, Qwen3-MoE) all layers are alike, as in vLLM 0.29
        (engine/arg_utils.py, ``create_engine_config``): sliding-window attention where the config has a
        ``sliding_window``, unless its ``use_sliding_window`` is false, and else full attention.
    tp
        GPUs that share the KV heads.

    Returns
    -------
    Plan
        Of one GPU; all are alike.

    Raises
    ------
    TypeError, ValueError
        The scheme cannot be paged, the config does not say what its layers keep, or ``tp`` does not divide its heads.
    """
    config = text_config(config)
    tp = check_tp(tp, config)
    layers = _layer_pages(get_scheme(scheme), config, layer_kinds(config), tp)
    counts = Counter(_unify(layers))
    most, fewest = max(counts.values()), min(counts.values())
    # Padding the smaller kinds to the largest wastes less than a group more, as long as they are nearly as many.
    group_size = most if most < 1.5 * fewest else fewest
    groups, widest = [], 0
    for pages, count in counts.items():
        number = -(-count // group_size)
        groups += [pages] * number
        widest = max(widest, -(-count // number))
    return Plan(tuple(groups), widest * groups[0].page_bytes)


def text_config(config: PretrainedConfig | None) -> PretrainedConfig:
    """Return the config of the language model; None is Kolibri-1's.

    Raises
    ------
    TypeError
        It is no transformers config.
    """
    if config is None:
        return kolibri1_config()
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config is a {type(config).__name__}; accepted: a transformers config")
    return config.get_text_config()


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return what each layer of a language model is, one of `FULL`, `SLIDING` and `LINEAR`.

    Parameters
    ----------
    config
        A language model's; what one without ``layer_types`` means is said in `plan_cache`.

    Raises
    ------
    TypeError, ValueError
        The layers are of another kind, are not as many as ``num_hidden_layers``, or keep something else than keys and
        values by head.
    """
    accepted = "accepted: layers that each keep keys and values by head, all heads alike"
    for name in OTHER_CACHES:
        if getattr(config, name, None):
            raise ValueError(f"config has {name} {getattr(config, name)}; {accepted}")
    # transformers' configs of models whose layers are not alike, as Gemma 4's.
    if differing := getattr(config, "per_layer_attributes", None):
        raise ValueError(f"config has {', '.join(sorted(differing))} by layer; {accepted}")
    layers = _size(config, "num_hidden_layers", maximum=MOST_LAYERS)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        return [SLIDING if has_window else FULL] * layers
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        found = f"of length {len(kinds)}" if isinstance(kinds, list | tuple) else repr(kinds)
        raise ValueError(f"config.layer_types is {found}; accepted: a list of num_hidden_layers = {layers}")
    return [check_choice(kind, "an entry of config.layer_types", (FULL, SLIDING, LINEAR)) for kind in kinds]


def check_tp(tp: int, config: PretrainedConfig, name: str = "tp") -> int:
    """Check that ``tp`` GPUs can share the heads of a language model.

    Parameters
    ----------
    tp
        GPUs.
    config
        Of the language model.
    name
        What errors call ``tp``.

    Raises
    ------
    TypeError, ValueError
        They cannot, or the config has no such heads.
    """
    tp = check_integer(tp, name, minimum=1)
    queries, heads = _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
    if queries % heads:
        raise ValueError(f"config.num_key_value_heads is {heads}; accepted: a divisor of {queries} query heads")
    if queries % tp or (heads % tp and tp % heads):
        raise ValueError(
            f"{name} is {tp}; accepted: a divisor of {queries} query heads that divides {heads} KV heads or is a "
            "multiple"
        )
    return tp


def _size(config: PretrainedConfig, name: str, maximum: int = LARGEST) -> int:
    if getattr(config, name, None) is None:
        found = f"config is a {type(config).__name__} without {name}"
        raise ValueError(f"{found}; accepted: one of a model that keeps keys and values by head")
    return check_integer(getattr(config, name), f"config.{name}", minimum=1, maximum=maximum)


def _layer_pages(scheme: Scheme, config: PretrainedConfig, layers: list[str], tp: int) -> list[Pages]:
    """Return each layer's pages as the layers ask for them, before vLLM makes them equally large."""
    queries, heads = config.num_attention_heads, config.num_key_value_heads
    # With more GPUs than KV heads, vLLM gives each GPU a copy of one.
    heads = max(1, heads // tp)
    head_dim = getattr(config, "head_dim", None)
    head_dim = _size(config, "hidden_size") // queries if head_dim is None else head_dim
    head_dim = check_integer(head_dim, "config.head_dim", minimum=1, maximum=LARGEST)
    if not (scheme.keys.per_token and scheme.values.per_token):
        raise ValueError(
            f"scheme is {scheme.name!r}, whose scales belong to several tokens; accepted: one that stores each token "
            "on its own, as a paged cache is written"
        )
    plain = scheme.bits_per_number(head_dim) in PLAIN_BITS
    window_scheme = scheme if plain else get_scheme("fp8")
    kinds = set(layers)
    pages = {}
    if SLIDING in kinds:
        window = check_integer(config.sliding_window, "config.sliding_window", minimum=1, maximum=LARGEST)
        token = heads * cell_bytes(window_scheme, head_dim)
        pages[SLIDING] = Pages(SLIDING, BLOCK_TOKENS * token, BLOCK_TOKENS, window)
    if FULL in kinds:
        token = heads * cell_bytes(scheme, head_dim)
        block = BLOCK_TOKENS if plain else REGION_TOKENS
        # As Int4Attention.get_kv_cache_spec: vLLM pads smaller pages up, so ours is no smaller than a window's.
        while not plain and SLIDING in pages and block * token < pages[SLIDING].page_bytes:
            block *= 2
        pages[FULL] = Pages(FULL, block * token, block)
    if LINEAR in kinds:
        state = linear_state_bytes(config, tp)
        pages[LINEAR] = Pages(LINEAR, state)
        if FULL in pages:
            # vLLM's platforms lengthen the block until a page holds a state (platforms/interface.py:767).
            page, block = pages[FULL].page_bytes, pages[FULL].block_size
            times = max(1, -(-state // page))
            pages[FULL] = replace(pages[FULL], page_bytes=times * page, block_size=times * block)
            pages[LINEAR] = Pages(LINEAR, times * page)
    return [pages[kind] for kind in layers]


def cell_bytes(scheme: Scheme, head_dim: int) -> int:
    """Bytes of one token and head, key and value together, in whole bytes each."""
    return sum(math.ceil(side.bits_per_number(head_dim) * head_dim / 8) for side in (scheme.keys, scheme.values))


def linear_state_bytes(config: PretrainedConfig, tp: int) -> int:
    """Bytes of one session's state in one gated-delta-net layer, on one of ``tp`` GPUs.

    Parameters
    ----------
    config
        With transformers' fields of such layers (Qwen3-Next, Qwen3.5): ``linear_num_key_heads``,
        ``linear_num_value_heads``, ``linear_key_head_dim``, ``linear_value_head_dim``, ``linear_conv_kernel_dim``.
    tp
        GPUs that share the heads.

    Returns
    -------
    int
        The last ``linear_conv_kernel_dim - 1`` inputs of the convolution in BF16, and a key by value matrix for each
        value head, in ``mamba_ssm_dtype`` where the config names one and else in BF16.

    Raises
    ------
    TypeError, ValueError
        A field is missing or no positive integer, or ``tp`` does not divide the heads.
    """
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    values = {name: getattr(config, f"linear_{name}", None) for name in names}
    if missing := [f"linear_{name}" for name, value in values.items() if value is None]:
        raise ValueError(
            f"config has {LINEAR} layers and no {', '.join(missing)}; accepted: gated delta nets, whose state those "
            "fields define"
        )
    values = {name: _size(config, f"linear_{name}") for name in names}
    key_heads, value_heads, key_dim, value_dim, kernel = values.values()
    if key_heads % tp or value_heads % tp:
        raise ValueError(f"tp is {tp}; accepted: a divisor of {key_heads} key heads and {value_heads} value heads")
    dtype = getattr(config, "mamba_ssm_dtype", None) or "bfloat16"
    matrix_bytes = STATE_DTYPES[check_choice(str(dtype), "config.mamba_ssm_dtype", STATE_DTYPES)]
    convolution = (2 * key_heads * key_dim + value_heads * value_dim) // tp * (kernel - 1)
    return STATE_DTYPES["bfloat16"] * convolution + matrix_bytes * (value_heads // tp) * value_dim * key_dim


def _unify(layers: list[Pages]) -> list[Pages]:
    """Make all pages as large as the largest: by more tokens where they fill it, by padding where they do not."""
    largest = max(pages.page_bytes for pages in layers)

    def unified(pages: Pages) -> Pages:
        times = largest // pages.page_bytes
        if pages.kind == LINEAR or largest % pages.page_bytes:
            return replace(pages, page_bytes=largest)
        return replace(pages, page_bytes=largest, block_size=times * pages.block_size)

    return [unified(pages) for pages in layers]
