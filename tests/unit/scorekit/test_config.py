"""Check that YAML and overrides become a valid config or give a one-line error."""

from __future__ import annotations

import pytest
import yaml
from pydantic import field_validator

from scorekit.config import Config, load_config, save_config
from scorekit.errors import UserError


class Inner(Config):
    lr: float = 1e-6


class Part(Config):
    limit: int = 1

    @field_validator("limit")
    @classmethod
    def _check(cls, limit: int) -> int:
        if limit < 0:
            raise ValueError("a sentence of ours")
        return limit


class Outer(Config):
    rl: Inner = Inner()
    name: str = "x"
    first: Part = Part()
    second: Part = Part()
    sets: dict[str, Part] = {}  # noqa: RUF012


def _write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_then_overrides(tmp_path):
    path = _write(tmp_path, "name: 한국어\nrl:\n  lr: 0.5\n")
    cfg = load_config(Outer, path, ["rl.lr=1.0e-4"])
    assert (cfg.name, cfg.rl.lr) == ("한국어", 1e-4)


def test_an_override_may_fill_a_section_left_blank(tmp_path):
    assert load_config(Outer, _write(tmp_path, "rl:\n"), ["rl.lr=0.5"]).rl.lr == 0.5


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load_config(Outer, _write(tmp_path, "")) == Outer()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rl:\n  lrr: 1", "rl.lrr: Extra inputs are not permitted"),
        ("rl:\n  lr: fast", "rl.lr: Input should be a valid number"),
        ("first:\n  limit: -1", ": first.limit: a sentence of ours"),
        ("- a", "a config is a mapping of keys, not a list"),
        ("a: [", "not YAML"),
        ("a: 2020-99-99", "not YAML: month must be in 1..12"),
        ("a: " + "[" * 5000, "not YAML"),
        ("name: a\nname: b", "the key 'name' is there twice"),
    ],
)
def test_a_fault_names_file_and_key(tmp_path, text, reason):
    path = _write(tmp_path, text)
    with pytest.raises(UserError, match="c.yaml.*" + reason.replace(".", r"\.")):
        load_config(Outer, path)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("rl.lrr=1", " (did you mean rl.lr?)"),
        ("nmae=x", " (did you mean name?)"),
        ("lr=1", " (did you mean rl.lr?)"),  # a key of another section
        ("rl.name=x", " (did you mean name?)"),
        ("limit=1", " (did you mean first.limit?)"),  # the first of two such keys
        ("sets.a.lmit=1", " (did you mean sets.a.limit?)"),  # in a section with a user-defined name
        ("rll.lr=1", " (did you mean rl?)"),
        ("rl.patience=1", ""),
    ],
)
def test_an_unknown_key_suggests_the_nearest(override, meant):
    with pytest.raises(UserError) as error:
        load_config(Outer, None, [override])
    assert str(error.value).endswith(f"Extra inputs are not permitted{meant}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.yaml: cannot be read: No such file"):
        load_config(Outer, tmp_path / "gone.yaml")


@pytest.mark.parametrize("override", ["rl.lr", "=3", "name.x=1"])
def test_a_malformed_override_is_refused(tmp_path, override):
    with pytest.raises(UserError, match="override"):
        load_config(Outer, _write(tmp_path, "name: a"), [override])


def test_a_saved_config_loads_again(tmp_path):
    save_config(Outer(name="번역"), tmp_path / "r.yaml")
    assert load_config(Outer, tmp_path / "r.yaml") == Outer(name="번역")
    assert yaml.safe_load((tmp_path / "r.yaml").read_text())["rl"] == {"lr": 1e-6}


@pytest.mark.parametrize("value", ["http://me:hidden@host/v1", '"https://:hidden@host"'])
def test_a_password_is_refused_on_the_command_line(value):
    with pytest.raises(UserError, match=r"--set rl\.url: a password") as caught:
        load_config(Outer, overrides=[f"rl.url={value}"])
    assert "hidden" not in str(caught.value)
