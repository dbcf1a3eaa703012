"""The live page: it follows runs, answers nobody else, and ends in good order."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.experiment import summaries
from drivetrain.experiment.reports import live
from drivetrain.experiment.reports.live import Board, Server
from drivetrain.record import jsonl
from tests.experiment.folders import hold_lock, make_run, write_png
from tests.experiment.reports.test_page import Balanced

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(live, "PAUSE", 0.0)
    monkeypatch.setattr(live, "LOOK_SECONDS", float("inf"))  # on a busy machine one run may take longer than it should


@pytest.fixture
def server(tmp_path, impatient):
    make_run(tmp_path, "one")
    with Server(Board([tmp_path])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, host=None, method="GET"):
    """Return status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def add_row(folder, step, value, tag="train/loss"):
    with open(folder / "metrics.jsonl", "a") as stream:
        row = {"step": step, "time": 1.0, "kind": "scalar", "tag": tag, "value": value}
        stream.write(json.dumps(row) + "\n")


def test_only_what_has_changed_is_sent(tmp_path, impatient):
    one, two = make_run(tmp_path, "one"), make_run(tmp_path, "two")
    board = Board([tmp_path])
    first = board.changes()
    assert [run["name"] for run in first["runs"]] == ["one", "two"] and len(first["order"]) == 2
    assert board.changes(first["version"])["runs"] == []
    add_row(two, 50, 0.125)
    second = board.changes(first["version"])
    (run,) = second["runs"]
    assert run["name"] == "two" and run["metrics"]["train/loss"][0] == 0.125 and run["metrics"]["train/loss"][5] == 51
    assert second["version"] > first["version"] and len(board.changes(-1)["runs"]) == 2
    assert len(board.changes(10**9)["runs"]) == 2  # a page of an earlier server gets everything
    assert one.is_dir()


def test_many_runs_are_read_little_by_little(tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    for number in range(3):
        make_run(tmp_path, f"run-{number}")
    board, version, seen = Board([tmp_path]), -1, []
    for left in (2, 1, 0, 0):
        found = board.changes(version)
        seen += [run["name"] for run in found["runs"]]
        assert found["unread"] == left and len(found["order"]) == 3 - left
        version = found["version"]
    assert seen == ["run-0", "run-1", "run-2"]


def test_a_run_that_goes_on_is_not_read_from_its_beginning(tmp_path, impatient, monkeypatch):
    folder = make_run(tmp_path, "one", state="running")
    read, original = [], jsonl.whole_blocks
    counting = lambda *a: (read.append(len(block)) or (n, block) for n, block in original(*a))
    for module in (summaries, jsonl):
        monkeypatch.setattr(module, "whole_blocks", counting)
    board = Board([tmp_path])
    with hold_lock(folder):
        board.changes()
        read.clear()
        add_row(folder, 50, 0.5)
        (run,) = board.changes()["runs"]
        assert run["metrics"]["train/loss"][5] == 51 and sum(read) < 400


def test_runs_that_begin_end_or_are_removed_are_noticed(tmp_path, impatient):
    board = Board([tmp_path])
    assert board.changes()["runs"] == []
    folder = make_run(tmp_path, "late", state="running")
    with hold_lock(folder):
        (run,) = board.changes(0)["runs"]
        assert run["state"] == "running"
    version = board.changes(0)["version"]
    (run,) = board.changes(version - 1)["runs"]
    assert run["state"] == "lost"
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink()
    after = board.changes(version)
    assert after["order"] == [] and after["version"] > version


def test_a_place_that_cannot_be_read_at_this_moment_changes_nothing(tmp_path, impatient, monkeypatch):
    make_run(tmp_path, "one")
    board = Board([tmp_path])
    before = board.changes()

    def gone(place):
        raise FileNotFoundError(place)

    monkeypatch.setattr(live, "run_folders", gone)
    assert board.changes() == before


def test_pictures_are_sent_once_and_forgotten_when_no_run_shows_them(tmp_path, impatient):
    folder = make_run(tmp_path, "one")
    write_png(folder / "images" / "sample" / "1.png", 64)
    board = Board([tmp_path])
    first = board.changes()
    (picture,) = first["runs"][0]["pictures"]
    assert first["blobs"][picture["source"]["blob"]].startswith("data:image/png;base64,")
    add_row(folder, 50, 1.0)
    second = board.changes(first["version"])
    assert second["runs"] and not second["blobs"]
    (folder / "images" / "sample" / "1.png").unlink()
    add_row(folder, 51, 1.0)
    board.changes(second["version"])
    assert not board.changes()["blobs"]


def test_a_damaged_file_is_a_note_and_is_read_again_when_it_is_repaired(tmp_path, impatient):
    folder = make_run(tmp_path, "one")
    board = Board([tmp_path])
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + "damaged\n")
    (run,) = board.changes()["runs"]
    assert "cannot be read" in run["notes"][0] and run["metrics"]["train/loss"][5] == 50
    (folder / "metrics.jsonl").write_text(whole)
    (run,) = board.changes()["runs"]
    assert run["notes"] == [] and run["metrics"]["train/loss"][5] == 50


