"""Each row of the parallel layer has a test that says so, and the page of rows is made from what tests say."""

from __future__ import annotations

from tests import rows


def test_every_row_has_a_test_and_the_page_says_which() -> None:
    lacking = sorted(set(rows.ROWS) - set(rows.shown()), key=rows.row_key)
    assert set(lacking) == rows.NOT_YET, f"no test is marked with @pytest.mark.row for {', '.join(lacking)}"
    assert rows.PAGE.read_text() == rows.page(), "make it anew: python -m tests.rows --write"
