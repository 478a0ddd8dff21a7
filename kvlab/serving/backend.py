"""Attention over the 4-bit cache as vLLM schedules it: decodes in front of a batch, prefills behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers, split_decodes_and_prefills
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from kvlab.kernels.decode import MAX_Q_LEN, DecodePlan
from kvlab.kernels.layout import REGION_TOKENS
from kvlab.kernels.prefill import WORKSPACE_TOKENS, prefill_attention
from kvlab.serving.announce import announce
from kvlab.serving.flash import flash_attention_3


@dataclass
class Prefills:
    """Sequences with more new tokens than a decode has.

    Attributes
    ----------
    first_token, first_sequence
        Where they begin in the batch.
    seq_lens
        Tokens of each, the new ones included.
    query_start_loc
        Where the new tokens of each begin among all of theirs, and where the last ones end.
    """

    first_token: int
    first_sequence: int
    seq_lens: list[int]
    query_start_loc: list[int]


@dataclass
class Int4Metadata(AttentionMetadata):
    """A step, for all layers.

    Attributes
    ----------
    decodes
        How many sequences in front are decoded.
    plan
        Of them, up to date; None if there are none.
    prefills
        The others; None if there are none.
    slots
        Where each token is stored, on the device.
    seq_lens, block_table
        Of all sequences, on the device.
    """

    decodes: int
    plan: DecodePlan | None
    prefills: Prefills | None
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class Int4MetadataBuilder(AttentionMetadataBuilder[Int4Metadata]):
    """Plans each step once for all layers."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: FullAttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.reorder_batch_threshold = min(self.reorder_batch_threshold, MAX_Q_LEN)
        self.num_heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        self.plans: dict[int, DecodePlan] = {}
        # Both kinds of batch that are captured in CUDA graphs; others are planned when they occur.
        for q_len in {1, self.reorder_batch_threshold}:
            self._plan(q_len)

    def _plan(self, q_len: int) -> DecodePlan:
        if q_len not in self.plans:
            spec = self.kv_cache_spec
            self.plans[q_len] = DecodePlan(
                num_heads=self.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_size,
                block_size=spec.block_size,
                max_batch=self.vllm_config.scheduler_config.max_num_seqs,
                q_len=q_len,
                device=self.device,
            )
        return self.plans[q_len]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: FBT001, FBT002 (vLLM's signature)
    ) -> Int4Metadata:
        """Plan the decodes on the device and note the lengths of the prefills on the host."""
        batch = common_attn_metadata
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
            batch, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        plan = None
        if decodes:
            # Sequences that pad a captured batch have no tokens, but rows like the others.
            plan = self._plan(decode_tokens // decodes)
            plan.update(batch.seq_lens[:decodes])
        return Int4Metadata(
            decodes,
            plan,
            self._prefills(batch, decodes, decode_tokens) if prefills else None,
            batch.slot_mapping,
            batch.seq_lens,
            batch.block_table_tensor,
        )

    def _prefills(self, batch: CommonAttentionMetadata, decodes: int, decode_tokens: int) -> Prefills:
        # Exact for sequences that are being prefilled; on a CPU the lengths are there themselves.
        lengths = batch.seq_lens if batch.seq_lens.device.type == "cpu" else batch.seq_lens_cpu_upper_bound
        starts = batch.query_start_loc_cpu[decodes:] - decode_tokens
        return Prefills(decode_tokens, decodes, lengths[decodes : batch.num_reqs].tolist(), starts.tolist())


class Int4Impl(AttentionImpl):
    """Attention of one layer; vLLM's arguments, of which a full-attention layer of Kolibri-1 uses few."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "fp8",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *unused: object,
    ):
        extras = (alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name)
        if any(extras) or attn_type != AttentionType.DECODER:
            raise ValueError(
                f"the 4-bit cache is asked for ALiBi, windows, soft caps, sharing or {attn_type} attention; accepted: "
                "plain causal attention"
            )
        self.num_heads, self.head_size, self.num_kv_heads, self.scale = num_heads, head_size, num_kv_heads, scale
        self.kv_cache_dtype = kv_cache_dtype
        self.flash = flash_attention_3()
        self.vllm_config = get_current_vllm_config()
        self.announced_blocks = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Int4Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new tokens and attend to what the cache holds of their sequences.

        ``query`` is the projection itself, ``[tokens, (num_heads + 2 num_kv_heads) head_size]``, with keys and values.
        """
        if attn_metadata is None:  # vLLM measures its memory without a batch
            self._hold_what_prefill_holds(output)
            return output.zero_()
        if self.announced_blocks != len(kv_cache):
            self.announced_blocks = len(kv_cache)
            announce(self.vllm_config, layer, kv_cache)
        step, plan, prefills = attn_metadata, attn_metadata.plan, attn_metadata.prefills
        query = layer.store(query, kv_cache, step.slots)
        tokens = 0
        if plan is not None:
            tokens = step.decodes * plan.q_len
            plan.attend(
                query[:tokens],
                kv_cache,
                step.block_table[: step.decodes],
                step.seq_lens[: step.decodes],
                scale=self.scale,
                out=output[:tokens],
            )
        if prefills is not None:
            rows = slice(prefills.first_token, prefills.first_token + prefills.query_start_loc[-1])
            prefill_attention(
                query[rows],
                kv_cache,
                step.block_table[prefills.first_sequence : prefills.first_sequence + len(prefills.seq_lens)],
                prefills.seq_lens,
                prefills.query_start_loc,
                scale=self.scale,
                flash=self.flash if query.is_cuda else None,
                workspace=self._workspace(),
                out=output[rows],
            )
            tokens = rows.stop
        layer.store.restore(output[:tokens])
        return output

    def _workspace(self) -> torch.Tensor | None:
        """Return what prefill reads the cache into: vLLM's scratch memory, shared by all layers, or None."""
        if not is_workspace_manager_initialized():
            return None
        tokens = min(WORKSPACE_TOKENS, self.vllm_config.model_config.max_model_len)
        shape = (2, tokens, self.num_kv_heads, self.head_size)
        return current_workspace_manager().get_simultaneous((shape, torch.float16))[0]

    def _hold_what_prefill_holds(self, output: torch.Tensor) -> None:
        """Allocate at once what a prefill of these tokens does, so that vLLM leaves room for it beside the cache."""
        self._workspace()
        # The rotated queries, these shrunk, the output over a piece of the context and what it is merged with.
        dtypes = (output.dtype, torch.float16, torch.float16, torch.float32)
        held = [torch.empty_like(output, dtype=dtype) for dtype in dtypes]
        del held


class Int4Backend(AttentionBackend):
    """The 4-bit cache as a backend of vLLM."""

    # The layer writes the cache itself, together with the norm and the rotation.
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    # Of the sliding-window layers beside it: on a CPU they may stay BF16.
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8", "fp8_e4m3", "auto", "bfloat16"]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Whole regions."""
        return [MultipleOf(REGION_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the one layout in which each (block, head) is dense."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM keeps backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Int4Impl]:
        """Return what attends."""
        return Int4Impl

    @staticmethod
    def get_builder_cls() -> type[Int4MetadataBuilder]:
        """Return what plans."""
        return Int4MetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Kolibri-1's."""
        return [128]
