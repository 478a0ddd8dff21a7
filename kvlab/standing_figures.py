"""The figures that need no model: what was measured on GPUs, what is computed, what the write-up published."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from kvlab import capacity, plots, provenance
from kvlab.models.kolibri1_config import kolibri1_config
from kvlab.overview import overview_source, overview_table
from kvlab.step_model import step_model_table
from kvlab.tables import WRITE_UP, data_folder, measured, published
from kvlab.testbed.loading import MODEL_NAME, loss_curve

CONTEXTS = tuple(2**power for power in range(12, 21))
"""Tokens, 4k to 1M."""
CACHE_GB = (20, 40)
"""Of each of the write-up's 80 GB GPUs: what some 40 GB of weights and the rest of the server can leave."""
STEP_CONTEXT, STEP_SESSIONS = 65_536, (1, 8, 32, 64)
"""Tokens, the write-up's shorter context, and sessions of the steps whose parts are drawn."""
THROUGHPUT = "throughput_h200"
"""The whole engine's, which takes GPUs that not every release had: drawn once it is in ``data/measured``."""
TRAINED_ON = "one NVIDIA H200, 2026-11-30"
"""Where and when the testbed in ``data/testbed`` was trained."""


def standing_tables() -> dict[str, pd.DataFrame]:
    """Return the numbers of these figures by the figures' names."""
    kernels = measured("kernels_h200")
    steps = step_model_table(kernels, STEP_CONTEXT, tp=2)
    there = (data_folder() / "measured" / f"{THROUGHPUT}.csv").is_file()
    throughput = {"throughput": measured(THROUGHPUT)} if there else {}
    return {
        "overview": overview_table(kernels, **throughput),
        **throughput,
        **{f"kernels_{kernel}": kernels[kernels["kernel"].isin(["copy", kernel])] for kernel in ("decode", "store")},
        "step_model": steps[steps["sessions"].isin(STEP_SESSIONS)],
        "capacity": capacity.session_table(CONTEXTS, tp=2),
        "capacity_gain": capacity.gain_table(published("capacity")["context"], CACHE_GB, tp=2),
        "ruler": published("ruler"),
        "gpqa": published("gpqa"),
        "testbed_training": loss_curve(),
    }


def draw_standing(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Draw them from `standing_tables`."""
    decode, store, gains = tables["kernels_decode"], tables["kernels_store"], tables["capacity_gain"]
    throughput = tables.get("throughput")
    theirs = published("capacity")
    rules = f"Computed: Kolibri-1, TP2, blocks as vLLM 0.29 allocates them while sessions decode; {provenance.today()}."
    figures = {
        "overview": plots.plot_overview(
            tables["overview"],
            title="Stock against rotated INT4, Kolibri-1",
            source=overview_source(decode, throughput),
        ),
        "kernels_decode": plots.plot_decode_times(
            decode, title="Decode attention: time against context and batch", source=plots.run_of(decode)
        ),
        "kernels_store": plots.plot_store_times(
            store, title="From the projection to the cache: time against new tokens", source=plots.run_of(store)
        ),
        "step_model": plots.plot_step_model(
            tables["step_model"],
            throughput,
            title="Where a decode step's time goes, Kolibri-1",
            source=plots.run_of(decode),
        ),
        "capacity": plots.plot_session_sizes(
            tables["capacity"],
            longest=kolibri1_config().max_position_embeddings,
            title="KV cache per session, Kolibri-1",
            source=f"{rules} The sliding-window layers are FP8 in both.",
        ),
        "capacity_gain": plots.plot_session_gain(
            gains,
            theirs,
            capacity.memory_that_gives(gains, theirs),
            title="More whole sessions than stock: the gain jumps with the memory of the cache",
            source=f"{rules} Diamonds: {WRITE_UP}, at a cache size that it does not name.",
        ),
        "ruler": plots.plot_ruler(
            tables["ruler"], title="RULER: stock and rotated INT4 by context length", source=f"{WRITE_UP}."
        ),
        "gpqa": plots.plot_gpqa(
            tables["gpqa"],
            published("gpqa_difference"),
            title="GPQA Diamond: stock and rotated INT4, run by run",
            source=f"{WRITE_UP}.",
        ),
        "testbed_training": plots.plot_training(
            tables["testbed_training"],
            title=f"Training of {MODEL_NAME}, 18 M parameters of Kolibri-1's architecture",
            source=f"Measured: {TRAINED_ON}.",
        ),
    }
    if throughput is not None:
        figures["throughput"] = plots.plot_throughput(
            throughput,
            tensor_parallel=int(throughput.loc[throughput["counts"], "tensor_parallel"].max()),
            title="Decode throughput, Kolibri-1",
            source=plots.run_of(throughput),
        )
    return figures
