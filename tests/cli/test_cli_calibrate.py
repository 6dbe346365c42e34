"""Calibrations of a tiny model through the command line, under a real limit."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import Program, make_key, make_profile

from budgetdb.calibration.calibrator import CalibrationEvent
from budgetdb.cli.progress import Progress, probe_line
from budgetdb.cli.summary import python_lines
from budgetdb.store import ProfileStore

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# What torch and transformers take of a worker process before any model is about 360 to 450 MiB.
LIMIT = ("--device", "cpu", "--memory-limit", "520MiB", "--max-length", "32", "--pad-multiple", "8")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-bert"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_it_is_found_shown_and_known_ever_after(budgetdb: Program, store: ProfileStore, model: Path) -> None:
    first = budgetdb("calibrate", model, *LIMIT)
    assert first.stderr == ""  # no terminal: results on stdout, and no progress
    [profile] = store.list()
    for part in (f"profile {profile.id} is stored", "tiny-bert", "float32", "forward[hold=previous]", "headroom"):
        assert part in first.stdout
    for part in (str(profile.token_budget), "32 (bound: memory)", "probes", f"{profile.max_batch_size(32)} x 32"):
        assert part in first.stdout
    assert "budgetdb.make_batch_sampler(model, lengths, pad_multiple=8)" in first.stdout
    assert profile.id in budgetdb("show").stdout

    second = budgetdb("calibrate", model, *LIMIT, "--json", "--verbose")
    assert json.loads(second.stdout) == json.loads(budgetdb("show", profile.id, "--json").stdout)
    assert second.stderr == f"tiny-bert is known as {profile.id}: no forward pass was made\n"
    assert "no forward pass was made" in budgetdb("calibrate", model, *LIMIT).stdout
    assert store.list() == [profile]


def test_a_limit_below_the_models_own_size(budgetdb: Program, model: Path) -> None:
    message = budgetdb.fails("calibrate", model, "--device", "cpu", "--memory-limit", "1MiB", "--json", code=7)
    assert "the model's weights take" in message
    assert "--memory-limit" in message


def test_a_model_that_is_not_there(budgetdb: Program, model: Path) -> None:
    message = budgetdb.fails("calibrate", model.with_name("tiny-bret"), "--device", "cpu", code=4)
    assert "tiny-bret" in message
    assert "Did you mean" in message


@pytest.mark.slow
def test_what_only_the_worker_can_tell(budgetdb: Program, model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    budgetdb.fails("calibrate", tmp_path / "broken", "--device", "cpu", code=4)
    budgetdb.fails("calibrate", "no-such-organisation/no-such-model", "--device", "cpu", code=4)
    assert "Did you mean 'float32'" in budgetdb.fails("calibrate", model, "--dtype", "flaot32", code=2)
    assert "Did you mean 'base'" in budgetdb.fails("calibrate", model, "--head", "bsae", code=2)
    assert "Did you mean 'none'" in budgetdb.fails("calibrate", model, "--workload", "forward[hold=nome]", code=2)
    assert "no mps device" in budgetdb.fails("calibrate", model, "--device", "mps", code=5)


@pytest.mark.slow
def test_a_line_for_each_probe_on_a_terminal(path: Path, store: ProfileStore, model: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "BUDGETDB_URL": str(path), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "budgetdb.cli", "calibrate", str(model), *LIMIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as process:
        os.close(theirs)
        screen = b""
        while chunk := read(ours):
            screen += chunk
        assert process.stdout is not None
        assert "\x1b" not in process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    [profile] = store.list()
    lines = screen.decode()
    for probe in profile.probes:
        assert f"{probe.shape}  {probe.outcome.value}" in lines
    assert "% of the limit" in lines


def read(descriptor: int) -> bytes:
    """What a terminal shows next; nothing once the other end is closed."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def test_the_line_of_a_probe() -> None:
    fits, failed = make_profile().probes
    line = probe_line(3, fits, limit_bytes=260_046_848, stage="probe")
    assert line == "probe  3     1270 x 64  fits            124 MiB   50 % of the limit  0.25 s"
    assert probe_line(12, failed, limit_bytes=None, stage="check") == "check 12     140 x 512  oom"


def test_probes_that_are_kept_are_told_of_at_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(verbose=False)
    progress.report(CalibrationEvent("probe", "1270 x 64 fits", probe=make_profile().probes[0]))
    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "probes kept: 1; the same command goes on from there\n"


@pytest.mark.parametrize(
    ("workload", "pad_multiple", "options"),
    [
        ("forward[hold=previous]", 8, ", pad_multiple=8"),
        ("forward[hold=previous]", 1, ""),
        ("embed[hold=previous]", 1, ', workload="embed"'),
        ("forward[hold=none]", 1, ', workload="forward[hold=none]"'),
    ],
)
def test_the_python_to_use_it_names_what_is_not_the_default(workload: str, pad_multiple: int, options: str) -> None:
    profile = make_profile(make_key(workload=workload, pad_multiple=pad_multiple))
    assert python_lines(profile)[0] == f"batches = budgetdb.make_batch_sampler(model, lengths{options})"
