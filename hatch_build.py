"""What the package says of itself, made from the one line of pyproject.toml that names the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, repository: str) -> str:
    """Make the links and pictures of the README absolute, so that they work on the page of a package index."""
    text = re.sub(r"<picture>.*?(<img [^>]*>)\s*</picture>", r"\1", text, flags=re.DOTALL)
    text = re.sub(r'src="(?!https?:)', f'src="{repository}/raw/main/', text)
    text = re.sub(r"\]\(\.\./\.\./", f"]({repository}/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/main/", text)


class Metadata(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table [project]."""
        repository = self.config["repository"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, repository)}
        metadata["urls"] = {
            "Documentation": f"{repository}/blob/main/docs/index.md",
            "Source": repository,
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
