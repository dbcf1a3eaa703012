"""Whether small or large values of a metric are good."""

import pytest

from drivetrain.core.errors import ConfigError, ParameterError
from drivetrain.experiment import experiment, read_run, sweep
from drivetrain.experiment.directions import direction_of
from drivetrain.experiment.reports.gather import gather_run
from drivetrain.record import Recorder


@pytest.mark.parametrize(
    "tag",
    "loss train_loss_epoch eval/WER test.cer NLL val/nll bits_per_byte bpb eval/bits-per-dim FID fid50k rmse eval_ppl perplexity "
    "word_error_rate negative_log_likelihood cross_entropy EER brier".split(),
)
def test_small_values_of_common_errors_are_good(tag):
    assert direction_of(tag) == "min"


@pytest.mark.parametrize(
    "tag",
    "accuracy eval/acc top5 val_f1 F1@10 auroc mAP50 mIoU bleu rouge-L psnr reward log_likelihood eval/score pass@1".split(),
)
def test_large_values_of_common_scores_are_good(tag):
    assert direction_of(tag) == "max"


@pytest.mark.parametrize("tag", "lr grad_norm samples_per_second epoch temperature memory/GiB momentum stop".split())
def test_a_metric_whose_name_says_nothing_has_no_direction(tag):
    assert direction_of(tag) is None


def test_a_declaration_counts_before_the_name_and_for_tags_that_end_in_it():
    assert direction_of("eval/cost", {"cost": "min"}) == "min"
    assert direction_of("eval/loss", {"eval/loss": "max"}) == "max"
    assert direction_of("other_cost", {"cost": "min"}) is None


@experiment(directions={"cost": "min", "gain": "min"})
def measure():
    recorder = Recorder(tensorboard=False)
    recorder.direction("gain", "max")
    for cost, gain, lr in ((3.0, 1.0, 0.1), (1.0, 3.0, 0.2), (2.0, 2.0, 0.3)):
        recorder.scalars({"cost": cost, "gain": gain, "lr": lr})
        recorder.step()


def test_best_follows_the_command_line_then_the_recorder_then_the_experiment(tmp_path):
    measure.run(output_dir=str(tmp_path), run_name="one")
    folder = tmp_path / "measure" / "one"
    assert read_run(folder).directions == {"cost": "min", "gain": "min"}
    best = lambda **given: {tag: entry["best"] for tag, entry in gather_run(folder, **given).metrics().items()}
    assert best() == {"cost": 1.0, "gain": 3.0, "lr": None}
    assert best(directions={"cost": "max", "lr": "min"}) == {"cost": 3.0, "gain": 3.0, "lr": 0.1}


@experiment(directions={"speed": "max"})
def numbers(x: float = 0.0):
    return {"gap": x, "speed": -x}


def test_the_direction_of_a_sweep_holds_for_its_trials(tmp_path):
    where = {"output_dir": str(tmp_path)}
    result = sweep(numbers, {"x": [1.0, 2.0]}, params=where, objective="gap", direction="max")
    assert [read_run(trial.run_dir).directions for trial in result] == [{"gap": "max", "speed": "max"}] * 2
    several = sweep(numbers, {"x": [1.0]}, params=where, objective=["gap", "speed"], direction=["min", "max"])
    assert read_run(several[0].run_dir).directions == {"gap": "min", "speed": "max"}


def test_a_direction_that_does_not_exist_is_an_error_where_it_is_declared(tmp_path):
    with pytest.raises(ParameterError, match="direction of 'wer': 'down' is not valid"):
        experiment(directions={"wer": "down"})(lambda params: None)
    recorder = Recorder(tmp_path, tensorboard=False)
    with pytest.raises(ConfigError, match="direction"):
        recorder.direction("wer", "down")
    recorder.close()
