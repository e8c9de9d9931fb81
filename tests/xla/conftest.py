"""XLA on the CPU, compiling quickly; its runtime is never started in this process.

So every process that a test starts can start it: it cannot be used on both sides of a fork.
"""

import os

os.environ.update(
    PJRT_DEVICE="CPU",
    XLA_FLAGS="--xla_backend_optimization_level=0",
    TF_CPP_MIN_LOG_LEVEL="2",
    # As the backend sets it: what is loaded before a fork has been loaded without the backend.
    XLA_NO_SPECIAL_SCALARS="1",
    PHASELOOP_TESTS_PRELOAD="torch_xla",
)
