"""Start, status, stop, restart: what a pipeline sees, with a fake engine behind the real supervisor."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from eyas.cli.main import main
from tests.serve.folder import Folder, free_port, is_alive, until


def test_from_start_to_stop(folder: Folder) -> None:
    started = folder.start("--", "--some-option", "1")
    assert started.exit_code == 0, started.output
    assert f"{folder.path}: healthy, up " in started.stdout
    assert f"url      http://127.0.0.1:{folder.port}\n" in started.stdout
    body = folder.status()
    assert body["condition"] == "healthy"
    assert body["command"] == [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder.target), "--host",
        "127.0.0.1", "--port", str(folder.port), "--some-option", "1",
    ]  # fmt: skip
    assert body["engine_release"] == "0.32.0"
    assert body["pids"] == [body["pid"]]
    assert body["resident_bytes"] > 1 << 20
    assert os.getsid(body["pid"]) == os.getpgid(body["pid"]) == body["process_group"] == body["pid"]
    assert os.getsid(body["supervisor"]["pid"]) not in (os.getsid(0), body["pid"])

    stopped = folder.stop()
    assert stopped.exit_code == 0
    assert f"{folder.path}: stopped (the engine was ended by SIGTERM)\n" in stopped.stdout
    until(lambda: not any(map(is_alive, folder.seen)))
    body = folder.status()
    assert (body["condition"], body["exit_status"], body["pids"], body["seconds_up"]) == ("stopped", -15, [], None)
    log = folder.path / "logs" / "serve.log"
    assert log.is_symlink()
    assert log.read_text().splitlines()[0] == "the fake engine starts"


def test_the_same_again_is_done_already_and_another_is_refused(folder: Folder) -> None:
    assert folder.start().exit_code == 0
    pid = folder.status()["pid"]
    again = folder.start()
    assert again.exit_code == 0
    assert "runs already" in again.stderr
    other = folder.start("--tp", 2, "--", "--more")
    assert other.exit_code == 1
    assert "--tp: 1 runs, 2 asked for" in other.stderr
    assert "engine options: none runs, --more asked for" in other.stderr
    assert folder.status()["pid"] == pid


def test_restart_keeps_what_is_not_given(folder: Folder) -> None:
    folder.start("--tp", 2, "--", "--say", "this")
    before = folder.status()
    assert folder.restart().exit_code == 0
    same = folder.status()
    assert same["pid"] != before["pid"]
    assert not psutil.pid_exists(before["pid"])
    assert same["command"] == before["command"]
    assert folder.restart("--tp", 4).exit_code == 0
    assert folder.status()["config"] == {**before["config"], "tp": 4}
    assert len(list((folder.path / "logs").glob("serve-*.log"))) == 3


def test_restart_starts_what_was_stopped_and_needs_to_know_what(folder: Folder) -> None:
    assert folder.restart().exit_code == 2
    assert folder.restart("--engine", "vllm", "--target", folder.target, "--port", folder.port).exit_code == 0
    folder.stop()
    assert folder.restart().exit_code == 0
    assert folder.status()["condition"] == "healthy"


def test_restart_begins_relative_paths_where_they_were_given(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "well").touch()
    monkeypatch.chdir(tmp_path / "here")
    assert folder.start("--", "--healthy-when", "well").exit_code == 0
    monkeypatch.chdir("/")
    assert folder.restart().exit_code == 0


def test_a_slow_start_is_waited_for_again(folder: Folder, tmp_path: Path) -> None:
    options = ("--wait", "0.3", "--", "--healthy-when", tmp_path / "well")
    result = folder.start(*options)
    assert result.exit_code == 75
    assert "not healthy after 0s; it goes on starting: eyas serve start with the same options waits" in result.stderr
    body = folder.status()
    assert (body["condition"], body["reason"]) == ("running", "/health answers 503")
    (tmp_path / "well").touch()
    assert folder.start(*options).exit_code == 0
    assert folder.status()["pid"] == body["pid"]


def test_not_waiting_is_done_when_it_is_started(folder: Folder, tmp_path: Path) -> None:
    assert folder.start("--wait", "0", "--", "--healthy-when", tmp_path / "never").exit_code == 0
    assert folder.status()["condition"] == "running"


def test_a_crash_at_start_ends_the_wait_with_the_log(folder: Folder) -> None:
    result = folder.start("--", "--exit-with", "7")
    assert result.exit_code == 1
    assert "the engine ended with exit status 7" in result.stderr
    assert "no such weights" in result.stderr
    body = folder.status()
    assert (body["condition"], body["exit_status"]) == ("dead", 7)
    assert folder.start().exit_code == 0, "a dead server is no obstacle"


def prefixed(process: str, lines: list[str]) -> list[str]:
    return [f"({process} pid=20069) ERROR 11-30 08:34:21 [core.py:1510] {line}" for line in lines]


FRAMES = ["Traceback (most recent call last):", '  File "core.py", line 1482, in run', "    raise error"]
OUTERMOST = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
WORKER = "Exception: WorkerProc initialization failed. See stack trace for root cause."


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (  # vLLM 0.32: the core's traceback twice, then that of the API server, which waited for it
            [
                "(APIServer pid=1) WARNING 11-30 08:33:01 [u.py:2] This can cause errors like `OSError: [Errno 24]`.",
                *prefixed("EngineCore", [*FRAMES, "ValueError: No available memory for the cache blocks."]),
                *[*FRAMES, "ValueError: No available memory for the cache blocks."],
                *FRAMES * 9,
                OUTERMOST,
            ],
            "ValueError: No available memory for the cache blocks.",
        ),
        (  # of several ranks one fails first
            [
                *prefixed("Worker_TP1", [*FRAMES, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"]),
                *prefixed("EngineCore_DP0", [*FRAMES, WORKER]),
                *[*FRAMES, WORKER, *FRAMES, "ConnectionResetError: [Errno 104]", *FRAMES * 9, OUTERMOST],
            ],
            "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
        ),
        (  # pydantic's messages have lines
            [*FRAMES, "pydantic_core.ValidationError: 1 validation error", "  Value error, max_model_len (9)"],
            "pydantic_core.ValidationError: 1 validation error\n  Value error, max_model_len (9)",
        ),
        (  # SGLang 0.5.23
            ["[2026-11-30 08:40:30] Scheduler hit an exception: Traceback (most recent call last):", *FRAMES[1:],
             "ModuleNotFoundError: No module named 'vllm'", "", *["[2026-11-30 08:40:30] kill_process_tree"] * 30],
            "ModuleNotFoundError: No module named 'vllm'",
        ),
    ],
)  # fmt: skip
def test_a_crash_at_start_shows_its_cause(folder: Folder, tmp_path: Path, lines: list[str], cause: str) -> None:
    (tmp_path / "words").write_text("\n".join(lines))
    result = folder.start("--", "--exit-with", "1", "--last-words", tmp_path / "words")
    assert result.exit_code == 1
    log = folder.path / "logs" / folder.status()["log"]
    assert result.stderr.endswith(f"seems to be the cause:\n{cause}\n\nThe whole log: {log}\n")


def test_stop_while_another_command_waits(folder: Folder, tmp_path: Path) -> None:
    waiting = folder.spawn(folder.arguments("--", "--healthy-when", tmp_path / "never"))
    until(lambda: (folder.path / "serve.json").exists() and folder.status()["condition"] == "running")
    assert folder.stop().exit_code == 0
    assert "was stopped, or restarted, while it was waited for" in waiting.communicate()[1]
    assert waiting.returncode == 1


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75), (signal.SIGINT, 75)]
)
def test_the_server_survives_whoever_started_it(
    folder: Folder, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    starting = folder.spawn(folder.arguments("--", "--healthy-when", tmp_path / "well"))
    log = folder.path / "logs" / "serve.log"
    until(lambda: log.exists() and "starts" in log.read_text())
    until(lambda: folder.status()["condition"] == "running")
    starting.send_signal(number)
    starting.communicate()
    assert starting.returncode == status
    (tmp_path / "well").touch()
    assert folder.start("--", "--healthy-when", tmp_path / "well").exit_code == 0


def test_two_starts_at_once_make_one_server(folder: Folder) -> None:
    both = [folder.spawn(folder.arguments()) for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted("runs already" in stderr for _, stderr in said) == [False, True]
    assert len(list((folder.path / "logs").glob("serve-*.log"))) == 1
    assert folder.status()["condition"] == "healthy"


def test_sigterm_that_is_ignored_is_followed_by_sigkill(folder: Folder) -> None:
    folder.start("--", "--ignore-sigterm", "--workers", "child", "ignores-sigterm")
    result = folder.stop("--grace", "0.1")
    assert result.exit_code == 0
    assert "has not ended 0.1 s after SIGTERM" in result.stderr
    assert "stopped (the engine was ended by SIGKILL)" in result.stdout
    until(lambda: not any(map(is_alive, folder.seen)))


def test_stop_where_nothing_runs(folder: Folder) -> None:
    assert folder.stop().exit_code == 0
    assert not folder.path.exists()
    assert folder.run("serve", "status", folder.path).exit_code == 1
    folder.start()
    folder.stop()
    again = folder.stop()
    assert again.exit_code == 0
    assert "nothing was running" in again.stderr


def test_a_port_in_use_is_refused_by_its_holder(folder: Folder) -> None:
    with socket.create_server(("127.0.0.1", folder.port)):
        result = folder.start()
    assert result.exit_code == 1
    assert f"--port {folder.port}: process {os.getpid()} (" in result.stderr
    assert folder.status()["condition"] == "none"


def test_an_answer_from_someone_else_is_no_health(folder: Folder, tmp_path: Path) -> None:
    """As if another server had taken the port just before this one wanted it."""
    other = Folder(tmp_path / "other", folder.target, free_port())
    assert folder.start().exit_code == 0
    try:
        assert other.start().exit_code == 0
        other.edit_state(lambda state: state["config"].update(port=folder.port))
        body = other.status()
        assert body["condition"] == "running"
        assert f"process {folder.status()['pid']} (" in body["reason"]
        assert "which is not the server's" in body["reason"]
    finally:
        other.stop()


def test_a_folder_that_cannot_be_written(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder.path = tmp_path / "file" / "serving"
    result = folder.start()
    assert result.exit_code == 1
    assert "Not a directory" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(folder: Folder) -> None:
    folder.path.mkdir(mode=0o500)
    result = folder.start()
    assert result.exit_code == 1
    assert "Permission denied" in result.stderr


def test_an_engine_that_is_not_there(folder: Folder, engines: Path) -> None:
    (engines / "vllm").rename(engines / "gone")
    result = folder.start()
    assert result.exit_code == 1
    assert f"vllm is not installed for {sys.executable}" in result.stderr
    assert "--python" in result.stderr
    assert folder.start("--python", "/no/such/python").exit_code == 2


def test_a_state_of_before_the_last_boot(folder: Folder) -> None:
    folder.start()
    folder.stop()
    folder.edit_state(lambda state: state.update(boot="earlier", stop_asked_at=None))
    assert folder.status()["condition"] == "dead"
    folder.edit_state(lambda state: state.update(host="elsewhere"))
    result = folder.start()
    assert result.exit_code == 1
    assert "was started on elsewhere" in result.stderr
    folder.edit_state(lambda state: state.update(host=socket.gethostname()))
    assert folder.start().exit_code == 0


def every_command(folder: Folder) -> Iterator[Result]:
    """What each command of eyas serve says of ``folder``."""
    for arguments in (["status"], ["stop"], ["restart"], ["start", "--engine", "vllm", "--target", folder.target]):
        yield CliRunner().invoke(main, ["serve", arguments[0], str(folder.path), *map(str, arguments[1:])])


def test_a_damaged_state_says_what_may_still_run(folder: Folder, tmp_path: Path) -> None:
    state = folder.path / "serve.json"
    folder.path.mkdir()
    state.write_text('{"id":')
    result = folder.start()
    assert result.exit_code == 1
    assert f"{state}: not as eyas serve writes it (Input data was truncated)" in result.stderr
    assert f"{folder.path / 'logs' / 'serve.log'}: none that can be seen from here" in result.stderr
    state.unlink()
    assert folder.start().exit_code == 0
    body, whole = folder.status(), state.read_text()
    state.write_text(whole.replace('"started_at"', '"begun_at"'))
    for result in every_command(folder):
        assert result.exit_code == 1, result.output
        assert "missing required field `started_at`" in result.stderr
        assert f"{body['pid']} ({sys.executable} -m vllm" in result.stderr
        assert f"{body['supervisor']['pid']} (" in result.stderr
        assert f"stopped it: process {os.getpid()} on {socket.gethostname()}." in result.stderr
    state.write_text(whole)
    assert folder.status()["pids"] == body["pids"]  # nothing was ended on its word
    assert folder.stop().exit_code == 0


def test_a_missing_state_says_what_still_runs(folder: Folder) -> None:
    folder.start()
    body, state, aside = folder.status(), folder.path / "serve.json", folder.path / "aside.json"
    state.rename(aside)
    for result in every_command(folder):
        assert result.exit_code == 1, result.output
        assert f"{state}: not there, though a server started here seems to run" in result.stderr
        assert f"{body['pid']} ({sys.executable} -m vllm" in result.stderr
        assert f"{body['supervisor']['pid']} (" in result.stderr
    aside.rename(state)
    assert folder.status()["pids"] == body["pids"]  # nothing was ended on that evidence
    assert folder.stop().exit_code == 0
    until(lambda: not any(map(is_alive, folder.seen)))
    state.unlink()
    assert folder.status()["condition"] == "none"
    assert folder.start().exit_code == 0
    assert folder.stop().exit_code == 0


def test_a_damaged_outcome_is_named(folder: Folder) -> None:
    folder.start("--", "--exit-with", "7")
    (outcome,) = (folder.path / "logs").glob("serve-*.json")
    outcome.write_text("{")
    assert f"{outcome}: not as eyas serve writes it" in folder.run("serve", "status", folder.path).stderr


def test_a_folder_that_was_moved_knows_how_its_server_ended(folder: Folder) -> None:
    folder.start()
    body = folder.status()
    folder.path = folder.path.rename(folder.path.parent / "moved")
    assert folder.status()["pids"] == body["pids"]
    stopped = folder.stop()
    assert stopped.exit_code == 0
    assert "stopped (the engine was ended by SIGTERM)" in stopped.stdout
    until(lambda: not any(map(is_alive, folder.seen)))


def test_old_logs_go(folder: Folder) -> None:
    logs = folder.path / "logs"
    logs.mkdir(parents=True)
    for day in range(10, 25):
        (logs / f"serve-202001{day}T000000.000.log").touch()
        (logs / f"serve-202001{day}T000000.000.json").touch()
    folder.start()
    kept = sorted(path.name for path in logs.glob("serve-*.log"))
    assert len(kept) == 11
    assert kept[0] == "serve-20200115T000000.000.log"
    assert len(list(logs.glob("serve-*.json"))) == 10


def test_a_recipe(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = f'[serve]\nengine = "vllm"\ntarget = "{folder.target}"\nport = {folder.port}\ntp = 2\ngrace = "20s"\n'
    Path("eyas.toml").write_text(recipe)
    assert folder.run("serve", "start", folder.path).exit_code == 0
    assert folder.status()["config"]["tp"] == 2
    Path("eyas.toml").write_text(recipe.replace("tp = 2", "tp = 3"))
    assert folder.restart().exit_code == 0
    assert folder.status()["config"]["tp"] == 2
    Path("eyas.toml").write_text("[serve]\nports = 1\n")
    result = CliRunner().invoke(main, ["serve", "status", str(folder.path)])
    assert result.exit_code == 2
    assert "has no option 'ports'" in result.stderr
