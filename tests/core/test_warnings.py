"""Every warning of ours has our category, so that strict runs can tell them from those of others."""

import ast
import pickle
import warnings
from pathlib import Path

import pytest

import drivetrain
from drivetrain.core.errors import (
    DrivetrainDeprecationWarning,
    DrivetrainWarning,
    MissingExtra,
    NoEffectWarning,
    NotIntendedUseWarning,
)
from drivetrain.runtime.launch import WorkerFailed

OURS = {
    kind.__name__ for kind in (DrivetrainWarning, DrivetrainDeprecationWarning, NoEffectWarning, NotIntendedUseWarning)
}


def test_the_categories_are_what_users_filter():
    assert issubclass(DrivetrainWarning, UserWarning)
    assert issubclass(DrivetrainDeprecationWarning, DrivetrainWarning)
    assert issubclass(DrivetrainDeprecationWarning, DeprecationWarning)
    assert issubclass(NoEffectWarning, DrivetrainWarning) and issubclass(NotIntendedUseWarning, DrivetrainWarning)


def calls_of_warn():
    for path in sorted(Path(drivetrain.__file__).parent.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports = [
            node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "drivetrain.core.errors"
        ]
        has_ours = any(alias.name == "warn" and alias.asname is None for node in imports for alias in node.names)
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn"):
                yield f"{path.name}:{node.lineno}", node, ast.unparse(node.func) == "warn" and has_ours


def test_no_warning_of_ours_goes_out_under_another_name():
    """Each names a class of ours, or goes through `core.errors.warn`, which does."""
    calls = list(calls_of_warn())
    assert len(calls) > 30
    wrong = {
        place: ast.unparse(node)[:80]
        for place, node, is_ours in calls
        if not is_ours and (len(node.args) < 2 or ast.unparse(node.args[1]) not in OURS)
    }
    assert not wrong


def test_only_our_warnings_become_errors_when_strict():
    from drivetrain.train.callbacks.control import warnings_as_errors

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with warnings_as_errors(True):
            warnings.warn("of somebody else", UserWarning, stacklevel=1)
            with pytest.raises(NoEffectWarning):
                warnings.warn("of ours", NoEffectWarning, stacklevel=1)
        with warnings_as_errors(False):
            warnings.warn("of ours, not strict", DrivetrainWarning, stacklevel=1)
    assert [str(entry.message) for entry in seen] == ["of somebody else", "of ours, not strict"]


def test_every_error_survives_the_way_between_processes():
    missing = pickle.loads(pickle.dumps(MissingExtra("wandb", "wandb", "the sink")))
    assert str(missing).count("needs the package") == 1 and missing.package == "wandb"
    failed = pickle.loads(pickle.dumps(WorkerFailed("it failed", rank=3, exit_code=-9, traceback="line 1")))
    assert (str(failed), failed.rank, failed.exit_code, failed.traceback) == ("it failed", 3, -9, "line 1")


SCRIPT = """
import torch
from drivetrain import Trainer
from torch import nn

model, idle = nn.Linear(4, 2), nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
trainer = Trainer(nn.Sequential(model, nn.Linear(2, 2)), nn.CrossEntropyLoss(), optimizer, callbacks=())
trainer.train(data, num_epochs=1)  # here
"""


def test_a_warning_shows_the_users_line_and_not_one_of_the_package():
    with pytest.warns(DrivetrainWarning, match="not in the optimizer") as seen:
        exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    (warning,) = seen
    assert (warning.filename, SCRIPT.splitlines()[warning.lineno - 1][-6:]) == ("script.py", "# here")


def test_a_warning_in_a_thread_of_the_package_shows_where_it_was_raised():
    import threading

    from drivetrain.core.errors import warn

    def run_in_a_thread():
        thread = threading.Thread(target=warn, args=("nobody's line",))
        thread.start()
        thread.join()

    with pytest.warns(DrivetrainWarning, match="nobody's line") as seen:
        run_in_a_thread()
    assert seen[0].filename == threading.__file__
