"""Record a hand-written loop, kill it, go on, and read one history without gaps or doubles.

    python examples/record_metrics.py

The Recorder keeps numbers on the device and writes them every few seconds; `state_dict()` goes into the checkpoint, so that after a
resume the rows of steps that are done again replace those of the first try.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from drivetrain.record import Recorder, read_metrics


def train(folder: Path, steps: int, state: dict | None = None, dies_at: int | None = None) -> dict:
    """Train up to `steps` steps and return the newest checkpoint; at `dies_at` the rest of the work is lost."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    y = x @ torch.randn(8, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(folder, tensorboard=False) as recorder:
        recorder.params({"lr": 0.05, "steps": steps})
        if state is not None:
            model.load_state_dict(state["model"])
            recorder.load_state_dict(state["recorder"])
        while recorder.count < steps:
            rows = torch.arange(32) + 32 * (recorder.count % 8)
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.scalar("train/loss", loss)
            recorder.step()
            if recorder.count % 10 == 0:
                recorder.histogram("weights", model.weight)
                recorder.image("weights", model.weight.detach().abs().clamp(max=1))
                state = {
                    "model": {k: v.clone() for k, v in model.state_dict().items()},
                    "recorder": recorder.state_dict(),
                }
            if recorder.count == dies_at:
                break
        else:
            recorder.summary({"loss": recorder.last("train/loss")})
    assert state is not None
    return state


def main(steps: int = 40) -> bool:
    """Return whether the interrupted run has the metrics of the uninterrupted one."""
    with tempfile.TemporaryDirectory() as aside:
        whole, broken = Path(aside) / "whole", Path(aside) / "broken"
        train(whole, steps)
        checkpoint = train(broken, steps, dies_at=27)  # the newest checkpoint is of step 20
        train(broken, steps, state=checkpoint)
        history = {
            folder: [(row["step"], row["value"]) for row in read_metrics(folder, tag="train/loss")]
            for folder in (whole, broken)
        }
        for step, loss in history[broken][:: max(steps // 8, 1)]:
            print(f"step {step:3}  loss {loss:.5f}")
        files = sorted(path.relative_to(broken).as_posix() for path in broken.rglob("*") if path.is_file())
        print("files:", ", ".join(files))
    same = history[whole] == history[broken]
    print("the same metrics, with and without the interruption" if same else "they differ")
    return same


if __name__ == "__main__":
    main()
