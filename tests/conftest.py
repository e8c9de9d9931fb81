"""One torch thread for every test, and torch's global settings as they were after it."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# These have environments of their own: make test-horovod, make test-xla.
_OWN = {"horovod": "horovod", "xla": "torch_xla"}
collect_ignore = [
    folder for folder, package in _OWN.items() if importlib.util.find_spec(package) is None
]

# Time limits per example say more about a busy machine than about the code.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# What is started in the background, or by nohup, ignores some signals, and so would every process
# that a test starts: here they are as a terminal gives them.
for _number, _usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """One thread; whatever a test leaves changed is put back, so that none depends on another."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    dtype = torch.get_default_dtype()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = benchmark
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)
