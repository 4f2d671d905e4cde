"""The fault table is whole, and its page names the tests that there are."""

from tests.faults.table import PAGE, ROWS, SEEN_ELSEWHERE, listed_tests, marked_tests


def test_every_row_has_a_test() -> None:
    assert [*ROWS] == [str(row) for row in range(1, 41)]
    marked = marked_tests()
    assert not [row for row in (*ROWS, *SEEN_ELSEWHERE) if not marked[row]]


def test_the_page_names_the_tests_that_there_are() -> None:
    """If this fails, a test was added, renamed or taken away: `make faults` writes the page anew."""
    assert listed_tests(PAGE.read_text()) == marked_tests()
