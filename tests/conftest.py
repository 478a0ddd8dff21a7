import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On tensors this small threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
