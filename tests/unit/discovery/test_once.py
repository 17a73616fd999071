"""Detection happens once, at the first use: counted over 500 distributions, by threads, across fork."""

import pytest

COUNTING = """
import importlib.metadata as metadata, json, sys, threading
counts = {"scans": 0, "files": 0}
def counted(*args, _real=metadata.entry_points, **kwargs):
    counts["scans"] += 1
    return _real(*args, **kwargs)
metadata.entry_points = counted
def audit(event, args):
    if event == "open" and str(args[0]).endswith("entry_points.txt"):
        counts["files"] += 1
sys.addaudithook(audit)
import polyattn, polyattn.vendor
from polyattn.discovery import backends_of, current_platform, platform_for, platforms
"""

READS = """
steps = [dict(counts)]
def reads():
    for _ in range(100):
        current_platform.name, current_platform.is_cpu(), platform_for("cpu"), backends_of(current_platform.platform)
gate = threading.Barrier(2)
def thread():
    gate.wait()
    reads()
threads = [threading.Thread(target=thread) for _ in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
steps.append(dict(counts))
reads(), platforms()
steps.append(dict(counts))
unchosen = sorted(m for m in sys.modules if m.startswith("kernels_"))
print(json.dumps([steps, sorted(getattr(sys, "asked", [])), unchosen, current_platform.name]))
"""


def six_plugins_among_500_distributions(sites):
    crowd = "".join(f"crowd-{number} " for number in range(500)).split()
    folder = sites.root / "crowd"
    sites.paths.append(str(folder))
    for number, name in enumerate(crowd):
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        if number % 2:
            (info / "entry_points.txt").write_text("[console_scripts]\nrun = crowd:main\n")
    for number in range(6):
        name = f"plug{number}"
        probe = "Found()" if number > 3 else "Declined('none')"
        sites.add_platform(name, device_type=name, priority=number, probe=probe, backends=f"'kernels_{name}:ALL'")
        sites.add(f"kernels-{name}", {f"kernels_{name}": "ALL = ()"})


def test_one_scan_and_one_probe_each(sites):  # fault row 26
    six_plugins_among_500_distributions(sites)
    (imported, read, again), asked, unchosen, name = sites.run(COUNTING + READS)
    assert imported == {"scans": 0, "files": 0}, "importing polyattn reads no entry points"
    assert read["scans"] == 1
    assert again == read, "neither later reads nor the second thread scan again"
    assert asked == sorted(f"{what} plug{n}" for n in range(6) for what in ("import", "probe"))
    assert name == "plug5"
    assert unchosen == ["kernels_plug5"], "kernels of unchosen platforms stay unimported"
    _, asked, unchosen, name = sites.run(COUNTING + READS, {"POLYATTN_PLATFORM": "plug4"})
    assert (name, asked, unchosen) == ("plug4", ["import plug4", "probe plug4"], ["kernels_plug4"])


def test_importing_it_imports_no_plugin_and_no_torch(sites):
    sites.add_platform("toy")
    code = """
import json, sys
import polyattn.environment, polyattn.vendor
core = "torch" in sys.modules
import polyattn.discovery
print(json.dumps([core, "torch" in sys.modules, getattr(sys, "asked", [])]))
"""
    core, torch, asked = sites.run(code)
    assert asked == []
    assert torch == core, "discovery itself never imports torch"


def test_waiting_threads_share_one_slow_detection(sites):
    sites.add_platform("toy", probe="__import__('time').sleep(0.2) or Found()")
    answer = sites.ask("""
import sys, threading
seen = []
threads = [threading.Thread(target=lambda: seen.append(current_platform.name)) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
result = [seen, sys.asked]
""")
    assert answer.result == [["toy"] * 8, ["import toy", "probe toy"]]


FORKED = """
import json, os, sys
def in_child(ask):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, json.dumps(ask()).encode())
        os._exit(0)
    os.close(write)
    text = os.fdopen(read).read()
    os.waitpid(child, 0)
    return json.loads(text)
"""


def test_a_forked_child_has_the_parents_result(sites):
    sites.add_platform("toy")
    answer = sites.ask(
        FORKED
        + """
parent = current_platform.name
result = [parent, in_child(lambda: [current_platform.name, len(platforms()), sys.asked])]
"""
    )
    assert answer.result == ["toy", ["toy", 2, ["import toy", "probe toy"]]]


@pytest.mark.parametrize("lock", ["discovery", "environment"])
def test_a_fork_during_detection_does_not_hang_the_child(sites, lock):
    sites.add_platform("toy", probe="sys.gate.wait() and Found()")
    answer = sites.ask(
        FORKED
        + f"""
import threading, time, signal
sys.gate, holding = threading.Event(), threading.Event()
if {lock!r} == "discovery":
    thread = threading.Thread(target=lambda: current_platform.name)
    thread.start()
    while "import toy" not in getattr(sys, "asked", []):
        time.sleep(0.001)
else:
    from polyattn import environment as module
    def hold():
        with module._lock:
            holding.set(); sys.gate.wait()
    thread = threading.Thread(target=hold)
    thread.start(); holding.wait()
def ask():
    signal.alarm(20)
    sys.gate.set()
    return current_platform.name
result = in_child(ask)
sys.gate.set()
thread.join()
result = [result, current_platform.name]
"""
    )
    assert answer.result == ["toy", "toy"], answer.error
