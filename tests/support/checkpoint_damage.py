# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Kinds of damage to a checkpoint directory, by name. Each is a function of the folder that holds
two checkpoints, `iter_0000002` and `iter_0000004`, and harms the newer; some harm the tracker only.
Knows the layout of the files, and none of the code that is to find the damage.
"""

import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

OLDER, NEWER = "iter_0000002", "iter_0000004"
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST, METADATA, CONFIG = "asynchzp_manifest.json", ".metadata", "metadata.json"
DATA = ("__0_0.distcp", "__1_0.distcp")

Damage = Callable[[Path], None]


def _edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / NEWER / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def flip(data: bytes, position: int, bit: int = 0) -> bytes:
    """`data` with one bit changed; negative positions count from the end."""
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def _flip_at(words: bytes, shift: int, last: bool = False) -> Callable[[bytes], bytes]:
    """So many bytes behind the first, or the last, place with these words."""
    return lambda data: flip(data, (data.rindex if last else data.index)(words) + shift)


def _flip_in_record(name: str) -> Callable[[bytes], bytes]:
    """In the data of the last record of this name in the file."""

    def change(data: bytes) -> bytes:
        start = len(data)
        while True:
            start = data.rindex(b"PK\x03\x04", 0, start)
            name_length = int.from_bytes(data[start + 26 : start + 28], "little")
            extra_length = int.from_bytes(data[start + 28 : start + 30], "little")
            if data[start + 30 :][:name_length].endswith(b"/" + name.encode()):
                return flip(data, start + 30 + name_length + extra_length)

    return change


def _zero(start: float, stop: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        first, last = int(start * len(data)), int(stop * len(data))
        return data[:first] + bytes(last - first) + data[last:]

    return change


def _keep(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(share * len(data))]


def _instead(name: str, make: Callable[[Path], object] = lambda path: None) -> Damage:
    """Remove the file, and `make` something else of its name."""

    def damage(folder: Path) -> None:
        (folder / NEWER / name).unlink()
        make(folder / NEWER / name)

    return damage


def _link(name: str, target: str) -> Damage:
    return _instead(name, lambda path: path.symlink_to(target))


def _copy_from_older(*names: str) -> Damage:
    def damage(folder: Path) -> None:
        for name in names:
            shutil.copyfile(folder / OLDER / name, folder / NEWER / name)

    return damage


def _swap_data(folder: Path) -> None:
    first, second = (folder / NEWER / name for name in DATA)
    first.rename(folder / "swap")
    second.rename(first)
    (folder / "swap").rename(second)


def _swap_items(data: bytes) -> bytes:
    """Exchange the contents of two archives of equal length."""
    starts, position = [], 0
    while position < len(data):
        starts.append(position)
        position = data.index(b"PK\x05\x06", position) + 22
    starts.append(len(data))
    items = [data[a:b] for a, b in zip(starts, starts[1:])]
    for index, one in enumerate(items):
        for other, two in enumerate(items[:index]):
            if len(one) == len(two) and one != two:
                items[index], items[other] = two, one
                return b"".join(items)
    raise AssertionError("no two items of one length")


def _item_of_another_tensor(data: bytes) -> bytes:
    """The last item written anew with other values of the same size: each checksum is right."""
    start = data.rindex(b"PK\x05\x06", 0, len(data) - 22) + 22
    source, target = zipfile.ZipFile(BytesIO(data[start:])), bytearray(data[start:])
    (info,) = [one for one in source.infolist() if one.orig_filename.endswith("/data/0")]
    content = bytes(byte ^ 1 for byte in source.read(info))
    at = data[start:].index(source.read(info))
    target[at : at + len(content)] = content
    old, new = (x.to_bytes(4, "little") for x in (info.CRC, zlib.crc32(content)))
    return data[:start] + bytes(target).replace(old, new)


def _edit_json(name: str, change: Callable[[dict], object]) -> Damage:
    return _edit(name, lambda data: json.dumps(change(json.loads(data))).encode())


def _without(key: str) -> Callable[[dict], dict]:
    return lambda output: {name: value for name, value in output.items() if name != key}


def _tracker(content: bytes | None) -> Damage:
    def damage(folder: Path) -> None:
        if content is None:
            (folder / TRACKER).unlink()
        else:
            (folder / TRACKER).write_bytes(content)

    return damage


def _tracker_directory(folder: Path) -> None:
    (folder / TRACKER).unlink()
    (folder / TRACKER).mkdir()


def _newer_leftover(*copied: str, last: str | None = None) -> Damage:
    """A later save that was interrupted after it had written `copied`, in this order."""

    def damage(folder: Path) -> None:
        (folder / "iter_0000006").mkdir()
        for name in copied:
            data = (folder / NEWER / name).read_bytes()
            cut = len(data) // 2 if name == last else len(data)
            (folder / "iter_0000006" / name).write_bytes(data[:cut])

    return damage


def _copy_of_iteration(folder: Path) -> None:
    shutil.copytree(folder / NEWER, folder / "iter_0000006")


def _foreign_entries(folder: Path) -> None:
    (folder / "iter_0000009").write_text("a file")
    (folder / "iter_x").mkdir()
    (folder / "iter_12").mkdir()
    (folder / "iter_0000008").symlink_to("iter_0000008")
    (folder / "iter_0000010").symlink_to("nowhere")


def _old_release(folder: Path) -> None:
    (folder / "release").mkdir()
    (folder / TRACKER).write_text("release")


def _unreadable(name: str) -> Damage:
    return lambda folder: os.chmod(folder / NEWER / name, 0)


# Where the fields lie in two records of a zip file.
HEADER = {"signature": 2, "name length": 26, "extra length": 28, "name": 34}
# fmt: off
DIRECTORY = {"signature": 1, "method": 10, "checksum": 16, "size": 20, "other size": 24,
             "offset": 42, "name": 50}
# fmt: on

# The newer checkpoint cannot be loaded: the older one has to be.
HARMFUL: dict[str, Damage] = {
    **{f"{name} removed": _instead(name) for name in (*DATA, METADATA, CONFIG)},
    **{f"{name} emptied": _edit(name, _keep(0)) for name in (*DATA, METADATA, CONFIG, MANIFEST)},
    **{
        f"{name} cut to {share:.3f}": _edit(name, _keep(share))
        for name in (*DATA, METADATA, CONFIG, MANIFEST)
        for share in (0.001, 0.5, 0.999)
    },
    **{f"{name} one byte short": _edit(name, lambda data: data[:-1]) for name in (*DATA, METADATA)},
    **{
        f"{name} zeros from {start}": _edit(name, _zero(start, start + 0.1))
        for name in (*DATA, METADATA)
        for start in (0.0, 0.5, 0.9)
    },
    **{f"{name} all zeros": _edit(name, _zero(0, 1)) for name in (DATA[0], METADATA, CONFIG)},
    **{
        f"{DATA[0]} bit in record {name}": _edit(DATA[0], _flip_in_record(name))
        for name in ("data.pkl", "data/0", "byteorder", "version", ".format_version")
    },
    **{
        f"a header's {field}": _edit(DATA[0], _flip_at(b"PK\x03\x04", shift))
        for field, shift in HEADER.items()
    },
    **{
        f"a directory's {field}": _edit(DATA[0], _flip_at(b"PK\x01\x02", shift, last=True))
        for field, shift in DIRECTORY.items()
    },
    "an end's signature": _edit(DATA[0], lambda data: flip(data, -22)),
    "an end's number of records": _edit(DATA[0], lambda data: flip(data, -12)),
    "an end's directory offset": _edit(DATA[0], lambda data: flip(data, -5)),
    "an end's comment length": _edit(DATA[0], lambda data: flip(data, -1)),
    "a 64-bit end's offset": _edit(DATA[0], _flip_at(b"PK\x06\x06", 48, last=True)),
    "a locator's offset": _edit(DATA[0], _flip_at(b"PK\x06\x07", 8, last=True)),
    "items of one file exchanged": _edit(DATA[0], _swap_items),
    "an item forged with its checksum": _edit(DATA[0], _item_of_another_tensor),
    "data in the middle of a file lost": _edit(DATA[0], lambda d: d[:3000] + d[3500:]),
    "data in the middle of a file doubled": _edit(DATA[0], lambda d: d[:3000] + d[2500:]),
    "data files exchanged": _swap_data,
    "a data file of the older checkpoint": _copy_from_older(DATA[1]),
    "all data files of the older checkpoint": _copy_from_older(*DATA),
    "everything of the older checkpoint": _copy_from_older(*DATA, METADATA, CONFIG, MANIFEST),
    "a data file over another": lambda folder: shutil.copyfile(
        folder / NEWER / DATA[0], folder / NEWER / DATA[1]
    ),
    **{f"{name} a directory": _instead(name, Path.mkdir) for name in (DATA[0], METADATA, CONFIG)},
    f"{MANIFEST} a directory": _instead(MANIFEST, Path.mkdir),
    f"{DATA[0]} a link to itself": _link(DATA[0], DATA[0]),
    f"{METADATA} a link to itself": _link(METADATA, METADATA),
    f"{CONFIG} a link to nowhere": _link(CONFIG, "nowhere"),
    f"{DATA[0]} a link to the older one": _link(DATA[0], f"../{OLDER}/{DATA[0]}"),
    **{
        f"{name} a pipe": _instead(name, os.mkfifo)
        for name in (DATA[0], METADATA, CONFIG, MANIFEST)
    },
    f"{METADATA} a pickle of something else": _edit(METADATA, lambda data: b"\x80\x04K\x01."),
    f"{METADATA} a pickle that runs a program": _edit(
        METADATA, lambda data: b"cos\nsystem\n(S'touch damaged'\ntR."
    ),
    f"{METADATA} a directory's number changed": _edit(METADATA, _flip_at(b"_0.distcp", 1)),
    f"{METADATA} a NUL in a file's name": _edit(
        METADATA, lambda data: data.replace(b"__0_0", b"__0\0_")
    ),
    f"{METADATA} a tensor's name changed": _edit(METADATA, _flip_at(b"weight", 2)),
    f"{METADATA} a dtype changed": _edit(METADATA, lambda d: d.replace(b"float32", b"float64")),
    f"{CONFIG} no JSON": _edit(CONFIG, lambda data: b"\xff{" + data),
    f"{CONFIG} a list": _edit(CONFIG, lambda data: b"[1, 2]"),
    f"{CONFIG} null": _edit(CONFIG, lambda data: b"null"),
    f"{CONFIG} of wrong types": _edit_json(
        CONFIG, lambda output: output | {"sharded_backend_version": "1"}
    ),
    f"{CONFIG} of another backend": _edit_json(
        CONFIG, lambda output: output | {"sharded_backend": 3}
    ),
    f"{CONFIG} nested without end": _edit(CONFIG, lambda data: b"[" * 100_000),
    f"{MANIFEST} garbage": _edit(MANIFEST, lambda data: b"garbage"),
    f"{MANIFEST} a list": _edit(MANIFEST, lambda data: b"[]"),
    f"{MANIFEST} a digit changed": _edit(MANIFEST, _flip_at(b'"size": ', 8)),
    f"{MANIFEST} without checksum": _edit_json(MANIFEST, _without("checksum")),
    f"{MANIFEST} without files": _edit_json(MANIFEST, _without("files")),
    f"{MANIFEST} of wrong types": _edit_json(MANIFEST, lambda output: output | {"files": 3}),
    f"{MANIFEST} of the older checkpoint": _copy_from_older(MANIFEST),
    "the directory removed": lambda folder: shutil.rmtree(folder / NEWER),
    "the directory emptied": lambda folder: (
        shutil.rmtree(folder / NEWER),
        (folder / NEWER).mkdir(),
    ),
    "the directory a file": lambda folder: (
        shutil.rmtree(folder / NEWER),
        (folder / NEWER).write_text(""),
    ),
    "only the manifest left": lambda folder: [
        path.unlink() for path in (folder / NEWER).iterdir() if path.name != MANIFEST
    ],
}

# The newer checkpoint is as it was saved, and must be loaded.
HARMLESS: dict[str, Damage] = {
    "nothing": lambda folder: None,
    "tracker missing": _tracker(None),
    "tracker empty": _tracker(b""),
    "tracker garbage": _tracker(b"\xff\x00garbage"),
    "tracker negative": _tracker(b"-1"),
    "tracker huge": _tracker(b"9" * 5000),
    "tracker large": _tracker(b"999999999"),
    "tracker a fraction": _tracker(b"4.5"),
    "tracker another script's digits": _tracker("\u0664".encode()),
    "tracker names what is not there": _tracker(b"3"),
    "tracker names the older": _tracker(b"2"),
    "tracker names a release that is not there": _tracker(b"release"),
    "tracker names an empty release": _old_release,
    "tracker a directory": _tracker_directory,
    "manifest missing": _instead(MANIFEST),
    "a newer empty directory": _newer_leftover(),
    "a newer save with half a file": _newer_leftover(DATA[0], last=DATA[0]),
    "a newer save without metadata": _newer_leftover(*DATA),
    "a newer save without its last file": _newer_leftover(*DATA, METADATA),
    "a newer save with half its last file": _newer_leftover(*DATA, METADATA, CONFIG, last=CONFIG),
    "a newer copy of this checkpoint": _copy_of_iteration,
    "entries that are no checkpoints": _foreign_entries,
    "an unfinished manifest beside the whole one": lambda folder: (
        folder / NEWER / f"{MANIFEST}.77.tmp"
    ).write_text("{"),
    "a data file of a larger job left over": lambda folder: shutil.copyfile(
        folder / NEWER / DATA[0], folder / NEWER / "__7_0.distcp"
    ),
}

# Needs a user whom permissions stop.
PERMISSIONS: dict[str, Damage] = {
    f"{name} unreadable": _unreadable(name) for name in (DATA[0], METADATA, CONFIG, MANIFEST)
}
