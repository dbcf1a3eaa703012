import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.signals import StopSignals, StopWatchdog, exit_status, is_stop, requeue_under_slurm


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_noted_and_the_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopSignals() as signals:
        assert signals.requested is None and StopSignals.active() is signals
        for number in (signal.SIGUSR1, signal.SIGTERM):
            send(number)
            assert signals.requested == signals.agreed() == number
        signals.clear()
        assert signals.requested is None
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert StopSignals.active() is None


def test_a_stop_outweighs_a_save_in_either_order():
    with StopSignals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert signals.requested == signal.SIGTERM
        signals.clear()
        send(signal.SIGUSR1)
        send(signal.SIGINT)
        assert signals.requested == signal.SIGINT
        signals.clear()


def test_a_second_interrupt_stops_at_once():
    with StopSignals() as signals:
        send(signal.SIGINT)
        assert signals.requested == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        signals.clear()


def test_a_users_handler_is_called_too():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with StopSignals() as signals:
            send(signal.SIGTERM)
            assert heard == [signal.SIGTERM] and signals.requested == signal.SIGTERM
            signals.clear()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stop_nobody_acted_on_is_sent_again_at_the_end():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with StopSignals():
            send(signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
        with suppress(RuntimeError), StopSignals():
            send(signal.SIGTERM)
            raise RuntimeError  # it ends the program already
        assert heard == [signal.SIGTERM] * 3
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGINT)
            assert signals.requested is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_inner_and_outer_both_hear_of_a_signal():
    with StopSignals() as outer:
        with StopSignals() as inner:
            assert StopSignals.active() is inner
            send(signal.SIGTERM)
            inner.clear()
        assert StopSignals.active() is outer and outer.requested == signal.SIGTERM
        outer.clear()


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with StopSignals() as signals:
            seen.append((signals.installed, signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(False, True)]


def test_the_list_of_signals_is_adjustable_and_checked():
    with StopSignals([signal.SIGTERM]) as signals:
        assert signals.signals == (signal.SIGTERM,)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ConfigError, match="999"):
        StopSignals([999])


def test_statuses_are_those_of_a_shell():
    assert exit_status(signal.SIGTERM) == 143 and exit_status(signal.SIGINT) == 130
    assert is_stop(signal.SIGTERM) and not is_stop(signal.SIGUSR1) and not is_stop(None)


def told_on_one_rank(told: int, number: int) -> list:
    """Five steps; one rank is sent a signal in the second one."""
    heard = []
    with StopSignals() as signals:
        for step in range(5):
            if step == 1 and get_rank() == told:
                send(number)
            heard.append(signals.agreed())
            if heard[-1] is not None:
                signals.clear()
    return heard


@pytest.mark.parametrize("told", [0, 1])
def test_ranks_agree_one_step_after_one_of_them_was_told(world2, told):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        number = int(number)
        assert world2(told_on_one_rank, told, number) == [[None, None, number, None, None]] * 2


def told_differently() -> list:
    with StopSignals() as signals:
        send(signal.SIGUSR1 if get_rank() == 0 else signal.SIGTERM)
        heard = [signals.agreed() for _ in range(2)]
        signals.clear()
    return heard


def test_the_more_urgent_signal_of_all_ranks_counts(world2):
    assert world2(told_differently) == [[None, int(signal.SIGTERM)]] * 2


def test_slurm_is_asked_to_run_the_job_again(tmp_path, monkeypatch, caplog):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not requeue_under_slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not requeue_under_slurm() and "manually" in caplog.text
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/asked"\n')
    (tmp_path / "scontrol").chmod(0o755)
    assert requeue_under_slurm() and (tmp_path / "asked").read_text() == "requeue 17\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert requeue_under_slurm() and (tmp_path / "asked").read_text() == "requeue 15_3\n"
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert not requeue_under_slurm()


