import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

MEASURE_128K = """
import re, torch, kvlab
generator = torch.Generator().manual_seed(0)
k, v = (torch.empty(4, 131072, 128, dtype=torch.bfloat16).normal_(generator=generator) for _ in range(2))
q = torch.randn(8, 4, 128, generator=generator)
positions = torch.tensor([98304, 110000, 120000, 131071])
kvlab.outlier_ratio(k)
for stored in ("K", "KV"):
    kvlab.attention_output_error(q, k, v, "hadamard-int4", stored=stored, positions=positions)
# Not getrusage's: that one begins with what the process held that started this one.
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


def test_128k_keys_fit_in_2_gb():
    """Four KV heads of head_dim 128 at 128k, everything the process holds counted, torch included."""
    run = subprocess.run([sys.executable, "-c", MEASURE_128K], capture_output=True, text=True, check=True)
    assert int(run.stdout) * 1024 < 2e9
