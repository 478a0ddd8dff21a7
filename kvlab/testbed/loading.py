"""The trained testbed, ready to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch

from kvlab.tables import data_folder

if TYPE_CHECKING:
    from transformers import Kolibri1ForCausalLM, PreTrainedTokenizerBase

MODEL_NAME = "kvlab-testbed"


def checkpoint_folder() -> Path:
    """Return where the testbed's checkpoint lies, in the format of the Kolibri-1 release.

    Raises
    ------
    FileNotFoundError
        This installation has none.
    """
    folder = data_folder() / "testbed"
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no checkpoint; accepted: a checkout, or a wheel, with the testbed")
    return folder


def loss_curve() -> pd.DataFrame:
    """Read how the testbed's training went.

    Returns
    -------
    pandas.DataFrame
        A row every 25 steps, `kvlab.testbed.training.CURVE_COLUMNS`: ``tokens`` and ``seconds`` so far, ``length`` of
        the sequences, losses in nats a token, of held-out text every 100 steps.

    Raises
    ------
    FileNotFoundError
        This installation lacks it.
    """
    return pd.read_csv(checkpoint_folder() / "loss.csv")


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Kolibri1ForCausalLM:
    """Load a small checkpoint of the release's format as transformers' own model, on the CPU.

    transformers itself computes with FP8 weights on GPUs only; here they are dequantized.

    Parameters
    ----------
    folder
        With config, shards and index.
    dtype
        Of the weights.

    Raises
    ------
    ValueError
        `kvlab.models.checkpoint.CheckpointFiles` refuses it.
    """
    from transformers import Kolibri1ForCausalLM

    from kvlab.models.checkpoint import CheckpointFiles

    files = CheckpointFiles(folder)
    state = {f"model.{name}": tensor for name, tensor in files.embeddings().materialize("cpu", dtype).items()}
    for index in range(files.config.num_hidden_layers):
        layer = files.layer(index).materialize("cpu", dtype)
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    for name, tensor in files.head().materialize("cpu", dtype).items():
        state[name if name.startswith("lm_head") else f"model.{name}"] = tensor
    model = Kolibri1ForCausalLM(files.config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def load_testbed(dtype: torch.dtype = torch.float32) -> tuple[Kolibri1ForCausalLM, PreTrainedTokenizerBase]:
    """Load the testbed: a trained model of Kolibri-1's architecture with 18 M parameters, and its tokenizer.

    It is a small model, not Kolibri-1: what its keys look like need not hold for the larger one.

    Returns
    -------
    model, tokenizer
        In evaluation mode, on the CPU.

    Raises
    ------
    FileNotFoundError
        This installation lacks it.
    ValueError
        A file of it is damaged.
    """
    from transformers import AutoTokenizer

    folder = checkpoint_folder()
    model = load_checkpoint(folder, dtype)
    try:
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # A damaged file fails in one of many ways, most of which name neither the file nor the folder.
        raise ValueError(f"{folder} has a damaged tokenizer ({error!r:.80}); accepted: the testbed's own") from None