def test_a_process_that_was_told_while_nobody_looks_still_ends():
    """The loop is over when SIGTERM comes: giving the handlers back must not lose it."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with StopSignals() as signals:
            os.write(tell, b"x")
            while signals.requested is None:
                time.sleep(0.001)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(ready), os.close(tell)


WAITING = """
import os, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
from drivetrain.runtime import signals
signals.get_num_processes = lambda: 2
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with signals.StopSignals():
    print("waiting", flush=True)
    store.wait(["never"], timedelta(seconds=300))  # as in a collective: no bytecode runs until it ends
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_rank_that_waits_for_another_one_in_c_code_ends_after_the_grace_period(number):
    environment = {**os.environ, "DRIVETRAIN_STOP_GRACE": "0.2"}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert '"<string>", line 10' in text and text.rstrip().endswith(
        "DRIVETRAIN_STOP_GRACE sets how many seconds to wait."
    )


def test_a_stop_that_was_acted_on_is_not_ended_by_the_grace_period(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_STOP_GRACE", "0.05")
    monkeypatch.setattr("drivetrain.runtime.signals.get_num_processes", lambda: 2)
    ended = []
    monkeypatch.setattr("drivetrain.runtime.signals._end", lambda *told: ended.append(told))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        while signals.requested is None:
            time.sleep(0.001)
        signals.clear()  # a save that takes longer than the grace period begins here
        time.sleep(0.2)
    assert not ended
    assert signal.set_wakeup_fd(-1) == -1  # given back


def test_a_grace_period_that_is_not_a_number_is_named(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_STOP_GRACE", "soon")
    monkeypatch.setattr("drivetrain.runtime.signals.get_num_processes", lambda: 2)
    with pytest.raises(ConfigError, match="DRIVETRAIN_STOP_GRACE='soon'"):
        StopSignals().__enter__()


def test_the_signals_of_the_system_are_listed_once(monkeypatch):
    StopSignals()
    monkeypatch.delattr(signal, "valid_signals")
    with StopSignals() as signals:
        assert signals.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def forked(action):
    """Call a function in a forked process, which then waits for a signal; return its number when it has been called."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(told, b"1")
            time.sleep(60)
        finally:
            os._exit(0)
    os.close(told)
    os.read(ready, 1)
    os.close(ready)
    return child


def test_a_process_that_is_forked_in_a_run_ends_when_it_is_terminated_and_not_with_the_signals_of_a_whole_job():
    with StopSignals() as signals:
        child = forked(lambda: (signal.raise_signal(signal.SIGINT), signal.raise_signal(signal.SIGUSR1)))
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        send(signal.SIGTERM)
        assert signals.requested == signal.SIGTERM  # this process still stores it
        signals.clear()


def test_a_signal_to_a_forked_process_is_not_one_to_this_process():
    handled = threading.Event()
    watchdog = StopWatchdog({signal.SIGTERM}, lambda: handled.set() is None)
    watchdog._grace = 0.01
    with StopSignals() as signals:
        signals._watchdog = watchdog  # as on several processes
        child = forked(lambda: signal.signal(signal.SIGTERM, lambda *_: None))
        os.kill(child, signal.SIGTERM)
        assert not handled.wait(0.3)
        send(signal.SIGTERM)
        assert handled.wait(10)
        signals.clear()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_watch_for_signals_ends_while_a_forked_worker_lives():
    watchdog = StopWatchdog(set(), lambda: True)
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    timer = threading.Timer(10, os.kill, (worker, signal.SIGKILL))  # a worker that is waited for has been killed
    timer.start()
    watchdog.close()
    timer.cancel()
    assert os.waitpid(worker, os.WNOHANG) == (0, 0)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def test_an_unhandled_interrupt_reaches_the_earlier_handler_without_os_kill(monkeypatch):
    """On Windows `os.kill` ends the process at once, without handlers and without a checkpoint."""

    def interrupted() -> None:
        with StopSignals():
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("os.kill was called"))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
