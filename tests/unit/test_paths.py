import pytest

from kvlab import paths
from kvlab.paths import check_out, check_path, written_whole

pytestmark = pytest.mark.unit


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with written_whole(path) as scratch:
        scratch.write_text("new")
        assert path.read_text() == "old" and scratch.parent == tmp_path
    assert path.read_text() == "new" and [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(error, tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), written_whole(path) as scratch:
        scratch.write_text("half")
        raise error
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_two_writers_do_not_meet(tmp_path):
    from threading import Thread

    paths = []

    def write():
        with written_whole(tmp_path / "file") as scratch:
            scratch.write_text("whole")
            paths.append(scratch)

    with written_whole(tmp_path / "file") as scratch:
        scratch.write_text("whole")
        thread = Thread(target=write)
        thread.start()
        thread.join()
    assert scratch not in paths and (tmp_path / "file").read_text() == "whole"


def test_a_folder_that_is_missing_is_the_error(tmp_path):
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "missing" / "file") as scratch:
        scratch.write_text("")


def test_a_folder_that_can_be_made_is_accepted_and_not_made(tmp_path):
    check_out(tmp_path)
    check_out(tmp_path / "new" / "newer")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_file_is_no_folder(below, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^logs is .*, which cannot be written \(.*file is no folder\); accepted: "):
        check_out(tmp_path / "file" / below, "logs")


def test_a_folder_without_permission_is_refused(monkeypatch, tmp_path):
    # As root everything may be written.
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"^out is .*no permission in"):
        check_out(tmp_path / "x" / "y")


def test_a_path_is_text_or_a_path(tmp_path):
    assert check_path(str(tmp_path), "out") == check_path(tmp_path, "out") == tmp_path
    with pytest.raises(TypeError, match="out is 5; accepted: a path"):
        check_path(5, "out")
