# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what scripts/train can launch: rows.toml, and the Megatron command line of each row.

python -m scripts.train.rows                             # the rows
python -m scripts.train.rows ROW [--platform ascend] [-- more Megatron flags]
python -m scripts.train.rows ROW --notes                 # where its numbers are from
"""

import argparse
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_TABLES = tomllib.loads(Path(__file__).with_name("rows.toml").read_text())
PLATFORMS = tuple(_TABLES["platforms"])

# A user who gives one of these gives data, and its vocabulary.
# fmt: off
_DATA_FLAGS = {
    "--mock-data", "--data-path", "--train-data-path", "--data-args-path",
    "--per-split-data-args-path", "--tokenizer-type",
}
# fmt: on


class RowError(ValueError):
    """A row that is not there or cannot be composed. The message is one line, for the user."""


@dataclass(frozen=True)
class Row:
    """One run: a row of a table of the paper, or one of ours.

    paper: the strategy in the paper's words; param, grad, optim: AsyncHZP's shard sizes, None for
    the ND baseline; ranks: of the whole run; batch_tokens: per step.
    """

    name: str
    model: str
    paper: str
    ranks: int
    seq_length: int
    batch_tokens: int = _TABLES["common"]["batch_tokens"]
    assumed: str = ""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    param: int | None = None
    grad: int | None = None
    optim: int | None = None
    schedule: str = "auto"

    @property
    def is_asynchzp(self) -> bool:
        return self.optim is not None

    @property
    def parameters(self) -> float:
        """As many as in the paper's name of the model."""
        return _TABLES["models"][self.model]["parameters"]

    def flags(self, platform: str = "cuda", extra: list[str] | None = None) -> list[str]:
        """The whole Megatron command line; `extra` comes last and so wins.

        Raises RowError for a row that the platform cannot run.
        """
        model, common = _TABLES["models"][self.model], _TABLES["common"]
        extra = extra or []
        words = [
            model["flags"],
            common["flags"],
            f"--seq-length {self.seq_length} --max-position-embeddings {self.seq_length}",
            f"--global-batch-size {self.batch_tokens // self.seq_length}",
            self._parallel_flags(),
            self._optimizer_flags(),
            _TABLES["platforms"][platform]["flags"],
            model.get("platform_flags", {}).get(platform, ""),
        ]
        if not _DATA_FLAGS.intersection(word.partition("=")[0] for word in extra):
            words.append(common["mock_data"].format(vocab_size=model["vocab_size"]))
        flags = " ".join(words).split() + extra
        for flag, why in _TABLES["platforms"][platform].get("refuses", {}).items():
            if flag in flags:
                raise RowError(f"{self.name} on {platform}: {flag} cannot be: {why}")
        return flags

    def _parallel_flags(self) -> str:
        sizes = {
            "tensor-model-parallel": self.tp,
            "pipeline-model-parallel": self.pp,
            "context-parallel": self.cp,
            "expert-model-parallel": self.ep,
        }
        words = [f"--{name}-size {size}" for name, size in sizes.items() if size > 1]
        return " ".join(words + ["--sequence-parallel"] * (self.tp > 1))

    def _optimizer_flags(self) -> str:
        if not self.is_asynchzp:
            return _TABLES["common"]["baseline"]
        return (
            f"--use-asynchzp --asynchzp-param-shard-size {self.param} "
            f"--asynchzp-grad-shard-size {self.grad} --asynchzp-optim-shard-size {self.optim} "
            f"--asynchzp-schedule {self.schedule}"
        )

    @property
    def notes(self) -> list[str]:
        """Return the sources of the numbers and the assumptions, one line each."""
        model = _TABLES["models"][self.model]
        assumed = [_TABLES["common"]["assumed"], model["assumed"], self.assumed]
        return [f"from: {model['source']}", *(f"assumed: {line}" for line in assumed if line)]


def row_names() -> list[str]:
    return list(_TABLES["rows"])


def load_row(name: str) -> Row:
    """Raises RowError for a name that is not in rows.toml."""
    if name not in _TABLES["rows"]:
        raise RowError(f"{name}: no such row; the rows are {', '.join(row_names())}")
    given: dict[str, Any] = dict(_TABLES["rows"][name])
    if (like := given.pop("like", None)) is None:
        return Row(name=name, **given)
    return replace(load_row(like), name=name, **{"assumed": "", **given})


def _print_rows() -> None:
    print("P, G, O: ranks that share one copy of parameters, gradients, optimizer states;")
    print("the last column has the paper's words, in which P is Z3, G is Z2 and O is Z1\n")
    for name in row_names():
        row = load_row(name)
        size = f"{row.ranks} ranks, {row.seq_length // 1024}K"
        sizes = f"P={row.param} G={row.grad} O={row.optim}" if row.is_asynchzp else ""
        print(f"{name:20} {row.model:13} {size:16} {sizes:15} {row.paper}")


def main(argv: list[str]) -> int:
    """Print the rows, or the number of ranks of one and then its flags, one word a line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.rows", description=__doc__)
    parser.add_argument("row", nargs="?", metavar="ROW")
    parser.add_argument("--platform", choices=PLATFORMS, default="cuda")
    parser.add_argument("--notes", action="store_true", help="what it is and where it is from")
    cut = argv.index("--") if "--" in argv else len(argv)
    asked = parser.parse_args(argv[:cut])
    if asked.row is None:
        _print_rows()
        return 0
    try:
        row = load_row(asked.row)
        if asked.notes:
            print(f"{row.name}: {row.model}, {row.paper}", *row.notes, sep="\n")
            return 0
        words = row.flags(asked.platform, argv[cut + 1 :])
    except RowError as error:
        print(f"scripts/train: {error}", file=sys.stderr)
        return 2
    print(row.ranks, *words, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
