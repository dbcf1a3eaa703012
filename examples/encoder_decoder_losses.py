"""Two optimizers on two losses: the encoder learns a given code, the decoder learns to decode it, each at its own pace.

python examples/encoder_decoder_losses.py

Both losses come from one forward pass. The encoder is updated every second step and only by its own loss, the decoder
every step and only by its own; neither leaves gradients in the other.
"""

import io

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.optim import OptimSet

CONFIG = """
warmup: 20
optim_sches:
    encoder_optim:
        type: noam.NoamLr
        conf:
            optim_type: Adam
            optim_conf: {lr: 1e-2, betas: !tuple [0.9, 0.98]}
            optim_losses: encoder_loss
            updated_modules: encoder
            step_per_update: 2
            warmup_steps: !ref <warmup>
    decoder_optim:
        type: cosine.CosineLr
        conf:
            optim_type: AdamW
            optim_conf: {lr: 2e-2}
            optim_losses: decoder_loss
            updated_modules: decoder
            warmup_steps: !ref <warmup>
"""


class EncoderDecoder(nn.Module):
    """Returns the code and what the decoder makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        return code, self.decoder(code)


class TwoLosses(Trainer):
    """A trainer whose batches have a loss for each part of the model."""

    def calculate_train_batch_loss(self, batch):
        x, means, y = batch
        code, out = self.model(x)
        losses = {"encoder_loss": self.loss_func(code, means), "decoder_loss": self.loss_func(out, y)}
        return {"loss": sum(losses.values()), "losses": losses, "model_outputs": out, "batch_size": len(x)}


def main(num_epochs: int = 4) -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    means = x.view(-1, 4, 2).mean(dim=2)  # what the code should be
    data = TensorDataset(x, means, torch.sin(means.repeat(1, 2)))
    model = EncoderDecoder()
    optim = OptimSet.from_yaml(io.StringIO(CONFIG), model=model, grad_clip=5.0)
    trainer = TwoLosses(model, nn.MSELoss(), optim, callbacks=())
    history = trainer.train(data, num_epochs=num_epochs, per_device_batch_size=32)
    print(optim.explain())
    losses = history.get_metric_values("train_loss_epoch")
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; updates { ({name: unit.update_count for name, unit in optim.items()}) }"
    )
    return {"first": losses[0], "last": losses[-1], **{name: unit.update_count for name, unit in optim.items()}}


if __name__ == "__main__":
    main()
