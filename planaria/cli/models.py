"""`planaria models`: what can be named as MODEL here."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from planaria.checkpoint import resolve_checkpoint
from planaria.errors import ModelError
from planaria.models import SUPPORTED, model_config


def _alias(name: str) -> dict[str, Any]:
    try:
        checkpoint = resolve_checkpoint(name)
        return {"model": name, "kind": "alias", "ready": True, "path": checkpoint.path,
                "parameters": model_config(checkpoint.config).num_parameters, "note": ""}  # fmt: skip
    except ModelError as e:
        return {"model": name, "kind": "alias", "ready": False, "path": None, "parameters": None, "note": str(e)}


def _hub() -> list[dict[str, Any]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        {"model": repo.repo_id, "kind": "hub cache", "ready": True, "path": str(repo.repo_path), "parameters": None,
         "note": f"{repo.size_on_disk / 2**20:,.0f} MiB"}
        for repo in sorted(repos, key=lambda r: r.repo_id) if repo.repo_type == "model"
    ]  # fmt: skip


def run(*, as_json: bool) -> None:
    rows = [_alias("smollm2"), *_hub()]
    if as_json:
        sys.stdout.write(msgspec.json.encode({"models": rows, "architectures": list(SUPPORTED)}).decode() + "\n")
        return
    console = Console(highlight=False)
    table = Table("MODEL", "kind", "ready", "note", box=None)
    for row in rows:
        note = row["note"] or (f"{row['parameters'] / 1e6:,.0f}M parameters" if row["parameters"] else "")
        table.add_row(row["model"], row["kind"], "yes" if row["ready"] else "no", note)
    console.print(table)
    console.print("Also: a folder in Hugging Face layout, a .gguf file, a hub id.")
    console.print(f"Architectures: {', '.join(SUPPORTED)}")
