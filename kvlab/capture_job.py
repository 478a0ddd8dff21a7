"""Capturing a model's attention to disk: streamed layer by layer for Kolibri-1, by a plain forward for others."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

import kvlab
from kvlab import provenance
from kvlab.capture_files import CaptureWriter, Manifest, StoredCapture, open_capture
from kvlab.models.attention import attention_layers, select_layers
from kvlab.models.checkpoint import open_checkpoint
from kvlab.models.default import MODEL_NAME, default_folder, text_hash
from kvlab.models.kolibri1_config import kolibri1_config, read_config
from kvlab.models.random_weights import RandomWeights
from kvlab.models.streaming import CHUNK_TOKENS, StreamedModel
from kvlab.models.weight_source import WeightSource
from kvlab.recording import LayerRecorder, capture

GIB = 2**30


def capture_to_disk(
    model: str,
    text: str,
    out: Path,
    *,
    tokens: int,
    first_token: int = 0,
    num_queries: int = 256,
    device: str | None = None,
    progress: bool = False,
) -> StoredCapture:
    """Capture the full-attention layers of a model on a text, to a folder; an interrupted capture is continued.

    Parameters
    ----------
    model
        A folder, a hub name or the embedded default's name. Kolibri-1 is streamed layer by layer; any other supported
        decoder is loaded.
    text
        At least ``first_token + tokens`` tokens of the model's own tokenizer.
    out
        Folder of the capture.
    tokens, first_token
        How many tokens, from which on.
    num_queries
        Query positions to sample.
    device
        ``cuda`` where there is one, else ``cpu``.
    progress
        Show a progress bar over layers on standard error.

    Returns
    -------
    StoredCapture
        The finished capture.

    Raises
    ------
    ValueError
        A model, text or folder that is not accepted; not enough room on the disk or the device.
    """
    device = choose_device(device)
    if model == MODEL_NAME:
        model = str(default_folder())
    if _raw_config(model).get("model_type") == "kolibri1":
        source = open_checkpoint(model)
        ids = _token_range(_tokenizer(model), text, first_token, tokens)
        manifest = streamed_manifest(source, text_hash(text), first_token, tokens, num_queries)
        return stream_to_disk(source, ids, CaptureWriter(out, manifest), device=device, progress=progress)
    ids = _token_range(_tokenizer(model), text, first_token, tokens)
    return forward_to_disk(_whole_model(model).to(device), ids, text_hash(text), first_token, num_queries, out)


def _raw_config(model: str) -> dict[str, object]:
    try:
        return PreTrainedConfig.get_config_dict(model)[0]
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model is {model!r} ({reason}); accepted: a model folder or a hub name") from None


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:
        # Whatever a broken file raises, in one of transformers' many tokenizer classes.
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model is {model!r}, without a tokenizer ({reason}); accepted: one beside its weights"
        ) from None


def _whole_model(model: str) -> nn.Module:
    """Load a model as transformers does, but refuse one of which weights are missing: they would be random."""
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(model, dtype="auto", output_loading_info=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model is {model!r}, which cannot be loaded ({reason}); accepted: a whole checkpoint"
        ) from None
    lacking = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    if lacking:
        raise ValueError(
            f"model is {model!r}, of which {len(lacking)} weights are missing or misshapen ({lacking[0]}, …); "
            "accepted: a whole checkpoint"
        )
    return loaded.eval()


def _token_range(tokenizer: object, text: str, first_token: int, tokens: int) -> torch.Tensor:
    if first_token < 0:
        raise ValueError(f"first_token is {first_token}; accepted: 0 or more")
    return kvlab.tokenize(tokenizer, text, first_token + tokens)[:, first_token:]


def choose_device(device: str | None) -> torch.device:
    """Return the device asked for, or CUDA where there is one, else the CPU.

    Raises
    ------
    ValueError
        There is no such device.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # Read back: a device without memory has nothing to read.
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError):
        raise ValueError(f"device is {device!r}; accepted: cpu, or cuda where torch finds a GPU") from None
    return chosen


def architecture_hash(config: PreTrainedConfig) -> str:
    """SHA-256 over what a model's config says of its architecture, in canonical JSON."""
    passing = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config", "architectures")
    values = {name: value for name, value in config.to_dict().items() if name not in passing}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _check_context(tokens: int, config: PreTrainedConfig) -> None:
    if tokens > config.max_position_embeddings:
        raise ValueError(f"tokens is {tokens}; accepted: at most the model's {config.max_position_embeddings}")


def streamed_manifest(source: WeightSource, text: str, first_token: int, tokens: int, num_queries: int) -> Manifest:
    """Describe a streamed capture of ``source``; ``text`` is the text's hash."""
    config = source.config
    full = tuple(index for index, kind in enumerate(config.layer_types) if kind == "full_attention")
    _check_context(tokens, config)
    return Manifest(
        model=source.name,
        revision=source.revision,
        model_type=config.model_type,
        config_hash=source.config_hash,
        text_hash=text,
        first_token=first_token,
        tokens=tokens,
        num_queries=num_queries,
        layers=full,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        **provenance.stamp(),
    )


