"""``python -m tests.golden`` records the golden losses of this machine."""

import json
import tempfile
from pathlib import Path

from tests.golden import FILE, losses, machine

with tempfile.TemporaryDirectory() as folder:
    record = {"machine": machine(), "losses": [loss.hex() for loss in losses(Path(folder) / "run")]}
FILE.write_text(json.dumps(record, indent=1) + "\n")
