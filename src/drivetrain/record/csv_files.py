"""`scalars.csv` for spreadsheets, and the PNG files of images and figures.

The table is a view of `metrics.jsonl`: when a run is resumed it is written again from the rows that remain, so it never shows a step
twice. A tag that a spreadsheet would take for a formula has an apostrophe in front of it here, and only here.
"""

import csv
import io
from pathlib import Path

from drivetrain.core.display import spreadsheet_cell
from drivetrain.core.files import make_inner_folder, replace_bytes, replacing
from drivetrain.record.images import Picture
from drivetrain.record.jsonl import FILE_NAME as JOURNAL
from drivetrain.record.jsonl import AppendFile, FileSink, iterate_metrics
from drivetrain.record.sink import Resume

FILE_NAME = "scalars.csv"
COLUMNS = ("step", "time", "tag", "value")


class CsvSink(FileSink):
    """Writes `scalars.csv`, `images/` and `figures/`."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._text = io.StringIO()
        self._writer = csv.writer(self._text)

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Open the table for appending, after a resume without the rows that are recorded again."""
        self._folder, path = folder, folder / FILE_NAME
        if resume is not None:
            with replacing(path) as stream:
                file = io.TextIOWrapper(stream, encoding="utf-8", newline="")
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows(
                    [spreadsheet_cell(row[column]) for column in COLUMNS]
                    for row in iterate_metrics(folder / JOURNAL)
                    if row["kind"] == "scalar"
                )
                file.flush()
                file.detach()  # `replacing` closes the stream beneath it
        self._file = AppendFile(path)
        if self._file.lines == 0:
            self._writer.writerow(COLUMNS)

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""
        self._writer.writerow((step, round(time, 3), spreadsheet_cell(tag), value))

    def image(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Write a PNG file."""
        assert self._folder is not None and picture.path is not None
        path = self._folder / picture.path
        make_inner_folder(self._folder, path.parent)
        replace_bytes(path, picture.png, durable=False)

    figure = image

    def take_waiting(self) -> list[str]:
        """Return the rows that wait to be written, and forget them."""
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        return [text] if text else []
