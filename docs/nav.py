"""Puts every decision into the site's navigation, by number."""

from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    pages = sorted(Path(config.docs_dir, "adr").glob("[0-9]*.md"))
    config.nav.append({"Decisions": ["adr/index.md", *(f"adr/{page.name}" for page in pages)]})
