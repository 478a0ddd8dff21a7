"""Loss of a model that reads its own stored cache."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from kvlab.applying import apply
from kvlab.models.attention import attention_layers
from kvlab.schemes import Scheme, get_schemes

EXACT = "exact"
"""The name of the row of the model's own cache, nothing stored."""


def token_losses(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Negative log-probability of each next token, in nats.

    Parameters
    ----------
    model
        A causal language model of transformers.
    input_ids
        ``[batch, tokens]`` int64, at least two tokens.

    Returns
    -------
    torch.Tensor
        ``[batch, tokens − 1]`` float32.

    Raises
    ------
    TypeError
        ``input_ids`` is no integer tensor.
    ValueError
        There are fewer than two tokens.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        kind = input_ids.dtype if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids is a {kind}; accepted: an int64 torch.Tensor [batch, tokens]")
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; accepted: [batch, tokens], tokens ≥ 2")
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.mT, input_ids[:, 1:], reduction="none")


def loss_table(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    schemes: Iterable[str | Scheme],
    *,
    progress: bool = False,
) -> pd.DataFrame:
    """Loss of a model on one text when its full-attention layers store their cache under each scheme.

    Parameters
    ----------
    model
        A causal language model that `kvlab.apply` supports.
    input_ids
        ``[batch, tokens]`` int64.
    schemes
        Names or `Scheme` objects; the exact cache is measured besides.
    progress
        Show a progress bar over schemes on standard error.

    Returns
    -------
    pandas.DataFrame
        One row per scheme, the first being ``exact`` (the model's own cache, nothing stored): ``scheme``,
        ``bits`` (per number), ``tokens`` (of the text), ``loss`` (nats per token), ``increase`` (over exact,
        paired token by token) and ``standard_error`` of the increase over tokens.

    Raises
    ------
    TypeError, ValueError
        An unknown scheme, an unsupported model or too few tokens.
    """
    schemes = get_schemes(schemes)
    head_dim = next(iter(attention_layers(model).values())).head_dim
    exact = token_losses(model, input_ids)
    bits = torch.finfo(model.dtype).bits
    rows = [(EXACT, bits, input_ids.numel(), exact.mean().item(), 0.0, 0.0)]
    for scheme in tqdm(schemes, desc="loss", unit="scheme", disable=not progress):
        with apply(model, scheme):
            losses = token_losses(model, input_ids)
        difference = (losses - exact).double().flatten()
        error = (difference.std() / len(difference) ** 0.5).item()
        means = (losses.mean().item(), difference.mean().item(), error)
        rows.append((scheme.name, scheme.bits_per_number(head_dim), input_ids.numel(), *means))
    return pd.DataFrame(rows, columns=["scheme", "bits", "tokens", "loss", "increase", "standard_error"])
