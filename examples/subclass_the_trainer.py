"""Change one part of the loop and keep the rest: knowledge distillation from a larger model (Hinton et al., 2015).

python examples/subclass_the_trainer.py
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Trainer


class DistillationTrainer(Trainer):
    """Trains a student on the teacher's softened outputs and on the labels."""

    def __init__(self, student, teacher, *args, temperature: float = 2.0, share: float = 0.5, **kwargs):
        super().__init__(student, *args, **kwargs)
        self.teacher, self.temperature, self.share = teacher.eval(), temperature, share

    def training_run_start(self):
        self.teacher.to(self.device)

    def calculate_train_batch_loss(self, batch):
        inputs, targets = batch
        logits = self.forward(inputs)
        with torch.no_grad():
            taught = self.teacher(inputs) / self.temperature
        soft = functional.kl_div((logits / self.temperature).log_softmax(-1), taught.softmax(-1), reduction="batchmean")
        loss = (1 - self.share) * self.compute_loss(logits, targets) + self.share * self.temperature**2 * soft
        return {"loss": loss, "model_outputs": logits, "batch_size": len(targets)}


def main(num_epochs: int = 5) -> float:
    torch.manual_seed(0)
    centres = torch.randn(5, 12) * 1.5
    labels = torch.randint(0, 5, (600,))
    data = TensorDataset(centres[labels] + torch.randn(600, 12), labels)
    teacher = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 5))
    Trainer(teacher, nn.CrossEntropyLoss(), torch.optim.AdamW(teacher.parameters(), lr=1e-2), callbacks=()).train(
        data, num_epochs=num_epochs, per_device_batch_size=50
    )
    student = nn.Linear(12, 5)
    trainer = DistillationTrainer(
        student,
        teacher,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(student.parameters(), lr=1e-2),
        callbacks=(),
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()},
    )
    history = trainer.train(data, num_epochs=num_epochs, eval_dataset=data, per_device_batch_size=50)
    print(f"the student's accuracy: {history.get_latest_metric('eval_accuracy_epoch'):.1%}")
    return history.get_latest_metric("eval_accuracy_epoch")


if __name__ == "__main__":
    main()
