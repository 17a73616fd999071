"""Which candidates may be asked: names, owners, clashes, allow-list, override. Pure; nothing is imported yet."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from polyattn.discovery.scan import PLATFORMS, Candidate
from polyattn.environment import PLATFORM, PLUGINS, Environment

#: Built-in names and the one distribution that may register each.
BUILT_IN = {
    "cpu": "polyattn",
    "cuda": "polyattn-cuda",
    "rocm": "polyattn-rocm",
    "npu": "polyattn-npu",
    "xpu": "polyattn-xpu",
    "musa": "polyattn-musa",
}
OURS = frozenset(BUILT_IN.values())

#: The platform that is part of the core and always answers.
EMBEDDED = Candidate(PLATFORMS, "cpu", "polyattn.cpu:platform", "polyattn", "(no metadata)")

_PLATFORM_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BACKEND_NAME = re.compile(r"([a-z][a-z0-9_]*)\.([a-z0-9_]+)")


@dataclass(frozen=True)
class Verdict:
    """A candidate, and why it must not be asked: `failed` is its own fault, `skipped` is somebody's choice.

    shared    the fault is a clash, and its text speaks for every rival
    """

    candidate: Candidate
    failed: str = ""
    skipped: str = ""
    shared: bool = False

    @property
    def may_be_asked(self) -> bool:
        return not self.failed and not self.skipped


def judge_platforms(candidates: Iterable[Candidate], env: Environment) -> tuple[Verdict, ...]:
    """One verdict a platform candidate; the embedded platform is added where no metadata names it."""
    verdicts = [
        _allowed(candidate, env) or _misnamed(candidate) or _squatting(candidate) or _left_out(candidate, env)
        for candidate in candidates
    ]
    if not any(v.candidate.name == EMBEDDED.name and not v.failed and v.candidate.owner in OURS for v in verdicts):
        verdicts.append(_left_out(EMBEDDED, env))
    return _without_clashes("platform", verdicts)


def judge_backends(candidates: Iterable[Candidate], env: Environment) -> tuple[Verdict, ...]:
    """One verdict a third-party backend, as far as its name and distribution go."""
    return _without_clashes("backend", [_allowed(c, env) or _named_backend(c) for c in candidates])


def split_backend_name(name: str) -> tuple[str, str]:
    """The platform and the backend in "<platform>.<backend>"."""
    platform, _, backend = name.partition(".")
    return platform, backend


def _allowed(candidate: Candidate, env: Environment) -> Verdict | None:
    if env.plugins is None or candidate.owner in env.plugins or candidate.owner in OURS:
        return None
    text = env.given.get(PLUGINS, ",".join(sorted(env.plugins)))
    return Verdict(candidate, skipped=f"distribution {candidate.distribution} is not in {PLUGINS}={text!r}")


def _left_out(candidate: Candidate, env: Environment) -> Verdict:
    if env.platform is None or candidate.name == env.platform:
        return Verdict(candidate)
    return Verdict(candidate, skipped=f"{PLATFORM}={env.given.get(PLATFORM, env.platform)!r} loads only that platform")


def _misnamed(candidate: Candidate) -> Verdict | None:
    if candidate.unreadable:
        return Verdict(candidate, failed=candidate.unreadable)
    if _PLATFORM_NAME.fullmatch(candidate.name):
        return None
    return Verdict(candidate, failed="a platform's name is lower case letters, digits and '_', with a letter first")


def _named_backend(candidate: Candidate) -> Verdict:
    if _BACKEND_NAME.fullmatch(candidate.name):
        return Verdict(candidate)
    wanted = "the entry point must be named \"<platform>.<backend>\", in lower case letters, digits and '_'"
    return Verdict(candidate, failed=wanted)


def _squatting(candidate: Candidate) -> Verdict | None:
    owner = BUILT_IN.get(candidate.name)
    if owner is None or owner == candidate.owner:
        return None
    return Verdict(
        candidate,
        failed=f"the name {candidate.name!r} is built in and only distribution {owner} may register it; "
        f"{candidate.distribution} must choose another",
    )


def _without_clashes(what: str, verdicts: list[Verdict]) -> tuple[Verdict, ...]:
    contenders: dict[str, list[Candidate]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.may_be_asked:
            contenders[verdict.candidate.name].append(verdict.candidate)
    clashes = {name: _clash(what, name, rivals) for name, rivals in contenders.items() if len(rivals) > 1}
    return tuple(
        Verdict(v.candidate, failed=clashes[v.candidate.name], shared=True)
        if v.may_be_asked and v.candidate.name in clashes
        else v
        for v in verdicts
    )


def _clash(what: str, name: str, rivals: list[Candidate]) -> str:
    known = " and ".join(sorted(f"{rival.distribution} {rival.version}" for rival in rivals))
    return (
        f"{what} {name!r} is registered by several distributions: {known}; none of them is used. "
        f"Uninstall all but one, or name the one you want in {PLUGINS}"
    )
