# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the check of one item of a data file: a zip archive as torch.save writes it. torch stores a
CRC-32 of every record in it and does not look at it when it loads. Must not know what is stored.

    item:  header data.pkl  header .format_version ... header data/0  directory  end
                  |________________________________________|               |
             each covered by a CRC-32 that lies in the directory, covered by the seal
"""

import hashlib
import struct
import zipfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

from megatron_asynchzp.checkpoint_files.errors import Damage

# Signature, version and flags, method, time, date, CRC-32, two sizes, lengths of name and extra.
_HEADER = struct.Struct("<4s4sHHHIIIHH")
_LONGEST_DESCRIPTOR = 24  # what may follow a record: signature, CRC-32, two sizes of 8 bytes
# Signature, two disks, two numbers of records, size and start of the directory, comment.
_END = struct.Struct("<4sHHHHIIH")
_LONG_END = struct.Struct("<4sQHHIIQQQQ")  # in front of the disks its size and two versions
_LOCATOR = struct.Struct("<4sIQI")
_CHUNK_NBYTES = 4 << 20
# The directory is read with one read of this many bytes from the end, where that is enough.
_TAIL_NBYTES = 4096


@dataclass(frozen=True)
class Item:
    """Where an archive lies in its file, and how long its tensor is (None: it is no tensor)."""

    offset: int
    length: int
    tensor_nbytes: int | None = None


class _Slice(BytesIO):
    """The end of an archive as a seekable file: positions count from the archive's own start."""

    def __init__(self, tail: bytes, start: int):
        super().__init__(tail)
        self._start = start

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0:
            if offset < self._start:
                raise Damage("its zip directory is longer than the item")
            return super().seek(offset - self._start) + self._start
        return super().seek(offset, whence) + self._start

    def tell(self) -> int:
        return super().tell() + self._start


def read_directory(file: BinaryIO, item: Item) -> tuple[list[zipfile.ZipInfo], int, bytes]:
    """The records of an archive in the order they lie in, where its directory starts, and the
    directory's bytes up to the end of the item. Raises Damage, or OSError."""
    start = max(0, item.length - _TAIL_NBYTES)
    while True:
        file.seek(item.offset + start)
        tail = file.read(item.length - start)
        if len(tail) != item.length - start or tail[-_END.size :][:4] != b"PK\x05\x06":
            raise Damage("an item does not end where it should")
        try:
            with zipfile.ZipFile(_Slice(tail, start)) as archive:
                records, directory_start = archive.infolist(), archive.start_dir
            break
        except Damage:
            if start == 0:
                raise
            start = 0  # a directory of many records: read the whole item, once
        except Exception as error:  # zipfile raises five kinds, struct.error among them
            told = type(error).__name__
            raise Damage(f"the zip directory of an item is damaged ({told})") from None
    if not _is_end(tail, len(records), directory_start, item.length):
        raise Damage("the end of an item does not say where its zip directory is")
    records.sort(key=lambda record: record.header_offset)
    return records, directory_start, tail[directory_start - start :]


def _is_end(tail: bytes, num_records: int, directory_start: int, length: int) -> bool:
    """Whether the end, which zipfile reads leniently, agrees with the directory it found. torch
    writes it twice: with numbers of 64 bits, the place of that, and with shorter ones."""
    *_, here, total, _, start, comment = _END.unpack(tail[-_END.size :])
    is_short = {here, total} <= {num_records, 0xFFFF} and start in (directory_start, 0xFFFFFFFF)
    is_short = is_short and comment == 0
    long = tail[-_END.size - _LOCATOR.size - _LONG_END.size : -_END.size]
    if long[-_LOCATOR.size :][:4] != b"PK\x06\x07":
        return is_short and 0xFFFF not in (here, total) and start != 0xFFFFFFFF
    if len(long) != _LOCATOR.size + _LONG_END.size:
        return False
    _, _, long_start, _ = _LOCATOR.unpack(long[_LONG_END.size :])
    signature, *_, here, total, _, start = _LONG_END.unpack(long[: _LONG_END.size])
    is_found = signature == b"PK\x06\x06" and long_start == length - _END.size - len(long)
    return is_short and is_found and here == total == num_records and start == directory_start


