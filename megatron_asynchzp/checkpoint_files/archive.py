# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the check of a data file: zip archives in a row, each as torch.save writes it.

torch stores a CRC-32 of every record in them and ignores it when it loads.

    archive:  header data.pkl  header .format_version ... header data/0  directory  end
                    |________________________________________|               |
               each covered by a CRC-32 that lies in the directory, covered by the seal
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from megatron_asynchzp.checkpoint_files.errors import Damage

# In front of a record: signature, ..., lengths of its name and of an extra field.
_HEADER = struct.Struct("<4s22xHH")
# In the directory: signature, method, CRC-32, packed size, size, lengths of name, extra field and
# comment, place of the header.
_ENTRY = struct.Struct("<4s6xH4xIIIHHH8xI")
# The end that torch writes: numbers of 64 bits, the place of that, and shorter numbers.
_END = struct.Struct("<4sQHHIIQQQQ4sIQI4sHHHHIIH")
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
# A directory and its end are read with one read of this many bytes where that is enough.
_TAIL_NBYTES = 4096
_CHUNK_NBYTES = 4 << 20


class Record(NamedTuple):
    """A record's name, CRC-32, bytes, and the place of its header in the archive."""

    name: bytes
    crc: int
    nbytes: int
    header: int

    @property
    def is_storage(self) -> bool:
        return b"/data/" in self.name


class Archive(NamedTuple):
    """Place of an archive in its file, and the bytes of its directory and its end."""

    start: int
    nbytes: int
    directory: bytes

    def records(self) -> list[Record]:
        count = _END.unpack(self.directory[-_END.size :])[7]
        records = list(_parse_entries(self.directory[: -_END.size]))
        if len(records) != count:
            raise Damage("the zip directory of an archive is damaged")
        return records


def read_archives(file: BinaryIO) -> list[Archive]:
    """List the archives of a file in order, from their directories alone.

    Raises Damage for a file of anything but archives, or OSError.
    """
    archives, end = [], os.fstat(file.fileno()).st_size
    while end:
        archives.append(_read_archive(file.fileno(), end))
        end = archives[-1].start
    if not archives:
        raise Damage("it is empty")
    return archives[::-1]


def _read_archive(file: int, end: int) -> Archive:
    num_read = min(end, _TAIL_NBYTES)
    tail = os.pread(file, num_read, end - num_read)
    if len(tail) < _END.size:
        raise Damage("it is cut short")
    made_by, needed, *_, count, size, start = _END.unpack(tail[-_END.size :])[2:10]
    short = min(count, _MAX_16), min(size, _MAX_32), min(start, _MAX_32)
    if tail[-_END.size :] != _END.pack(
        *(b"PK\x06\x06", 44, made_by, needed, 0, 0, count, count, size, start),
        *(b"PK\x06\x07", 0, start + size & 2**64 - 1, 1),
        *(b"PK\x05\x06", 0, 0, short[0], *short, 0),
    ):
        raise Damage("an archive in it does not end where it should")
    nbytes, directory_nbytes = start + size + _END.size, size + _END.size
    if nbytes > end:
        raise Damage("an archive in it does not begin where it should")
    if directory_nbytes > len(tail):
        tail = os.pread(file, directory_nbytes, end - directory_nbytes)
    return Archive(end - nbytes, nbytes, tail[-directory_nbytes:])


def _parse_entries(directory: bytes) -> Iterator[Record]:
    position = 0
    while position < len(directory):
        entry = directory[position : position + _ENTRY.size]
        if len(entry) < _ENTRY.size or entry[:4] != b"PK\x01\x02":
            raise Damage("the zip directory of an archive is damaged")
        _, method, crc, packed, nbytes, *lengths, header = _ENTRY.unpack(entry)
        position += _ENTRY.size
        name = directory[position : position + lengths[0]]
        extra = directory[position + lengths[0] :][: lengths[1]]
        position += sum(lengths)
        long = _long_numbers(extra)
        nbytes, packed, header = (
            next(long, -1) if number == _MAX_32 else number for number in (nbytes, packed, header)
        )
        if method or packed != nbytes or header < 0:
            raise Damage("a record is not stored as torch stores it")
        yield Record(name, crc, nbytes, header)


def _long_numbers(extra: bytes) -> Iterator[int]:
    """Yield the 64-bit numbers, which are in the field with id 1."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            field = extra[4 : 4 + length]
            yield from (value for (value,) in struct.iter_unpack("<Q", field[: len(field) & ~7]))
        extra = extra[4 + length :]


def check_records(
    file: BinaryIO, archives: Sequence[Archive], is_read: Callable[[Record], bool]
) -> None:
    """Read all records that `is_read` selects, in pieces. Raises Damage, or OSError."""
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    for archive in archives:
        for record in archive.records():
            if is_read(record):
                _check_record(file, archive, record, buffer)


def _check_record(file: BinaryIO, archive: Archive, record: Record, buffer: memoryview) -> None:
    """Compare the record with its CRC-32, where torch finds it: by the header in front of it."""
    file.seek(archive.start + record.header)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise Damage("it is cut short")
    signature, name_nbytes, extra_nbytes = _HEADER.unpack(header)
    if signature != b"PK\x03\x04" or file.read(name_nbytes) != record.name:
        raise Damage("the header of a record is damaged")
    file.seek(extra_nbytes, os.SEEK_CUR)
    crc, left = 0, record.nbytes
    while left:
        num_read = file.readinto(buffer[: min(left, len(buffer))])  # pyright: ignore[reportAttributeAccessIssue]
        if not num_read:
            raise Damage("it is cut short")
        crc = zlib.crc32(buffer[:num_read], crc)
        left -= num_read
    if crc != record.crc:
        raise Damage(f"the checksum of record {record.name.decode(errors='replace')} is wrong")


def seal_of(archives: Sequence[Archive]) -> str:
    """Hash the directories of a file, which cover its data by their CRC-32s."""
    digest = hashlib.sha256()
    for archive in archives:
        digest.update(len(archive.directory).to_bytes(8, "little"))
        digest.update(archive.directory)
    return digest.hexdigest()