def test_the_page_and_its_changes_are_served_with_strict_headers(server):
    status, headers, text = ask(server, f"/{server.word}/")
    page = Balanced(text)
    assert status == 200 and page.data["live"] is True and page.data["runs"][0]["name"] == "one"
    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "Access-Control-Allow-Origin" not in headers and "Python" not in headers["Server"]
    status, headers, text = ask(server, f"/{server.word}/data?since={page.data['version']}")
    assert status == 200 and json.loads(text)["runs"] == [] and headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1", "0.0.0.0"])
def test_a_request_that_names_another_host_is_rejected(server, host):
    status, _, text = ask(server, f"/{server.word}/", host=host)
    assert status in (400, 403) and "one" not in text.split("127.0.0.1")[0] and "runs" not in text


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_a_tunnel_with_another_port_works(server, host):
    assert ask(server, f"/{server.word}/", host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/data",
        "//",
        "/wrong/",
        "/wrong/data",
        "/{}",
        "/{}/etc/passwd",
        "/{}/../../etc/passwd",
        "/{}/data/x",
        "/{}/%2e%2e/",
    ]
    + ["/%7B%7D/", "http://evil.example/", "x"],
)
def test_any_other_address_is_not_found(server, path):
    status, _, text = ask(server, path.replace("{}", server.word))
    assert status == 404 and "root:" not in text and "runs" not in text


@pytest.mark.parametrize("since", ["", "x", "-1", "1" * 40, "²", "1;2", "%00"])
def test_a_strange_number_gets_everything(server, since):
    from urllib.parse import quote

    status, _, text = ask(server, f"/{server.word}/data?since={quote(since, safe='%;-')}")
    assert status == 200 and len(json.loads(text)["runs"]) == 1


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_rejected(server, method):
    assert ask(server, f"/{server.word}/", method=method)[0] == 501


def test_it_listens_on_this_machine_only_and_two_servers_have_two_words(server, tmp_path):
    assert server.server_address[0] == "127.0.0.1" and len(server.word) >= 20
    with Server(Board([tmp_path])) as other:
        assert other.word != server.word and other.server_address[1] != server.server_address[1]
        with pytest.raises(ConfigError, match=f"--port {other.server_address[1]} cannot be used"):
            Server(Board([tmp_path]), other.server_address[1])
    with pytest.raises(ConfigError, match="--port 99999"):
        Server(Board([tmp_path]), 99999)


@pytest.mark.parametrize("words", [["board"], ["report", "--watch"]])
def test_ctrl_c_ends_the_command_without_a_traceback(tmp_path, words):
    make_run(tmp_path, "one")
    command = [sys.executable, "-m", "drivetrain", *words, str(tmp_path), "--json"]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            connection = http.client.HTTPConnection(url.split("/")[2], timeout=20)
            connection.request("GET", "/" + url.split("/", 3)[3])
            assert connection.getresponse().status == 200  # and the connection stays open
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
            connection.close()
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in err and err.strip() == "interrupted"
