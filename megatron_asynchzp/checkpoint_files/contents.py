# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the verdict over one checkpoint directory: `find_damage` looks at names, sizes and small
files, `find_corruption` reads all data. Must not know of other directories.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_asynchzp.checkpoint_files.archive import Item, check_archive, seal_of
from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.inventory import CONFIG, METADATA, Inventory, read_inventory
from megatron_asynchzp.checkpoint_files.manifest import MANIFEST, Manifest, read_manifest
from megatron_asynchzp.checkpoint_files.small_file import hash_file, read_small

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True)
class DataFile:
    """A file to be read in full: its items, and the seal that the manifest has for it."""

    items: tuple[Item, ...]
    seal: str | None


@dataclass(frozen=True)
class Contents:
    """A directory without structural damage. manifest: None where stock Megatron saved it."""

    manifest: Manifest | None
    inventory: Inventory
    files: dict[str, DataFile]


def read_contents(iteration_dir: Path | str) -> Contents:
    """What the directory holds, all of it there. Raises Damage with the first thing that is not."""
    iteration_dir = Path(iteration_dir)
    try:
        manifest = read_manifest(iteration_dir)
        _check_config(iteration_dir)
        if manifest is not None:
            _check_records(iteration_dir, manifest)
        inventory = read_inventory(iteration_dir, is_trusted=manifest is not None)
        records = manifest.files if manifest else {}
        files = {}
        for name, items in inventory.files.items():
            if manifest and (name not in records or records[name].seal is None):
                raise Damage(f"{MANIFEST} does not know {name}")
            needed, size = items[-1].offset + items[-1].length, _size_of(iteration_dir / name)
            if size < needed:
                raise Damage(f"{name} has {size} of {needed} bytes")
            files[name] = DataFile(items, records[name].seal if manifest else None)
    except OSError as error:
        raise Damage(f"{Path(error.filename or iteration_dir).name}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, Damage):
            raise
        raise Damage(f"a name in {METADATA} cannot be one of a file") from None  # a NUL in it
    return Contents(manifest, inventory, files)


def find_damage(iteration_dir: Path | str) -> str | None:
    """What is wrong with the files as far as sizes and checksums of small files tell, or None."""
    try:
        read_contents(iteration_dir)
    except Damage as damage:
        return str(damage)
    return None


def find_corruption(
    iteration_dir: Path | str,
    files: dict[str, DataFile],
    names: Iterable[str] | None = None,
    is_thorough: bool = True,
) -> str | None:
    """Read the data files `names` (None: all) and return the first fault in them, or None.

    is_thorough: all of it; else the objects, which are small, without the tensors.
    """
    for name in files if names is None else names:
        try:
            directories = []
            with open(Path(iteration_dir, name), "rb", buffering=0) as file:
                for item in files[name].items:
                    if is_thorough or item.tensor_nbytes is None:
                        directories.append(check_archive(file, item))
            if is_thorough and files[name].seal not in (None, seal_of(directories)):
                raise Damage("it is not the file that was saved")
        except Damage as damage:
            return f"{name}: {damage}"
        except OSError as error:
            return f"{name}: {error.strerror}"
        except Exception as error:  # peers wait for a verdict, whatever the bytes lead to
            return f"{name} cannot be read ({type(error).__name__})"
    return None


def _check_config(iteration_dir: Path) -> None:
    """Megatron writes metadata.json last."""
    data = read_small(iteration_dir / CONFIG)
    if data is None:
        raise Damage(_why_unfinished(iteration_dir))
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise Damage(f"{CONFIG} is damaged") from None
    is_known = isinstance(config, dict) and config.get("sharded_backend") == "torch_dist"
    if not is_known or type(config.get("sharded_backend_version")) is not int:
        raise Damage(f"{CONFIG} does not tell of a torch_dist checkpoint")


def _why_unfinished(iteration_dir: Path) -> str:
    if not iteration_dir.is_dir():
        return "it is no directory"
    if any(path.name.startswith("mp_rank_") for path in iteration_dir.iterdir()):
        return "it is of Megatron's format torch, not torch_dist"
    if (iteration_dir / MANIFEST).exists():
        return f"{CONFIG} is missing"
    return f"its save was not finished ({CONFIG} is missing)"


def _check_records(iteration_dir: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        path = iteration_dir / name
        size = _size_of(path)
        if size != record.size:
            raise Damage(f"{name} has {size} bytes, and had {record.size} when it was saved")
        if record.sha256 is not None and hash_file(path) != record.sha256:
            raise Damage(f"the checksum of {name} is wrong")
    for name in (METADATA, CONFIG):
        if name not in manifest.files or manifest.files[name].sha256 is None:
            raise Damage(f"{MANIFEST} does not know {name}")


def _size_of(path: Path) -> int:
    try:
        if not path.is_file() and path.exists():
            raise Damage(f"{path.name} is no file")
        return path.stat().st_size
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None


def find_leftovers(iteration_dir: Path) -> list[Path]:
    """What a save into this directory must not find, in the order in which it is to be removed:
    first what makes the rest look complete."""
    names = [MANIFEST, CONFIG, METADATA]
    first = [iteration_dir / name for name in names if (iteration_dir / name).exists()]
    rest = [path for path in iteration_dir.iterdir() if _DATA_FILE.fullmatch(path.name)]
    unfinished = [
        path
        for path in iteration_dir.iterdir()
        if path.name.endswith(".tmp") and path.name.startswith((MANIFEST, METADATA))
    ]
    legacy = [path for path in (iteration_dir / "common.pt",) if path.exists()]
    return first + legacy + sorted(rest) + sorted(unfinished)
