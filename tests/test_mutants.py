"""The list of `make mutants` fits the sources and the tests. That the tests notice is seen by running it."""

import re

from tests.mutants.__main__ import ROOT, in_rotation, listed


def test_each_change_applies_and_names_a_test_that_exists():
    for mutant in listed():
        assert mutant.applied(ROOT) != (ROOT / mutant.file).read_text(encoding="utf-8")
        assert "\n" not in mutant.old + mutant.new
        file, _, name = mutant.tests.partition("::")
        assert re.search(rf"^(async )?def {name or 'test_'}", (ROOT / file).read_text(encoding="utf-8"), re.M), mutant


def test_all_come_round_in_rotation():
    mutants = listed()
    step = -(-len(mutants) // 10)
    parts = [in_rotation(mutants, 10, day) for day in range(700_000, 700_000 + step)]
    assert sorted(sum(parts, [])) == sorted(mutants) and all(1 <= len(part) <= 10 for part in parts)
