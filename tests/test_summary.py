"""The table of steps."""

from regard.summary import Step, table


def test_totals_are_sums_and_what_does_not_apply_is_blank():
    text = table([Step("a", "first", (2, 3), 5, 7), Step("", "second", None, 11), Step("b", "third", (13,), None, 17)])
    assert text.splitlines()[-1].split() == ["total", "16", "24"]
    assert text.splitlines()[2].split() == ["second", "11"]
