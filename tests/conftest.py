import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, by whichever test comes first.
    os.environ["TRITON_INTERPRET"] = "1"

REPORT = "report"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On tensors this small threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def report(record_property):
    """Takes a line of figures for the end of the run; a property, which comes from other processes too."""
    return lambda line: record_property(REPORT, line)


def pytest_terminal_summary(terminalreporter):
    for reports in terminalreporter.stats.values():
        for each in reports:
            if getattr(each, "when", None) == "call":
                for name, line in each.user_properties:
                    if name == REPORT:
                        terminalreporter.write_line(line)
