"""The process that runs discovery scenarios: polyattn is imported once, each scenario runs in a fork of that state.

One line of JSON in (paths, env, code), one line out (result, warnings, error). The scenario's distributions are put
first on sys.path, as PYTHONPATH would; its code leaves its answer in `result`.
"""

import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any

import polyattn.discovery
import polyattn.environment  # noqa: F401


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith("POLYATTN_")]:
        del os.environ[name]
    os.environ.update(scenario["env"])
    sys.path[0:0] = scenario["paths"]
    importlib.invalidate_caches()
    space: dict[str, Any] = {"__name__": "scenario", "result": None}
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile("from polyattn.discovery import *\n" + scenario["code"], "scenario.py", "exec"), space)
        except BaseException as raised:
            error = {
                "types": [kind.__name__ for kind in type(raised).__mro__],
                "text": str(raised),
                "fields": {name: getattr(raised, name, None) for name in ("platform", "backend")},
                "trace": traceback.format_exc(),
            }
    told = [{"type": w.category.__name__, "text": str(w.message), "file": w.filename} for w in caught]
    return {"result": space["result"], "warnings": told, "error": error}


def main() -> None:
    # Torch's import is the user's cost, and it may scan entry points itself: it is not part of any scenario.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.write(json.dumps(play(json.loads(line))) + "\n")
            answers.flush()
            os._exit(0)
        os.waitpid(child, 0)


main()
