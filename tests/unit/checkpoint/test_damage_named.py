from __future__ import annotations

import pytest

from megatron01.checkpoint.storage import damage_named
from megatron01.errors import UserError


@pytest.mark.parametrize(
    "error", [KeyError("meter"), TypeError("a\nb"), OverflowError("x" * 1000), RuntimeError("shape")]
)
def test_what_hostile_entries_lead_to_is_one_line_that_names_the_checkpoint(tmp_path, error):
    with (
        pytest.raises(UserError, match=r"is damaged: its metrics are invalid") as caught,
        damage_named(tmp_path, "metrics"),
    ):
        raise error
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "error", [UserError("as it is"), RuntimeError("Connection closed by peer"), KeyboardInterrupt()]
)
def test_other_errors_pass_as_they_are(tmp_path, error):
    with pytest.raises(type(error)) as caught, damage_named(tmp_path, "metrics"):
        raise error
    assert caught.value is error
