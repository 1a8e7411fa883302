from __future__ import annotations

import pytest

from megatron01.checkpoint.manifest import (
    TRACKER_NAME,
    existing_folder,
    incomplete_folder,
    iteration_folder,
    locate,
    publish,
    read_tracker,
    write_tracker,
)
from megatron01.errors import UserError
from tests.unit.checkpoint.saved import make_empty


def test_names_are_megatrons(tmp_path):
    assert iteration_folder(tmp_path, 40).name == "iter_0000040"
    assert iteration_folder(tmp_path, 123456789).name == "iter_123456789"


def test_tracker_is_replaced_and_leaves_nothing_beside(tmp_path):
    assert read_tracker(tmp_path) is None
    assert read_tracker(tmp_path / "nowhere") is None
    write_tracker(tmp_path, 10)
    write_tracker(tmp_path, 20)
    assert read_tracker(tmp_path) == 20
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER_NAME]


@pytest.mark.parametrize("text", ["", "release", "-3", "1.5", "\x00\xff"])
def test_tracker_with_other_content_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / TRACKER_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=f"{TRACKER_NAME}.*expected the number"):
        read_tracker(tmp_path)


def test_locate_takes_the_newest_or_the_one_that_is_named(tmp_path):
    make_empty(tmp_path, 5)
    make_empty(tmp_path, 10)
    assert locate(str(tmp_path)) == (tmp_path, 10)
    make_empty(tmp_path, 12345678)
    (tmp_path / TRACKER_NAME).unlink()
    assert locate(str(tmp_path)) == (tmp_path, 12345678)
    assert locate(str(tmp_path / "iter_0000005")) == (tmp_path, 5)
    assert locate(f"{tmp_path}/iter_0000005/") == (tmp_path, 5)


def test_locate_without_checkpoint(tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        locate(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=TRACKER_NAME):
        locate(str(tmp_path))


def test_an_incomplete_checkpoint_does_not_count(tmp_path):
    incomplete_folder(tmp_path, 10).mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        locate(str(tmp_path))
    with pytest.raises(UserError, match="no complete checkpoint"):
        locate(str(incomplete_folder(tmp_path, 10)))


def test_publish_replaces_an_older_checkpoint_of_the_same_iteration(tmp_path):
    final, incomplete = iteration_folder(tmp_path, 3), incomplete_folder(tmp_path, 3)
    for content in ("old", "new"):
        incomplete.mkdir()
        (incomplete / "file").write_text(content)
        publish(incomplete, final)
    assert (final / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == [final.name]


def test_an_interrupted_replacement_leaves_the_older_checkpoint(tmp_path):
    final, incomplete = iteration_folder(tmp_path, 3), incomplete_folder(tmp_path, 3)
    final.mkdir()
    (final / "file").write_text("old")
    assert existing_folder(tmp_path, 3) == final
    with pytest.raises(FileNotFoundError):
        publish(incomplete, final)  # there is no replacement
    assert (existing_folder(tmp_path, 3) / "file").read_text() == "old"
    incomplete.mkdir()
    publish(incomplete, final)
    assert existing_folder(tmp_path, 3) == final and list(final.iterdir()) == []
