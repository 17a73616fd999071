"""Our variables: how each text is read, once, and what POLYATTN_STRICT does to warnings."""

import warnings

import pytest

from polyattn import environment as env
from polyattn.environment import Environment, PolyattnWarning, read


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    env.reload_environment()
    yield
    monkeypatch.undo()
    env.reload_environment()


def test_nothing_set_and_blank_are_the_same():
    assert (
        read({})
        == read(dict.fromkeys(env.VARIABLES, ""))
        == read(dict.fromkeys(env.VARIABLES, " \t\n"))
        == Environment()
    )


def test_blanks_and_case_are_accepted_and_the_text_is_kept():
    found = read(
        {
            "POLYATTN_PLATFORM": " CUDA\n",
            "POLYATTN_BACKEND": " FA3, -Cudnn ",
            "POLYATTN_PLUGINS": "My.Kernels,,other__thing ",
            "POLYATTN_STRICT": " On ",
            "UNRELATED": "x",
        }
    )
    assert found == Environment("cuda", "fa3, -cudnn", frozenset({"my-kernels", "other-thing"}), strict=True)
    assert found.given["POLYATTN_BACKEND"] == " FA3, -Cudnn "
    assert "UNRELATED" not in found.given
    with pytest.raises(TypeError):
        found.given["POLYATTN_BACKEND"] = "x"  # type: ignore[index]
    hash(found)


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_switch_on(text):
    assert read({"POLYATTN_STRICT": text}).strict


@pytest.mark.parametrize("text", ["0", "False", "no", " OFF "])
def test_switch_off(text):
    assert not read({"POLYATTN_STRICT": text}).strict


@pytest.mark.parametrize("text", ["2", "maybe", "-1", "1 0"])
def test_switch_misspelt(text):
    with pytest.raises(ValueError, match=r"POLYATTN_STRICT=.*accepted: 1, true, yes, on or 0, false, no, off") as error:
        read({"POLYATTN_STRICT": text})
    assert repr(text) in str(error.value)


def test_it_is_read_once_until_reloaded(monkeypatch):
    first = env.environment()
    monkeypatch.setenv("POLYATTN_PLATFORM", "npu")
    assert env.environment() is first
    assert first.platform is None
    env.reload_environment()
    assert env.environment().platform == "npu"


def test_reload_calls_back_in_order_after_forgetting(monkeypatch):
    calls = []
    monkeypatch.setattr(env, "_callbacks", [])

    @env.on_reload
    def first():
        calls.append(("first", env.environment().backend))

    env.on_reload(lambda: calls.append("second"))
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa")
    env.reload_environment()
    assert calls == [("first", "sdpa"), "second"]
    assert callable(first)


def test_warnings_point_at_the_caller_and_become_errors(monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.warn("look here")
    assert [(w.category, w.filename, str(w.message)) for w in caught] == [(PolyattnWarning, __file__, "look here")]
    monkeypatch.setenv("POLYATTN_STRICT", "1")
    env.reload_environment()
    with pytest.raises(PolyattnWarning, match=r"look here \(POLYATTN_STRICT=1"):
        env.warn("look here")
    with pytest.raises(DeprecationWarning):
        env.warn("old", DeprecationWarning)
