"""The documentation as a site: `python3 dev.py docs`. The pages are also read on GitHub, so they use plain links."""

from __future__ import annotations

import importlib
import inspect
import os
import posixpath
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
django.setup()  # for the reference, which is made from docstrings

from django_mongolock import exceptions  # noqa: E402
from tests.docs.tables import public_names  # noqa: E402

project = "django-mongolock"
author = "django-mongolock contributors"
project_copyright = author
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # [a link](page.md#its-heading), as GitHub makes them
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # not everything in a signature has a page
autodoc_member_order = "bysource"
autoclass_content = "both"  # with the docstring of `__init__`
smartquotes = False
default_role = "code"  # docstrings name things `like_this`
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
highlight_language = "none"

#: Pages of the site that include files outside of this folder.
OUTSIDE = {
    "../README.md": "/index.md",
    "../CHANGELOG.md": "/project/changelog.md",
    "../CONTRIBUTING.md": "/project/contributing.md",
    "../SECURITY.md": "/project/security.md",
}
LINK = re.compile(r"(?<=\]\()([\w./-]+\.md)(?=[#)])")


def in_the_site(folder: str, text: str) -> str:
    """Turn the links of a page in *folder* (seen from docs/) into links from the top of the site."""

    def turned(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        return OUTSIDE.get(path, f"/{path}")

    return LINK.sub(turned, text)


#: Classes whose members are those of a class that is not ours.
OTHERS = {"EditLockMixin", "EditLockViewMixin", "EditedFilter", "Editor", "OnceTask", "Person", "SealedModelForm"}


def whole_docstrings(listed: dict[str, list[str]]) -> str:
    """What the site has below a table of names: their docstrings, as a part of the page."""
    parts = ["", "## In full"]
    for module, names in listed.items():
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            kind = "class" if inspect.isclass(thing) else "function" if callable(thing) else None
            kind = "exception" if kind == "class" and issubclass(thing, Exception) else kind
            if kind:
                members = "" if kind == "function" or name in OTHERS else "\n   :members:"
                parts.append(f"```{{eval-rst}}\n.. auto{kind}:: {module}.{name}{members}\n```")
    return "\n\n".join(parts)


#: The pages that are longer on the site than in the repository.
DOCSTRINGS = {
    "reference/api": lambda: whole_docstrings({**public_names(), "django_mongolock.exceptions": exceptions.__all__}),
}


def arguments_apart(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make a list of a docstring's paragraph on arguments: "key: the lock. waited: seconds"."""
    try:
        known = "|".join(map(re.escape, inspect.signature(thing).parameters))
    except (TypeError, ValueError):
        return
    argument = re.compile(rf"(?:^|(?<=[.)] ))((?:{known})(?:, (?:{known}))*): ")
    made: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        plain = known and "\n " not in paragraph  # no list, and no example
        before, *parts = argument.split(paragraph.replace("\n", " ")) if plain else [paragraph]
        made += [before, ""] if before.strip() else []
        made += [f"- *{word}*: {text}" for word, text in zip(parts[::2], parts[1::2], strict=True)] + [""]
    lines[:] = made


def setup(app: Sphinx) -> None:
    """Adapt the links of included pages, and links to files outside, so that they work in the site."""

    def page(app: Sphinx, name: str, content: list[str]) -> None:
        content[0] += DOCSTRINGS[name]() if name in DOCSTRINGS else ""
        content[0] = in_the_site(posixpath.dirname(name), content[0])

    def included(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
        content[0] = in_the_site(path.parent.as_posix(), content[0])

    def pictures(app: Sphinx, error: Exception | None) -> None:  # Sphinx does not look into <picture>
        if error is None and app.builder.format == "html":
            images = ROOT / "docs" / "images"
            shutil.copytree(images, app.outdir / "images", ignore=shutil.ignore_patterns("*.py"), dirs_exist_ok=True)

    app.connect("build-finished", pictures)
    app.connect("autodoc-process-docstring", arguments_apart)
    app.connect("source-read", page)
    app.connect("include-read", included)