def stream_to_disk(
    source: WeightSource,
    input_ids: torch.Tensor,
    writer: CaptureWriter,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: bool = False,
) -> StoredCapture:
    """Stream a checkpoint over ``input_ids`` [1, tokens] and write its full-attention layers.

    Computed and stored in ``dtype``; None is BF16, on the CPU float32: most have no instructions for BF16 products,
    which take ten times as long there.

    Raises
    ------
    ValueError
        The device's memory does not hold one layer and its working set.
    """
    wanted = writer.missing()
    if not wanted:
        return writer.finish()
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    model = StreamedModel(source, device, dtype, chunk_tokens)
    home = hidden_home(model, writer.manifest)
    kept = writer.load_hidden()
    hidden, done = (kept[0].to(home, dtype), kept[1]) if kept else (model.embed(input_ids, home), -1)
    recorders: dict[int, LayerRecorder] = {}

    def record(index: int, layer: nn.Module) -> contextlib.AbstractContextManager[None]:
        if index not in wanted:
            return contextlib.nullcontext()
        if index == last:
            model.end_before_attention(layer)
        (described,) = attention_layers(layer).values()
        recorders[index] = LayerRecorder(described, writer.manifest.num_queries, writer.manifest.tokens)
        return recorders[index].recording()

    last = writer.manifest.layers[-1]
    layers = model.run(hidden, first_layer=done + 1, hook=record)
    bar = tqdm(total=last + 1, initial=done + 1, desc="capturing", unit="layer", disable=not progress)
    with bar, contextlib.closing(layers):
        for index in layers:
            bar.update()
            if index in recorders:
                writer.write(recorders.pop(index).result())
            if index == last:
                break
            if index in writer.manifest.layers:
                writer.save_hidden(hidden, index)
    stored = writer.finish()
    stored.times = model.times
    return stored


def dry_run(
    model: str,
    seed: int,
    out: Path,
    *,
    tokens: int,
    num_queries: int = 256,
    device: str | None = None,
    progress: bool = False,
) -> StoredCapture:
    """Capture a model of Kolibri-1's shape with random weights on random tokens, to see what it takes here.

    Parameters
    ----------
    model
        A folder with a Kolibri-1 ``config.json``; any other name means the released shape.
    seed
        Of the weights and the tokens.
    out, tokens, num_queries, device, progress
        As in `capture_to_disk`.

    Returns
    -------
    StoredCapture
        Of no use as a finding: the weights are random.
    """
    device = choose_device(device)
    config = read_config(Path(model)) if Path(model).is_dir() else kolibri1_config()
    source = RandomWeights(config, seed)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))
    manifest = streamed_manifest(source, f"random tokens from seed {seed}", 0, tokens, num_queries)
    return stream_to_disk(source, ids, CaptureWriter(out, manifest), device=device, progress=progress)


def report(stored: StoredCapture) -> dict[str, object]:
    """Return what a capture took, as JSON: its manifest, seconds per layer and, on CUDA, the peak of memory."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    times = [dataclasses.asdict(layer) for layer in stored.times]
    return {"manifest": dataclasses.asdict(stored.manifest), "layers": times, "peak_device_bytes": peak}


def hidden_home(model: StreamedModel, manifest: Manifest) -> torch.device:
    """Choose where the hidden states of the whole context live: on the device if they fit, else in host memory.

    Raises
    ------
    ValueError
        Not even one layer and its working set fit on the device; the message says what would.
    """
    if model.device.type != "cuda":
        return torch.device("cpu")
    config = model.config
    weights = config.num_experts * 3 * config.moe_intermediate_size * config.hidden_size
    keys = 2 * 2 * manifest.num_kv_heads * manifest.head_dim * manifest.tokens
    wide = config.num_experts_per_tok * 4 * config.hidden_size + 8 * manifest.num_heads * manifest.head_dim
    chunk = 2 * model.chunk_tokens * wide
    # Loading holds FP8 and BF16 weights together; running BF16 weights, the layer's keys and their capture.
    needed = max(3 * weights, 2 * weights + 3 * keys + chunk)
    free, _ = torch.cuda.mem_get_info(model.device)
    if needed > free:
        fits = max(0, int((free - 2 * weights - chunk) / (3 * keys) * manifest.tokens)) if free > 3 * weights else 0
        raise ValueError(
            f"device has {free / GIB:.1f} GiB free; accepted: {needed / GIB:.1f} GiB for {manifest.tokens} tokens "
            f"({fits} tokens would fit)"
        )
    return model.device if needed + manifest.hidden_bytes < free else torch.device("cpu")


def forward_to_disk(
    model: nn.Module, input_ids: torch.Tensor, text: str, first_token: int, num_queries: int, out: Path
) -> StoredCapture:
    """Capture any supported decoder by its own forward pass, to the same format; ``text`` is the text's hash."""
    layers = select_layers(attention_layers(model))
    _check_context(input_ids.shape[1], model.config)
    shape = next(iter(layers.values()))
    manifest = Manifest(
        model=Path(model.config.name_or_path).name or type(model).__name__,
        revision=getattr(model.config, "_commit_hash", None) or "",
        model_type=model.config.model_type,
        config_hash=architecture_hash(model.config),
        text_hash=text,
        first_token=first_token,
        tokens=input_ids.shape[1],
        num_queries=num_queries,
        layers=tuple(layers),
        hidden_size=model.config.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        **provenance.stamp(),
    )
    writer = CaptureWriter(out, manifest)
    if writer.missing():
        with capture(model, num_queries=num_queries) as captured, torch.no_grad():
            model(input_ids.to(model.device), use_cache=False, logits_to_keep=1)
        for layer in captured.layers.values():
            writer.write(layer)
    return open_capture(out)


def read_text(path: Path) -> str:
    """Read a UTF-8 text.

    Raises
    ------
    ValueError
        The file is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"text is {str(path)!r} ({reason}); accepted: a UTF-8 text file") from None
