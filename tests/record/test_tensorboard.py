"""Event files, read back with tensorboard's own reader."""

import io

import numpy as np
import pytest
import torch

from drivetrain.core.errors import MissingExtra
from drivetrain.record import Recorder, read_metrics, trackers

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(folder):
    accumulator = EventAccumulator(str(folder / "tb"), size_guidance={"histograms": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def test_everything_is_read_back(tmp_path):
    pixels = torch.randint(0, 256, (3, 4, 6), dtype=torch.uint8)
    with Recorder(tmp_path, tensorboard=True) as recorder:
        recorder.params({"lr": 0.1})
        for value in (0.5, 0.25):
            recorder.scalars({"train/loss": torch.tensor(value), "lr": 2 * value})
            recorder.step()
        recorder.image("sample", pixels)
        recorder.histogram("weights", torch.arange(8.0), bins=4)
        recorder.text("note", "hello")
    found = events(tmp_path)
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(0, 0.5), (1, 0.25)]
    assert [event.value for event in found.Scalars("lr")] == [1.0, 0.5]
    (image,) = found.Images("sample")
    assert (image.step, image.width, image.height) == (2, 6, 4)
    from PIL import Image

    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), pixels.permute(1, 2, 0).numpy()
    )
    (histogram,) = found.Histograms("weights")
    assert list(histogram.histogram_value.bucket) == [2, 2, 2, 2] and histogram.histogram_value.sum == 28
    assert found.Tensors("note")[0].tensor_proto.string_val[0] == b"hello"
    assert b"| lr | 0.1 |" in found.Tensors("params")[0].tensor_proto.string_val[0]


def test_a_resume_purges_what_is_recorded_again(tmp_path):
    first = Recorder(tmp_path, tensorboard=True)
    for value in (0.0, 1.0):
        first.scalar("loss", value)
        first.step()
    state = first.state_dict()
    for value in (2.0, 3.0):
        first.scalar("loss", value)
        first.step()
    first.close()
    with Recorder(tmp_path, tensorboard=True) as second:
        second.load_state_dict(state)
        second.scalar("loss", 20.0)
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_without_the_package_auto_is_off_and_true_is_an_error(tmp_path, monkeypatch):
    from drivetrain.record import recorder

    monkeypatch.setattr(trackers, "has_tensorboard", lambda: False)
    monkeypatch.setattr(recorder, "has_tensorboard", lambda: False)
    with Recorder(tmp_path) as quiet:
        quiet.scalar("x", 1)
    assert not (tmp_path / "tb").exists()
    with pytest.raises(MissingExtra, match="pip install tensorboard"):
        Recorder(tmp_path, tensorboard=True)
    with pytest.raises(ValueError, match="'auto'"):
        Recorder(tmp_path, tensorboard="yes")


def test_settings_become_hyperparameters_also_those_of_a_run_nobody_recorded(tmp_path):
    from tensorboard.plugins.hparams import metadata

    from drivetrain.experiment import experiment

    @experiment
    def blobs(lr: float = 0.1, wide: bool = True, kind: str = "a", limit: int | None = None):
        with Recorder(tensorboard=True) as recorder:
            recorder.scalar("loss", lr)
        return recorder.output_dir

    found = events(blobs.run(lr=0.5, output_dir=str(tmp_path), cuda=False))
    content = found.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    given = metadata.parse_session_start_info_plugin_data(content).hparams
    assert given["lr"].number_value == 0.5 and given["wide"].bool_value is True and given["kind"].string_value == "a"
    assert "limit" not in given and "output_dir" not in given
    assert found.PluginTagToContent("hparams").keys() == {metadata.SESSION_START_INFO_TAG}


def test_a_folder_whose_name_is_not_utf8_has_all_other_files(tmp_path, caplog):
    folder = tmp_path / "f\udcfc"  # as Python shows the byte 0xfc
    with Recorder(folder) as recorder:
        recorder.scalar("loss", 0.5)
    assert [row["value"] for row in read_metrics(folder)] == [0.5]
    assert "not UTF-8" in caplog.text and not (folder / "tb").exists()
