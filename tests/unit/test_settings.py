"""What a field of a configuration means, read off the docstring under it."""

import sys
import types

import pytest
from pydantic import Field, create_model

from asyncflow.settings import Settings, description


class Base(Settings):
    first: int = 1
    """One
    and more."""
    second: int = 2


class Own(Base):
    second: int = 3
    """Said by the subclass."""
    third: int = Field(4, description="Said by the field.")


def test_the_docstring_under_a_field_describes_it_in_one_line() -> None:
    assert [description(Own, name) for name in Own.model_fields] == [
        "One and more.",
        "Said by the subclass.",
        "Said by the field.",
    ]
    assert description(Base, "second") == ""


def test_a_model_without_source_is_described_by_its_fields() -> None:
    made = create_model("Made", __base__=Settings, plain=(int, 1), said=(int, Field(2, description="two\n  lines")))
    assert [description(made, name) for name in made.model_fields] == ["", "two lines"]


def test_a_class_of_a_module_without_a_file_is_described_by_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ghost", types.ModuleType("ghost"))
    made = type("Ghost", (Settings,), {"__module__": "ghost", "__annotations__": {"plain": int}, "plain": 1})
    assert description(made, "plain") == ""
