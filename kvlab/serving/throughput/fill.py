"""A KV connector that fills sessions without prefill, with pages that the engine itself has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA
from vllm.v1.kv_cache_interface import group_kernel_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

NULL_BLOCK = 0
"""Where the block tables of sliding windows point for what lies before the window: never written."""
SEED = 0
"""Of the choice of pages."""

Pages = tuple[list[int], ...]
"""Block numbers of one session, per cache group."""


@dataclass
class FillMetadata(KVConnectorMetadata):
    """What the scheduler asks of the workers in a step.

    Attributes
    ----------
    template
        Pages to keep a copy of once the step has written them.
    fills
        Per session, pages to fill before the step reads them.
    """

    template: Pages | None = None
    fills: list[Pages] = field(default_factory=list)


class PageTemplate:
    """Copies of whole pages of every layer, and their distribution over other pages.

    A page is copied as bytes, so that it is valid in whatever format and layout its layer stores.

    Parameters
    ----------
    caches
        Layer → cache, ``[blocks, …]``, as vLLM registers them; it may split a block in several of a kernel's.
    kv_cache_config
        vLLM's: the number of blocks, and the layers of each group.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig):
        self.groups: list[dict[str, torch.Tensor]] = [
            {
                name: group_kernel_blocks(caches[name], kv_cache_config.num_blocks).view(torch.uint8)
                for name in group.layer_names
            }
            for group in kv_cache_config.kv_cache_groups
        ]
        self.pages: list[dict[str, torch.Tensor]] = []
        # On the host, so that every rank draws the same.
        self.generator = torch.Generator().manual_seed(SEED)

    def keep(self, blocks: Pages) -> None:
        """Copy the pages of one session, to fill others from."""
        self.pages = [
            {name: cache[torch.tensor(numbers, device=cache.device)] for name, cache in group.items()}
            for group, numbers in zip(self.groups, blocks, strict=True)
        ]

    def fill(self, blocks: Pages) -> None:
        """Write kept pages, chosen at random for each layer, to these."""
        for group, pages, numbers in zip(self.groups, self.pages, blocks, strict=True):
            for name, cache in group.items():
                chosen = torch.randint(len(pages[name]), (len(numbers),), generator=self.generator)
                cache[torch.tensor(numbers, device=cache.device)] = pages[name][chosen.to(cache.device)]


class FillConnector(KVConnectorBase_V1, SupportsHMA):
    """Takes the first request's pages as the template, and lets every later one begin with all but its last token.

    The first request has to be prefilled in one step, so that all its pages exist at once, those of sliding windows
    too. Nothing may be found in a prefix cache, which has to be off.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        self.groups = kv_cache_config.kv_cache_groups
        self.kv_cache_config = kv_cache_config
        self.has_template = False
        self.pending = FillMetadata()
        self.template: PageTemplate | None = None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens are filled (a session that was preempted is filled again), and that it is at once."""
        if not self.has_template:
            return 0, False
        return max(request.num_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the pages that vLLM has given to a request."""
        numbers = blocks.get_block_ids()
        if not self.has_template:
            self.has_template = True
            # Where it does not fill one, the page that it begins: no session is longer then.
            whole = [
                ids[: max(request.num_tokens // group.kv_cache_spec.block_size, 1)]
                for ids, group in zip(numbers, self.groups, strict=True)
            ]
            self.pending.template = _real(whole)
        elif num_external_tokens:
            touched = [
                ids[: -(-num_external_tokens // group.kv_cache_spec.block_size)]
                for ids, group in zip(numbers, self.groups, strict=True)
            ]
            self.pending.fills.append(_real(touched))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FillMetadata:
        """Hand over what was noted."""
        metadata, self.pending = self.pending, FillMetadata()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Let the blocks go at once."""
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Let the blocks go at once."""
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the worker's caches."""
        self.template = PageTemplate(kv_caches, self.kv_cache_config)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Fill pages; vLLM has zeroed them before, and runs the model after."""
        for blocks in self._get_connector_metadata().fills:
            self.template.fill(blocks)

    def wait_for_save(self) -> None:
        """Keep the template's pages, now that the model has written them."""
        blocks = self._get_connector_metadata().template
        if blocks is not None:
            self.template.keep(blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return: everything is loaded by then."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        """Save nothing per layer."""


def _real(blocks: list[list[int]]) -> Pages:
    return tuple([number for number in numbers if number != NULL_BLOCK] for numbers in blocks)
