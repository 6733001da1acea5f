"""The content folders: probes (C and TOML), tuning (Python), playbooks (Markdown).

A checkout has them beside ``kvprobe/``, a wheel carries them in ``kvprobe/_content/``, and the
environment variable ``KVPROBE_CONTENT`` (or ``kvprobe --content DIR``) names a folder that is
searched first. They are deliberately not import packages: a top-level ``tuning`` in site-packages
could be shadowed by a folder of the user's.

Tuners and probes run with the rights of the caller. So root refuses a content file that somebody
else could have written.
"""

import os
import re
import sys
import traceback
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from stat import S_IWGRP, S_IWOTH

from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Tuner

ENVIRONMENT = "KVPROBE_CONTENT"
_HERE = Path(__file__).resolve().parent
_SLUG = re.compile(r"[a-z][a-z0-9_]*")


def directory(kind: str) -> Path:
    """The folder of one kind: ``probes``, ``tuning`` or ``playbooks``.

    An override folder that lacks the kind leaves the shipped one in force.

    Raises:
        KvprobeError: the override is no folder, or this installation lacks the kind.
    """
    roots = [_HERE / "_content", _HERE.parent]
    if override := os.environ.get(ENVIRONMENT):
        if not Path(override).is_dir():
            raise KvprobeError(
                f"no content folder at {override}", f"correct --content or unset {ENVIRONMENT}"
            )
        roots.insert(0, Path(override).resolve())
    for root in roots:
        if (path := root / kind).is_dir():
            return path
    raise KvprobeError(
        f"no {kind} folder in this installation",
        f"reinstall kvprobe, or name a folder that has {kind}/ with --content DIR",
        ExitCode.UNSUPPORTED,
    )


def files(kind: str, suffix: str) -> dict[str, Path]:
    """Files of one kind whose names end in ``suffix`` (``.toml``, ``.bpf.c``), by stem, sorted.

    Only snake_case stems count: READMEs and files with a leading underscore are left out.

    Raises:
        KvprobeError: no such folder, or root cannot trust one of the files.
    """
    found = {}
    for path in sorted(directory(kind).glob(f"*{suffix}")):
        stem = path.name.removesuffix(suffix)
        if _SLUG.fullmatch(stem):
            found[stem] = ensure_trusted(path)
    return found


def ensure_trusted(path: Path) -> Path:
    """Return ``path``; as root, refuse it if another user could have written it.

    Looked at are the file, its folder and, for a symbolic link, those of its target. Trusted
    owners are root and the owner of kvprobe's own code, who could change that just as well.

    Raises:
        KvprobeError: writable by others, or owned by another user, or unreadable.
    """
    if os.geteuid() != 0:
        return path
    try:
        own = _HERE.stat()
        target = path.resolve(strict=True)
        for place in dict.fromkeys((path.parent, target.parent, target)):
            status = place.stat()
            why = ""
            if status.st_uid not in (0, own.st_uid):
                why = f"is owned by user {status.st_uid}"
            elif status.st_mode & S_IWOTH:
                why = "is writable by everyone"
            elif status.st_mode & S_IWGRP and status.st_gid not in (0, own.st_gid):
                why = f"is writable by group {status.st_gid}"
            if why:
                raise KvprobeError(
                    f"root does not run {path}: {place} {why}",
                    f"read it, then: chown root: {place} && chmod go-w {place}",
                    ExitCode.UNSUPPORTED,
                )
    except OSError as error:
        raise KvprobeError(f"cannot read {path}: {error.strerror}") from error
    return path


def tuners() -> dict[str, Tuner]:
    """Every tuner by name, in order of names.

    Raises:
        KvprobeError: a file does not run, exports no ``TUNER``, or is not to be trusted.
    """
    return {name: _load_tuner(name, path) for name, path in files("tuning", ".py").items()}


def _load_tuner(name: str, path: Path) -> Tuner:
    module_name = f"kvprobe._tuning.{name}"
    spec = spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise KvprobeError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise KvprobeError(
            f"tuner {path} does not run: {type(error).__name__}: {error}{_line_in(path, error)}",
            "correct the file, or leave out --content to use the tuners that came with kvprobe",
        ) from error
    tuner = getattr(module, "TUNER", None)
    if not isinstance(tuner, Tuner) or tuner.name != name:
        raise KvprobeError(
            f"tuner {path} exports no TUNER of the name {name}",
            "a tuner file exports TUNER = kvprobe.api.Tuner(name=..., answers=..., propose=...)",
        )
    return tuner


def _line_in(path: Path, error: Exception) -> str:
    """Where in the tuner's own file the error was raised; a syntax error says so itself."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def playbooks() -> dict[str, str]:
    """The Markdown text of every playbook by slug, in order of slugs.

    Raises:
        KvprobeError: a file cannot be read or is not UTF-8, or is not to be trusted.
    """
    return {slug: _read(path) for slug, path in files("playbooks", ".md").items()}


def playbook(slug: str) -> str:
    """The Markdown text of one playbook.

    Raises:
        KvprobeError: there is none of that slug (the hint names the closest ones), or see
            ``playbooks``.
    """
    known = files("playbooks", ".md")
    if slug not in known:
        close = get_close_matches(slug, known, n=3, cutoff=0.5)
        hint = "`kvprobe playbook` lists all"
        if close:
            hint = f"did you mean {', '.join(close)}? {hint}"
        raise KvprobeError(f"no playbook {slug!r}", hint)
    return _read(known[slug])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KvprobeError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KvprobeError(f"{path} is not UTF-8 text") from error
