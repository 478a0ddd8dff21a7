import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, by whichever test comes first.
    os.environ["TRITON_INTERPRET"] = "1"

REPORT = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On tensors this small threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def report(pytestconfig):
    """Takes a line of figures for the end of the run."""
    return pytestconfig.stash.setdefault(REPORT, []).append


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
