"""Budgets: of a file, of the page, and what is wrong with one."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest

from enginewright.optimizer.build_budget import Budget, read_budget
from enginewright.runtime.shared.errors import RequestError


def test_a_budget_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "budget.toml"
    file.write_text("kl_mean = 0.5\nspeed = false\nkl_max = inf\nsize_ratio = 2\n")
    assert read_budget(file) == Budget(kl_mean=0.5, speed=False, kl_max=math.inf, size_ratio=2.0)
    assert read_budget(file, Budget(decode_ratio=3)).decode_ratio == 3
    file.write_text(Budget(kl_max=math.inf).to_toml())
    assert read_budget(file) == Budget(kl_max=math.inf)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kl_maen = 1", r"kl_maen: unknown key\n  Did you mean 'kl_mean'"),
        ("zzz = 1", "zzz: unknown key\n  Known keys: tokens_changed, "),
        ("kl_mean = -1", "kl_mean: Input should be greater than or equal to 0"),
        ("kl_mean = nan", "kl_mean: "),
        ("size_ratio = 0", "size_ratio: "),
        ("speed = 1", "speed: it must be true or false"),
        ("kl_max = 'much'", "kl_max: "),
        ("kl_mean 1", "not TOML"),
    ],
)
def test_a_budget_that_is_wrong_is_named(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "budget.toml").write_text(text)
    with pytest.raises(RequestError, match=f"budget: .*budget.toml: {named}"):
        read_budget(tmp_path / "budget.toml")
    with pytest.raises(RequestError, match="can't be read"):
        read_budget(tmp_path / "none.toml")


def test_the_page_s_budget_is_the_default(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs/use/commands/verify.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "budget.toml").write_text(block)
    assert tomllib.loads(block).keys() == Budget.model_fields.keys()
    assert read_budget(tmp_path / "budget.toml", Budget(kl_mean=9)) == Budget()
    table = page[page.index("| check |") :].partition("\n\n")[0]
    checks = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines())))
    options = {"layers", "speed", "speed_margin"}
    assert checks == Budget.model_fields.keys() - options