def check_archive(file: BinaryIO, item: Item) -> bytes:
    """Read the whole archive in pieces and return its directory. Raises Damage, or OSError."""
    records, directory_start, directory = read_directory(file, item)
    buffer = memoryview(bytearray(min(_CHUNK_NBYTES, item.length)))
    end, data_nbytes = 0, 0
    for record in records:
        if not end <= record.header_offset <= end + (_LONGEST_DESCRIPTOR if end else 0):
            raise Damage("records of an item are not where its zip directory says")
        end = _check_record(file, item, record, buffer)
        if record.orig_filename.partition("/")[2].startswith("data/"):
            data_nbytes += record.file_size
    if not records or not end <= directory_start <= end + _LONGEST_DESCRIPTOR:
        raise Damage("records of an item do not reach its zip directory")
    if item.tensor_nbytes is not None and data_nbytes < item.tensor_nbytes:
        raise Damage(f"a tensor has {data_nbytes} of {item.tensor_nbytes} bytes")
    return directory


def _check_record(file: BinaryIO, item: Item, record: zipfile.ZipInfo, buffer: memoryview) -> int:
    """Where the record's data ends, which torch finds by the header in front of it."""
    file.seek(item.offset + record.header_offset)
    header = file.read(_HEADER.size)
    if len(header) != _HEADER.size:
        raise Damage("an item is cut short")
    signature, version_and_flags, *told, name_length, extra_length = _HEADER.unpack(header)
    name = record.orig_filename.encode("utf-8", "surrogateescape")
    is_right = signature == b"PK\x03\x04" and file.read(name_length) == name
    if not is_right or version_and_flags != _version_and_flags(record) or not _agrees(told, record):
        raise Damage("the header of a record is damaged")
    if record.compress_type or record.compress_size != record.file_size:
        raise Damage("a record is not stored as torch stores it")
    position = record.header_offset + _HEADER.size + name_length + extra_length
    end = position + record.file_size
    if end > item.length:
        raise Damage("a record reaches beyond its item")
    file.seek(item.offset + position)
    crc, left = 0, record.file_size
    while left:
        num_read = file.readinto(buffer[: min(left, len(buffer))])
        if not num_read:
            raise Damage("an item is cut short")
        crc = zlib.crc32(buffer[:num_read], crc)
        left -= num_read
    if crc != record.CRC:
        raise Damage(f"the checksum of record {record.orig_filename} is wrong")
    return end


def _version_and_flags(record: zipfile.ZipInfo) -> bytes:
    return struct.pack("<HH", record.extract_version, record.flag_bits)


def _agrees(told: list[int], record: zipfile.ZipInfo) -> bool:
    """Whether a header says of its record what the directory does. What was not known when the
    header was written is 0 there, or all ones where it is in the extra field."""
    method, time, date, crc, *sizes = told
    year, month, day, hour, minute, second = record.date_time
    is_date = date == (year - 1980) << 9 | month << 5 | day
    is_time = time == hour << 11 | minute << 5 | second // 2
    is_size = all(size in (0, record.file_size, 0xFFFFFFFF) for size in sizes)
    return method == 0 and is_date and is_time and crc in (0, record.CRC) and is_size


def seal_of(directories: list[bytes]) -> str:
    """One checksum for a file, of the directories of its items in their order. Through the CRC-32s
    in them it stands for the data, which need not be read again to make it."""
    digest = hashlib.sha256()
    for directory in directories:
        digest.update(len(directory).to_bytes(8, "little"))
        digest.update(directory)
    return digest.hexdigest()
