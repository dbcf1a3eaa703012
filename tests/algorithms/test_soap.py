"""SOAP in the Trainer takes over rates and decay."""

from drivetrain.algorithms.soap import SOAP
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import image_data, train


def test_it_replaces_the_optimizer_and_trains():
    trainer = conv_run(SOAP(betas=(0.9, 0.95), precondition_frequency=3), optimizer="AdamW")
    (group,) = trainer.optimizer.param_groups
    assert type(trainer.optimizer).__name__ == "SOAP" and (group["lr"], group["weight_decay"]) == (0.01, 0.01)
    assert group["precondition_frequency"] == 3 and group["betas"] == (0.9, 0.95)
    train(trainer, image_data(), num_epochs=8)
    losses = list(trainer.run_history.get_metric_values("train_loss_epoch"))
    assert losses[-1] < losses[0]
    assert conv_run(SOAP(lr=0.5)).optimizer.param_groups[0]["lr"] == 0.5
