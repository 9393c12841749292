"""From the words ``my_module:fn`` or ``examples/x.py:fn`` to the function that they name."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder, all_suffixes
from pathlib import Path
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """The place of a function: ``source`` is a module's name or a file's path, ``attribute`` a dotted name in it."""

    text: str
    source: str
    attribute: str

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py") or os.sep in self.source


def parse_spec(text: str) -> Spec:
    """Read ``module:name`` or ``path.py:name``, without importing anything. Raises ValueError: no name after the colon, no such
    file, one that is no Python, a path that is no text."""
    source, colon, attribute = text.rpartition(":")
    if not colon or not source or not all(part.isidentifier() for part in attribute.split(".")):
        raise ValueError(f"candidate is {text!r}; it must be my_module:function or path/to/file.py:function")
    if text.encode(errors="ignore").decode() != text:
        raise ValueError(f"candidate is {text!r}; its path must be text in UTF-8, as the record is")
    spec = Spec(text, source, attribute)
    if spec.is_file and not Path(source).is_file():
        raise ValueError(f"candidate {text!r}: there is no file {source!r}")
    if spec.is_file and not source.endswith(tuple(all_suffixes())):
        suffix = EXTENSION_SUFFIXES[-1]
        raise ValueError(f"candidate {text!r}: {source!r} must end in .py, or as a compiled module does ({suffix})")
    return spec


def file_of(spec: Spec) -> Path | None:
    """The file that a function would be loaded from, found without running any of it; None where there is none."""
    if spec.is_file:
        return Path(spec.source)
    places: Iterable[str] | None = [*sys.path, str(Path.cwd())]
    found, name = None, ""
    for part in spec.source.split("."):
        name = f"{name}.{part}".lstrip(".")
        found = None if places is None else PathFinder.find_spec(name, list(places))
        places = None if found is None else found.submodule_search_locations
    return None if found is None or found.origin is None else Path(found.origin)


def files_digest(spec: str, against: Iterable[str]) -> str | None:
    """SHA-256 over the files of a function and of those of its rivals that are a user's functions themselves; None where one of
    them is not found. What those import is not in it."""
    digest = hashlib.sha256()
    for text in (spec, *(word for word in against if ":" in word)):
        path = file_of(parse_spec(text))
        if path is None or not path.is_file():
            return None
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def load(text: str) -> Any:
    """Import the module or file and return what its attribute names. Raises whatever the import raises; AttributeError: it has
    no such attribute; TypeError: that cannot be called."""
    spec = parse_spec(text)
    path = Path(spec.source).resolve() if spec.is_file else None
    folder = str(Path.cwd() if path is None else path.parent)
    if folder not in sys.path:  # a function may import from its own folder, after the harness's own places
        sys.path.append(folder)
    if path is None:
        module = importlib.import_module(spec.source)
    else:
        name = f"candidate_{path.stem}"  # a file may be called time.py
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except ImportError as error:
            if "no known parent package" not in str(error):
                raise
            as_module = f"package.{path.stem}:{spec.attribute}"
            raise ImportError(f"{error}; name it as a module of its package, as in {as_module}") from error
    named: Any = module
    for part in spec.attribute.split("."):
        if not hasattr(named, part):
            near = difflib.get_close_matches(part, dir(named), 1)
            raise AttributeError(f"{spec.source} has no {part}{f'; did you mean {near[0]}?' if near else ''}")
        named = getattr(named, part)
    if not callable(named):
        raise TypeError(f"{text} is a {type(named).__name__}, which cannot be called")
    return named
