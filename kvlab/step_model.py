"""What a decode step takes: the bytes it has to read, at the speed of a copy, and attention as it was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.checks import check_integer
from kvlab.models.kolibri1_config import kolibri1_config
from kvlab.models.kolibri1_layout import head_specs, layer_specs
from kvlab.paging import cell_bytes, check_tp
from kvlab.schemes import Scheme, get_scheme

if TYPE_CHECKING:
    from transformers import Kolibri1Config

STOCK = "fp8"
"""What sliding-window layers store, whatever the full-attention layers do."""

PARTS = ("experts", "projections", "head", "sliding cache", "full cache")
"""What a step reads; the last is what 4 bits make smaller."""

KERNEL = "attention kernel"
"""What the full-attention layers' kernel takes beyond reading its cache at the speed of a copy."""

EXPERT = "mlp.experts."

COLUMNS = ("kernel", "gb_per_s", "lengths", "q_len", "num_heads", "scheme", "context", "batch", "time_us")
"""What is read of the kernels' table."""


def experts_hit(num_experts: int, top_k: int, tokens: int) -> float:
    """Return how many experts of a layer some of ``tokens`` tokens choose, on average, if they choose evenly.

    ``E (1 − (1 − k/E)^tokens)``. Real routing is less even and hits fewer, so this is no lower bound on its own.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def step_bytes(
    scheme: str | Scheme, sessions: int, context: int, *, tp: int = 1, config: Kolibri1Config | None = None
) -> dict[str, float]:
    """Return the bytes that one GPU reads in a decode step of one token a session, by part.

    Parameters
    ----------
    scheme
        Of the full-attention layers' cache.
    sessions
        That decode together.
    context
        Tokens of each session.
    tp
        GPUs that share the model; experts, projections, LM head and KV heads are split, the router is not.
    config
        The model's; None is the released Kolibri-1 with FP8 weights.

    Returns
    -------
    dict
        ``experts`` (those hit and the shared one), ``projections`` (attention's, and the router), ``head`` (LM head),
        ``sliding cache`` and ``full cache``. Activations, norms, embeddings and what the step writes are left out: they
        are below a thousandth.

    Raises
    ------
    TypeError, ValueError
        ``sessions`` or ``context`` is no positive integer, ``tp`` does not fit the model, or the scheme is unknown.
    """
    config = config or kolibri1_config()
    sessions = check_integer(sessions, "sessions", minimum=1)
    context = check_integer(context, "context", minimum=1)
    tp, scheme = check_tp(tp, config), get_scheme(scheme)
    layer = {spec.name: spec.bytes_on_disk for spec in layer_specs(config, 0)}
    expert = sum(size for name, size in layer.items() if name.startswith(f"{EXPERT}0."))
    shared = sum(size for name, size in layer.items() if name.startswith("mlp.shared_experts."))
    attention = sum(size for name, size in layer.items() if "_proj" in name and name.startswith("self_attn."))
    hit = experts_hit(config.num_experts, config.num_experts_per_tok, sessions)
    layers, full = config.num_hidden_layers, config.layer_types.count("full_attention")
    heads = max(1, config.num_key_value_heads // tp)
    window = min(context, config.sliding_window)
    return {
        "experts": layers * (hit * expert + shared) / tp,
        "projections": layers * (attention / tp + layer["mlp.gate.weight"]),
        "head": sum(spec.bytes_on_disk for spec in head_specs(config) if spec.name == "lm_head.weight") / tp,
        "sliding cache": (layers - full) * sessions * window * heads * cell_bytes(get_scheme(STOCK), config.head_dim),
        "full cache": full * sessions * context * heads * cell_bytes(scheme, config.head_dim),
    }


def step_model_table(
    kernels: pd.DataFrame, context: int, *, tp: int = 1, schemes: Iterable[str] = (STOCK, "hadamard-int4")
) -> pd.DataFrame:
    """Return what Kolibri-1's decode steps take at least, by part, and what the measured attention kernels add.

    Everything but attention at the speed of a copy is a bound, which no engine reaches: it leaves out launches, what is
    computed, and communication between GPUs. Whatever a whole step takes beyond the sum is theirs.

    Parameters
    ----------
    kernels
        From ``kvlab bench kernels``: the speed of a copy, and decode attention for one GPU's share of the heads. The
        batches measured there at this context are the numbers of sessions.
    context
        Tokens of each session.
    tp
        GPUs that share the model.
    schemes
        Of the full-attention layers' cache.

    Returns
    -------
    pandas.DataFrame
        ``scheme``, ``sessions``, ``context``, ``tensor_parallel``, ``part`` (`PARTS` and `KERNEL`), ``bytes`` and
        ``ms`` a step and GPU.

    Raises
    ------
    TypeError, ValueError
        ``kernels`` is no such table, was not measured at this context, or not for these heads; a scheme is unknown.
    """
    if not isinstance(kernels, pd.DataFrame):
        raise TypeError(f"kernels is a {type(kernels).__name__}; accepted: the table of kvlab bench kernels")
    if lacking := [name for name in COLUMNS if name not in kernels]:
        raise ValueError(f"kernels lacks {', '.join(lacking)}; accepted: the table of kvlab bench kernels")
    config = kolibri1_config()
    heads = config.num_attention_heads // check_tp(tp, config)
    bandwidth = 1e9 * kernels.loc[kernels["kernel"] == "copy", "gb_per_s"].item()
    rows = kernels[(kernels["kernel"] == "decode") & (kernels["lengths"] == "uniform") & (kernels["q_len"] == 1)]
    schemes = [get_scheme(scheme).name for scheme in schemes]
    rows = rows[(rows["num_heads"] == heads) & rows["scheme"].isin(schemes)]
    found = rows[rows["context"] == context]
    if found.empty:
        accepted = ", ".join(f"{each:.0f}" for each in sorted(rows["context"].unique())) or "none"
        raise ValueError(f"context is {context}; accepted (measured for {heads} query heads): {accepted}")
    full = config.layer_types.count("full_attention")
    table = []
    order = found["scheme"].map(schemes.index)
    for row in found.assign(order=order).sort_values(["batch", "order"]).itertuples():
        name = {"scheme": row.scheme, "sessions": int(row.batch), "context": context, "tensor_parallel": tp}
        parts = step_bytes(row.scheme, int(row.batch), context, tp=tp)
        table += [{**name, "part": part, "bytes": size, "ms": 1e3 * size / bandwidth} for part, size in parts.items()]
        beyond = full * row.time_us / 1e3 - table[-1]["ms"]
        table.append({**name, "part": KERNEL, "bytes": 0.0, "ms": beyond})
    return pd.DataFrame(table)
