"""Hook ``metrics_file``: each update once, whatever interrupted the run."""

import signal

from tests.rigs import process, r1
from tests.rigs.equal import rows


def test_stopped_then_killed_each_update_is_there_once(tmp_path):
    """The checkpoint at a stop is made after this hook has closed its file; it knows the length."""
    folder = tmp_path / "run"
    save = {"every_epochs": None}  # so that the one at the stop is the only one
    for at, code in (
        (r1.At("on_step", 12, signal.SIGTERM), 0),
        (r1.At("on_step", 15), -signal.SIGKILL),
    ):
        ended = process.run(r1.train, folder, epochs=2, save=save, hooks={"at": at})
        assert ended.code == code
    assert process.run(r1.train, folder, epochs=2, save=save).code == 0
    assert [row["update"] for row in rows(folder) if "loss" in row] == list(range(1, 21))
