"""What machine is this, and which backends are usable on it?

python benchmarks/cuda/facts.py [--out DIR]
"""

from __future__ import annotations

import json
import sys

from _record import arguments, machine_facts

from polyattn.cli.platform_facts import platform_facts
from polyattn.discovery import current_platform


def main() -> int:
    """Print, and write facts.json."""
    asked = arguments(__doc__)
    facts = platform_facts(current_platform.platform, devices=1)
    data = {"machine": machine_facts(), "platform": {name: facts[name] for name in ("devices", "backends", "error")}}
    text = json.dumps(data, indent=2, default=str)
    print(text)
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "facts.json").write_text(text + "\n", encoding="utf-8")
    usable = [backend["backend"] for backend in facts["backends"] if backend["status"] == "usable"]
    print(f"{data['machine']['device']}: usable {', '.join(usable)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
