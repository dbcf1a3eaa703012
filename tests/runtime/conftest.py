"""What tests of launching share."""

import warnings

import pytest
import torch


@pytest.fixture
def can_fork():
    """Closures are launched by forking, which an earlier test that used CUDA in this process makes impossible."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has started in this process")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        yield
