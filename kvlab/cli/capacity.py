"""How many sessions fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.app import JsonOption, app


@app.command(name="capacity")
def capacity_command(
    context: Annotated[list[int], typer.Option(help="Tokens of a session; several may follow.")],
    more: Annotated[list[int] | None, typer.Argument(metavar="[CONTEXT]...", help="Further contexts.")] = None,
    cache_gb: Annotated[float | None, typer.Option(help="Memory of the cache on each GPU, in 1e9 bytes.")] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Instead: how many GPUs; --tp of them share a model, the others hold copies.")
    ] = None,
    gpu_memory_gb: Annotated[
        float | None,
        typer.Option(help="With --gpus: memory of one, in 1e9 bytes. Weights are taken off, activations are not."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="With --gpus: the part of its memory that vLLM uses. Default: vLLM's own, 0.92."),
    ] = None,
    weights_gb: Annotated[
        float | None,
        typer.Option(
            help="With --gpus: the model's weights, in 1e9 bytes, which --tp GPUs share. Default: 78.8, Kolibri-1's "
            "released FP8 weights; needed for another model."
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="GPUs that share a session. Default: --gpus, or else 1.")] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="What full-attention layers store; may be repeated. Default: fp8 (stock), hadamard-int4."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder with a config.json, or a hub name. Default: Kolibri-1.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="vLLM's; only sessions_admitted depends on it. The default is vLLM's on large GPUs.")
    ] = 8192,
    as_json: JsonOption = False,
) -> None:
    """Count the sessions that a cache holds while they decode, as vLLM 0.29 allocates its blocks.

    A scheme is what the full-attention layers store; beside all but bf16 and fp8 the sliding-window layers stay FP8.
    sessions_admitted is the concurrency that vLLM logs, which keeps room for a prefill in every sliding-window layer.
    """
    from kvlab import capacity

    if model is not None and gpus is not None and weights_gb is None:
        raise ValueError(f"weights-gb is missing with model {model!r}; accepted: its weights, in 1e9 bytes")
    config = _read_config(model)
    tp = (1 if gpus is None else gpus) if tp is None else tp
    if cache_gb is not None:
        for name, value in {
            "gpus": gpus,
            "gpu-memory-gb": gpu_memory_gb,
            "gpu-memory-utilization": gpu_memory_utilization,
            "weights-gb": weights_gb,
        }.items():
            if value is not None:
                raise ValueError(f"{name} is {value} beside cache-gb; accepted: cache-gb alone, or gpus without it")
        memory, replicas = cache_gb * capacity.GB, 1
    elif gpus is None or gpu_memory_gb is None:
        raise ValueError("memory is not given; accepted: --cache-gb, or --gpus with --gpu-memory-gb")
    else:
        replicas = capacity.count_replicas(gpus, tp)
        memory = capacity.cache_bytes_per_gpu(
            gpu_memory_gb * capacity.GB,
            capacity.kolibri1_weight_bytes() if weights_gb is None else weights_gb * capacity.GB,
            tp=tp,
            utilization=(capacity.GPU_MEMORY_UTILIZATION if gpu_memory_utilization is None else gpu_memory_utilization),
        )
    contexts = [*context, *(more or [])]
    table = capacity.capacity_table(
        contexts,
        memory,
        scheme or capacity.SCHEMES,
        config,
        tp=tp,
        replicas=replicas,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    if beyond := capacity.beyond_model(contexts, config):
        typer.echo(f"kvlab: note: {beyond}", err=True)
    if as_json:
        typer.echo(json.dumps(table.to_dict("records")))
    else:
        typer.echo(f"{memory / capacity.GB:.1f} GB of cache on each of {tp * replicas} GPU(s), TP {tp}\n")
        typer.echo(capacity.as_text(table))


def _read_config(model: str | None) -> object | None:
    """Return a transformers config, or None for Kolibri-1's."""
    if model is None:
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        found = "no model type that transformers knows" if Path(model).is_dir() else str(error).splitlines()[0]
        raise ValueError(
            f"model is {model!r} ({found}); accepted: a folder with a transformers config.json, or a hub name"
        ) from error
