# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`asynchzp inspect FILE` answers whether a model needs PASA, by a table and a heat map.

Owns the command line; measures nothing itself.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_asynchzp.errors import ConfigurationError, OneLineParser, no_file_at, require

if TYPE_CHECKING:
    import torch

    from megatron_asynchzp.attention.diagnosis import HeadDiagnosis

_REMEDY = "capture one with --asynchzp-capture-attention STEP:FILE"
USAGE_FILE = """\
FILE comes from a run with --asynchzp-capture-attention STEP:FILE, or from torch.save of
{layer: {"q": [B, H, S, D], "k": [B, G, T, D]}}."""


def main(argv: list[str]) -> int:
    """Return the exit status: 0: no head needs it; 1: some do; 2: the file cannot be read."""
    parser = OneLineParser(
        prog="asynchzp inspect", description="Does this model need PASA attention? " + USAGE_FILE
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="queries and keys of some layers")
    parser.add_argument("--json", type=Path, help="write all figures to this file, a line per head")
    parser.add_argument("--picture", type=Path, help="draw a heat map per layer into this PNG")
    options = parser.parse_args(argv)
    try:
        if options.picture:
            require("matplotlib", "--picture")
        if options.file.is_dir() or not options.file.exists():
            fault = "is a folder" if options.file.is_dir() else "no such file"
            raise ConfigurationError(f"{options.file}: {fault} ({_REMEDY})")
        for path in filter(None, (options.json, options.picture)):
            if fault := no_file_at(path):
                raise ConfigurationError(f"{path}: {fault}")
        # Only now: the checks above need no torch.
        from megatron_asynchzp.attention.diagnosis import diagnose

        layers = load(options.file)
    except ConfigurationError as error:
        print(f"asynchzp inspect: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"asynchzp inspect: {options.file}: {error}", file=sys.stderr)
        return 2
    heads = [head for layer, qk in layers.items() for head in diagnose(qk["q"], qk["k"], layer)]
    print(table(heads))
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(head)) + "\n" for head in heads))
    if options.picture:
        draw({layer: qk["k"] for layer, qk in layers.items()}, options.picture)
    print(verdict(heads))
    return int(any(head.needs_pasa for head in heads))


type Layers = dict[int | str, dict[str, torch.Tensor]]


def load(path: Path) -> Layers:
    """Load the captured tensors, numbered layers in order. Raises OSError, or ValueError."""
    import torch

    try:
        layers = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise OSError(error.strerror or "cannot be read") from error
    except Exception as error:  # a file that torch did not write fails in torch.load in many ways
        raise ValueError(f"is not a file of torch.save ({_REMEDY})") from error
    if not isinstance(layers, dict) or not layers:
        raise ValueError(f"holds no layers ({_REMEDY})")
    for layer, qk in layers.items():
        if not isinstance(qk, dict) or not all(isinstance(x, torch.Tensor) for x in qk.values()):
            raise ValueError(f"layer {layer} is not q and k ({_REMEDY})")
        shapes: list[tuple[int, ...]] = [
            tuple(qk[name].shape) if name in qk else () for name in ("q", "k")
        ]
        is_valid = all(len(s) == 4 for s in shapes) and shapes[0][3] == shapes[1][3]
        if not is_valid or not shapes[1][1] or shapes[0][1] % shapes[1][1]:
            raise ValueError(f"layer {layer} is not q [B, H, S, D] and k [B, G, T, D]: {shapes}")
        if broken := [name for name in ("q", "k") if not qk[name].isfinite().all()]:
            raise ValueError(
                f"layer {layer} has inf or NaN in {' and '.join(broken)}, of which nothing can be "
                "said; capture a step before the run diverged"
            )
    return {layer: layers[layer] for layer in sorted(layers, key=_layer_order)}


def _layer_order(layer: int | str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers within a name by value: layers.2 before layers.10."""
    parts = re.split(r"(\d+)", str(layer))
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def table(heads: "list[HeadDiagnosis]") -> str:
    width = max(5, *(len(str(head.layer)) for head in heads))
    lines = [
        f"{'layer':>{width}} head |   bias  resonance  max |qk|  scaled  fp16   dQ error |"
        " with PASA: bias  max |qk|  fp16   dQ error"
    ]
    for head in heads:
        lines.append(
            f"{head.layer!s:>{width}} {head.head:4d} | "
            f"{head.sequence_bias:6.2f}  {head.resonance:9.2f}  "
            f"{head.largest_score:8.4g}  {head.largest_scaled:6.4g}  {_fits(head.overflows)}  "
            f"x{head.amplification:8.2f} | {head.sequence_bias_shifted:15.2f}  "
            f"{head.largest_score_shifted:8.4g}  {_fits(head.overflows_shifted)}  "
            f"x{head.amplification_shifted:8.2f}"
        )
    return "\n".join(lines)


def verdict(heads: "list[HeadDiagnosis]") -> str:
    needing = sum(head.needs_pasa for head in heads)
    worst = max(heads, key=lambda head: head.amplification)
    overflowing = sum(head.overflows for head in heads)
    return (
        f"{needing} of {len(heads)} heads need it: fp16 scores overflow in {overflowing}, and the "
        f"rounding error of dQ is at worst x{worst.amplification:.1f} what centred keys have "
        f"(layer {worst.layer}, head {worst.head}). An attention with fp32 scores does not "
        "overflow; the error of dQ it has as well."
    )


def _fits(overflows: bool) -> str:
    return "overflow" if overflows else "fits    "


def draw(keys: "Mapping[int | str, torch.Tensor]", path: Path) -> None:
    """Draw one row per layer: the mean of every channel of every key head."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(
        len(keys), 1, figsize=(10, 1 + 1.4 * len(keys)), squeeze=False, layout="constrained"
    )
    # [G, D] of each layer, which a shift subtracts.
    means = {layer: k.float().mean((0, 2)) for layer, k in keys.items()}
    limit = max(m.abs().max().item() for m in means.values()) or 1.0
    for axis, (layer, mean_GD) in zip(axes[:, 0], means.items(), strict=True):
        image = axis.imshow(mean_GD, aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit)
        axis.set_title(f"layer {layer}", loc="left", fontsize=9, fontweight="bold")
        axis.set_ylabel("key head")
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes[-1, 0].set_xlabel("channel")
    figure.colorbar(image, ax=axes[:, 0].tolist(), label="mean of k over the sequence")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
