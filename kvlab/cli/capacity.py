"""How many sessions fit."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvlab.cli.app import JsonOption, app
from kvlab.defaults import MAX_NUM_BATCHED_TOKENS


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
    ] = MAX_NUM_BATCHED_TOKENS,
    as_json: JsonOption = False,
) -> None:
    """Count the sessions that a cache holds while they decode, as vLLM 0.29 allocates its blocks.

    A scheme is what the full-attention layers store; beside all but bf16 and fp8 the sliding-window layers stay FP8.
    sessions_admitted is the concurrency that vLLM logs, which keeps room for a prefill in every sliding-window layer.
    """
    from kvlab import capacity, paging
    from kvlab.models.model_config import read_model_config

    if model is not None and gpus is not None and weights_gb is None:
        raise ValueError(f"weights-gb is missing with model {model!r}; accepted: its weights, in 1e9 bytes")
    config = None if model is None else read_model_config(model)
    if cache_gb is not None:
        for name, value in {
            "gpus": gpus,
            "gpu-memory-gb": gpu_memory_gb,
            "gpu-memory-utilization": gpu_memory_utilization,
            "weights-gb": weights_gb,
        }.items():
            if value is not None:
                raise ValueError(f"{name} is {value} beside cache-gb; accepted: cache-gb alone, or gpus without it")
        tp, replicas = 1 if tp is None else tp, 1
        memory = capacity.to_bytes(cache_gb, "cache-gb", unit=capacity.GB)
    elif gpus is None or gpu_memory_gb is None:
        raise ValueError("memory is not given; accepted: --cache-gb, or --gpus with --gpu-memory-gb")
    else:
        replicas = capacity.count_replicas(gpus, gpus if tp is None else tp)
        if tp is None:
            tp = paging.check_tp(gpus, paging.text_config(config), "gpus (and tp, by default)")
        weights = capacity.kolibri1_weight_bytes()
        if weights_gb is not None:
            weights = capacity.to_bytes(weights_gb, "weights-gb", unit=capacity.GB)
        share = capacity.GPU_MEMORY_UTILIZATION
        if gpu_memory_utilization is not None:
            share = capacity.check_utilization(gpu_memory_utilization, "gpu-memory-utilization")
        memory = capacity.cache_bytes_per_gpu(
            capacity.to_bytes(gpu_memory_gb, "gpu-memory-gb", unit=capacity.GB), weights, tp=tp, utilization=share
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
        number = tp * replicas
        typer.echo(f"{memory / capacity.GB:.4g} GB of cache on each of {number} GPU{'s'[: number != 1]}, TP {tp}\n")
        typer.echo(capacity.as_text(table))
