"""The frame of every command: exit codes, errors in one line, help, who gets which arguments."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import polyattn as pa
from polyattn.cli import demo as demo_room
from polyattn.cli import main
from polyattn.cli import verify as verify_room
from polyattn.cli.failure import UsageError
from polyattn.cli.parser import make_parser
from polyattn.environment import PolyattnWarning
from polyattn.testing.targets import targets


def test_help_lists_the_commands_that_exist(polyattn):
    answer = polyattn("--help")
    assert answer.code == 0
    commands = [line.split()[0] for line in answer.out.splitlines() if line.startswith("    ")]
    assert commands == ["info", "explain", "verify", "bench", "demo", "plan"]
    assert "exit codes:" in answer.out


@pytest.mark.parametrize("command", ["info", "explain", "verify", "bench", "demo", "plan"])
def test_every_command_has_json_and_says_its_exit_codes(polyattn, command):
    answer = polyattn(command, "--help")
    assert answer.code == 0
    assert "--json" in answer.out
    assert "2  wrong arguments" in answer.out


def test_version(polyattn):
    assert polyattn("--version").out.strip() == f"polyattn {pa.__version__}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: command"),
        (("nonsense",), "invalid choice: 'nonsense'"),
        (("info", "--loud"), "unrecognized arguments: --loud"),
        (("info", "--machine", "cpu", "--capabilities"), "not allowed with argument --machine"),
        (("verify", "--platform", "cuda", "--backend", "cpu:sdpa"), "of platform 'cpu', but --platform says 'cuda'"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(polyattn, arguments, said):
    answer = polyattn(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert said in answer.err


def test_verify_gets_its_platform_and_backend(polyattn, monkeypatch):
    calls = []
    monkeypatch.setattr(verify_room, "verify", lambda *names, as_json: calls.append((names, as_json)) or 1)
    assert polyattn("verify").code == 1, "the command's own code is the process's"
    polyattn("verify", "--backend", "cpu:sdpa", "--json")
    polyattn("verify", "--platform", "cpu", "--backend", "sdpa")
    assert calls == [((None, None), False), (("cpu", "sdpa"), True), (("cpu", "sdpa"), False)]


def test_verify_takes_every_platform_that_is_found_unless_one_is_named(polyattn, add_platform, no_vendors):
    add_platform(probe="Found()")
    assert {target.platform.name for target in targets()} == {"cpu", "toy"}
    assert {target.platform.name for target in targets("toy")} == {"toy"}
    assert "(default: every one that is found here)" in " ".join(polyattn("verify", "--help").out.split())


def test_demo_gets_its_sentences(polyattn, monkeypatch):
    calls = []
    monkeypatch.setattr(demo_room, "demo", lambda **given: calls.append(given) or 0)
    assert polyattn("demo", "--json", "--sentences", "mine.txt").code == 0
    assert calls == [{"as_json": True, "sentences": Path("mine.txt")}]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("bad file"), 2),
        (pa.BackendUnavailable("package flash-attn\nis not installed"), 2),
        (ModuleNotFoundError("No module named 'transformers'", name="transformers"), 2),
        (pa.UnsupportedRequest("nothing takes that"), 1),
        (PolyattnWarning("a plugin is broken (POLYATTN_STRICT=1)"), 1),
    ],
)
def test_a_users_error_is_one_line(polyattn, monkeypatch, error, code):
    def demo(**_):
        raise error

    monkeypatch.setattr(demo_room, "demo", demo)
    answer = polyattn("demo")
    assert answer.code == code
    assert answer.err.startswith("polyattn demo: ")
    assert answer.err.count("\n") == 1
    assert (getattr(error, "name", None) or str(error).splitlines()[0]) in answer.err


def test_a_bug_of_ours_keeps_its_traceback(polyattn, monkeypatch):
    def demo(**_):
        raise ModuleNotFoundError("No module named 'polyattn.demmo'", name="polyattn.demmo")

    monkeypatch.setattr(demo_room, "demo", demo)
    with pytest.raises(ModuleNotFoundError):
        polyattn("demo")


def test_interrupted(polyattn, monkeypatch):
    def demo(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_room, "demo", demo)
    assert polyattn("demo").code == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full, as Linux has")
@pytest.mark.parametrize("options", ["", "--json"])
def test_a_full_disk_is_one_line(options):
    code = f"import sys; from polyattn.cli import main; sys.exit(main(['info', '--capabilities', *{options.split()}]))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "polyattn info: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_streams_are_nobodys_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["info", "--capabilities"]) == 0
    assert main(["demo", "--sentences", "/nowhere"]) == 2


def test_our_warnings_are_one_line_on_stderr_and_others_stay_as_they_are(polyattn, monkeypatch):
    def demo(**_):
        warnings.warn("mind this", PolyattnWarning, stacklevel=1)
        warnings.simplefilter("always", RuntimeWarning)
        warnings.warn("somebody else's", RuntimeWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(demo_room, "demo", demo)
    show = warnings.showwarning
    answer = polyattn("demo")
    first, second, *_ = answer.err.splitlines()
    assert answer.code == 0
    assert first == "warning: mind this"
    assert second.endswith("RuntimeWarning: somebody else's")
    assert warnings.showwarning is show, "the process keeps its own way"


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("POLYATTN_STRICT", "perhaps", "not a switch"),
        ("POLYATTN_PLATFORM", "abacus", "names no platform"),
        ("POLYATTN_BACKEND", "abacus", "'abacus'"),
        ("POLYATTN_BACKEND", "auto,sdpa", "'auto' can only end a choice"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [("explain", "--q", "1,8,2,64"), ("verify",), ("demo",), ("info", "--machine"), ("info", "--capabilities")],
)
def test_a_wrong_variable_of_ours_stops_every_command(polyattn, monkeypatch, command, variable, text, said):
    monkeypatch.setenv(variable, text)
    answer = polyattn(*command)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert variable in answer.err
    assert said in answer.err


def test_help_needs_neither_torch_nor_rich():
    code = "import sys; sys.argv = ['polyattn', 'explain', '--help']; from polyattn.cli import main; main(); print({})"
    asked = "sorted({'torch', 'rich', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code.format(asked)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_parsing_gives_what_was_written():
    parse = make_parser().parse_args
    args = parse(["explain", "--q", "1, 8,2,64", "--window", "3,none"])
    assert (args.q, args.window) == ((1, 8, 2, 64), (3, None))
    assert parse(["explain", "--q", "1", "--window", "5"]).window == 5
    assert parse(["explain", "--q", "1", "--window", "none"]).window is None
