"""Write a callback: watch the gradient norm without slowing the loop down.

python examples/write_a_callback.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.callbacks import TrainerCallback


class GradientNorms(TrainerCallback):
    """Keeps the norm of every update as a device tensor and reads them once per epoch."""

    def on_training_run_start(self, trainer, **kwargs):
        self.norms: list[Tensor] = []
        self.means: list[float] = []

    def after_train_batch(self, state, logger):  # gradients are complete; any event's name is a method name
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients))

    def on_train_epoch_end(self, trainer, **kwargs):
        self.means.append(torch.stack(self.norms).mean().item())  # the only place where the host waits
        self.norms.clear()
        trainer.run_history.update_metric("train_gradient_norm", self.means[-1])


def main(num_epochs: int = 3) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    norms = GradientNorms()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[norms])
    trainer.train(data, num_epochs=num_epochs, per_device_batch_size=32)
    print("mean gradient norm per epoch:", [round(value, 3) for value in norms.means])
    return norms.means


if __name__ == "__main__":
    main()
