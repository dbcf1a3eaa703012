"""A GAN on a line: the generator learns where the data is, against a discriminator that is stepped by hand.

python examples/gan.py

"All backwards, then all steps" would show the generator the discriminator of the step before. So the discriminator is a
`manual` unit: `step_now` updates it at once, and the generator's loss then goes through the new one. The generator's pass
leaves no gradient in the discriminator.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.optim import ConstantLr, CosineLr, OptimSet

TARGET = 3.0


class Gan(nn.Module):
    """A generator and a discriminator, called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Linear(1, 1)
        self.disc = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.gen(z)


class GanTrainer(Trainer):
    """Steps the discriminator inside the loss hook and returns the generator's loss."""

    def calculate_train_batch_loss(self, batch):
        real, z = batch
        gen, disc = self.get_model().gen, self.get_model().disc
        fake = gen(z)
        d_loss = softplus(-disc(real)).mean() + softplus(disc(fake.detach())).mean()
        self.optimizer.step_now("disc", {"disc_loss": d_loss})
        g_loss = softplus(-disc(fake)).mean()  # through the updated discriminator
        return {"loss": g_loss, "losses": {"gen_loss": g_loss}, "model_outputs": fake, "batch_size": len(z)}


def main(num_epochs: int = 12) -> float:
    torch.manual_seed(0)
    data = TensorDataset(TARGET + 0.5 * torch.randn(2048, 1), torch.randn(2048, 1))
    model = Gan()
    adam = {"lr": 2e-2, "betas": (0.5, 0.9)}
    optim = OptimSet(
        disc=ConstantLr("Adam", adam, model, optim_loss="disc_loss", updated_modules="disc", manual=True),
        gen=CosineLr("Adam", adam, model, optim_loss="gen_loss", updated_modules="gen"),  # settles down at the end
    )
    trainer = GanTrainer(model, None, optim, callbacks=())
    trainer.train(data, num_epochs=num_epochs, per_device_batch_size=64)
    with torch.no_grad():
        mean = model(torch.randn(4096, 1)).mean().item()
    print(f"the data is around {TARGET}, the generator's mean is {mean:.2f}")
    return mean


if __name__ == "__main__":
    main()
