# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains one small GPT, whose keys have a bias, with several attentions and draws what that does.

    python -m scripts.report.pasa_evidence --steps 200 --out runs/pasa_training.jsonl
    python -m scripts.report.add_record pasa_training runs/pasa_training.jsonl

Everything but attention is fp32: q, k and v are cast to 16 bits right before it. Standard is
torch's own flash attention on the CPU, PASA the same one through mode delegate. Only the last
digits of gradients differ, so differences in the curves are theirs. Prints JSON lines;
`python -m scripts.report.rebuild` draws the picture from those of --out.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.delegate import delegate_attention
from megatron_asynchzp.attention.mask import AttentionMask
from megatron_asynchzp.attention.vendors import Sdpa
from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import BLUE, GREEN, GREY, INK, VERMILION, bare
from scripts.report.records import replace
from scripts.testbed.machine import machine_record

VOCABULARY, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 64, 64, 16, 128, 2, 2
LOSS_SCALE = 2.0**12  # as mixed-precision training has it: dO would underflow in fp16


@dataclass(frozen=True)
class Way:
    """dtype of attention, whether keys (and values) are shifted. is_floor: q, k and v are rounded
    to dtype and attention itself is fp32: what no attention in that dtype can do better than."""

    name: str
    dtype: torch.dtype
    is_pasa: bool = False
    shifts_values: bool = False
    is_floor: bool = False

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.is_floor:
            rounded = (x + (x.to(self.dtype).float() - x).detach() for x in (q, k, v))
            return EXACT.attend(*rounded)
        call = AttentionCall(
            *(x.to(self.dtype) for x in (q, k, v)),
            AttentionMask(LENGTH, LENGTH, is_causal=True),
            q.shape[-1] ** -0.5,
        )
        if self.is_pasa:
            return delegate_attention(call, "sdpa", shifts_values=self.shifts_values).float()
        return Sdpa().run(call).float()


EXACT = Way("fp32", torch.float32)
WAYS = (
    EXACT,
    Way("fp16, standard", torch.float16),
    Way("fp16, PASA", torch.float16, True),
    Way("fp16, PASA, values too", torch.float16, True, True),
    Way("fp16, only q k v rounded", torch.float16, is_floor=True),
    Way("bf16, standard", torch.bfloat16),
    Way("bf16, PASA", torch.bfloat16, True),
    Way("bf16, PASA, values too", torch.bfloat16, True, True),
    Way("bf16, only q k v rounded", torch.bfloat16, is_floor=True),
)


class Block(nn.Module):
    def __init__(self, k_bias: float, v_bias: float):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
        with torch.no_grad():  # a bias as trained models have it: learned, and large
            self.k.bias.copy_(k_bias * torch.randn(WIDTH).sign())
            self.v.bias.copy_(v_bias * torch.randn(WIDTH).sign())

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        normed = self.norms[0](x)
        heads = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        x = x + self.out(way.attend(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, k_bias: float, v_bias: float):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(k_bias, v_bias) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: torch.Tensor, way: Way) -> torch.Tensor:
        x = self.tokens(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x, way)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def draw_batch(generator: torch.Generator) -> torch.Tensor:
    """Sequences that count with a step of their own: the step must be attended to."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    step = torch.randint(1, 12, (BATCH, 1), generator=generator)
    return (start + step * torch.arange(LENGTH + 1)) % VOCABULARY


def query_gradient(model: Gpt, tokens: torch.Tensor, way: Way) -> torch.Tensor:
    weights = [block.q.weight for block in model.blocks]
    gradients = torch.autograd.grad(LOSS_SCALE * model.loss(tokens, way), weights)
    return torch.cat([g.flatten() for g in gradients])


def train(
    way: Way, k_bias: float, v_bias: float, steps: int, every: int = 20, seed: int = 0
) -> dict:
    """Losses of all steps, and every so often how far the gradient of Q's weights is from fp32's
    at the same weights and tokens."""
    torch.manual_seed(seed)
    model, generator = Gpt(k_bias, v_bias), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, errors = [], []
    for step in range(steps):
        tokens = draw_batch(generator)
        if step % every == 0 and way is not EXACT:
            true = query_gradient(model, tokens, EXACT)
            found = query_gradient(model, tokens, way)
            errors.append(((found - true).norm() / true.norm()).item())
        loss = model.loss(tokens, way)
        optimizer.zero_grad()
        (LOSS_SCALE * loss).backward()
        for param in model.parameters():
            param.grad /= LOSS_SCALE
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    # fmt: off
    return {
        "way": way.name, "k_bias": k_bias, "v_bias": v_bias, "seed": seed, "losses": losses,
        "errors": errors, "every": every,
    }
    # fmt: on


# What the end of a way's name looks like, with its words in the legend.
_LOOKS: dict[str, tuple[str, dict]] = {
    "fp32": ("attention in fp32", {"color": GREY, "linewidth": 4}),
    "standard": ("standard", {"color": VERMILION, "marker": "o"}),
    "PASA": ("PASA", {"color": BLUE, "marker": "s"}),
    "too": ("PASA, values shifted too", {"color": GREEN, "marker": "^"}),
    "rounded": ("only q, k and v rounded: the best possible", {"color": INK, "linestyle": ":"}),
}


def draw(runs: list[dict], path: Path) -> None:
    """A column for each setting of the biases, and below the losses a row of errors for each dtype,
    with one scale a row."""
    from matplotlib.lines import Line2D

    settings = list(dict.fromkeys((run["k_bias"], run["v_bias"]) for run in runs))
    figure = styles.new_figure(8)
    panels = figure.subplots(3, len(settings), squeeze=False, sharex=True, sharey="row")
    for setting, column in zip(settings, panels.T, strict=True):
        of_setting = [run for run in runs if (run["k_bias"], run["v_bias"]) == setting]
        _draw_losses(column[0], of_setting)
        for axes, dtype in zip(column[1:], ("fp16", "bf16"), strict=True):
            _draw_errors(axes, [run for run in of_setting if run["way"].startswith(dtype)])
        styles.set_title(column[0], "bias of keys {:g}, of values {:g}".format(*setting))
        column[-1].set_xlabel("training step", fontsize=styles.NORMAL)
        for axes in column:
            bare(axes, grid="y")
    labels = "loss (mean of 10 steps)", "fp16: error of dQ", "bf16: error of dQ"
    for axes, label in zip(panels[:, 0], labels, strict=True):
        axes.set_ylabel(label, fontsize=styles.NORMAL)
    handles = [Line2D([], [], label=label, **look) for label, look in _LOOKS.values()]
    styles.add_legend(figure, handles)
    styles.add_caption(
        figure,
        "losses: full lines fp16, dashed lines bf16; where lines lie on each other, the losses are "
        "alike",
        "error of dQ: of the gradient of the query weights, relative to attention in fp32 at the "
        "same weights",
    )
    figure.savefig(path, dpi=styles.DPI)


def _look_of(run: dict) -> dict:
    look = next(look for end, (_, look) in _LOOKS.items() if run["way"].endswith(end))
    return {"linewidth": 1.4, "markersize": 4.5} | look


def _draw_losses(axes, runs: list[dict]) -> None:
    for index, run in enumerate(runs):
        smooth = torch.tensor(run["losses"]).unfold(0, 10, 1).mean(1)
        # Marks of different ways at different steps, so that none hides another.
        look = {"markevery": (0.03 * index, 0.3)} | _look_of(run)
        if run["way"].startswith("bf16"):
            look["linestyle"] = "--"
        axes.plot(smooth, **look)


def _draw_errors(axes, runs: list[dict]) -> None:
    for index, run in enumerate(runs):
        steps = [i * run["every"] for i in range(len(run["errors"]))]
        axes.semilogy(steps, run["errors"], markevery=(index, len(runs)), **_look_of(run))


def _short(run: dict) -> dict:
    """With no more digits than a picture or a table shows."""
    rounded = {key: [float(f"{value:.5g}") for value in run[key]] for key in ("losses", "errors")}
    return {"kind": "run"} | run | rounded


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--biases", nargs="+", default=["0,0", "30,0", "10,30"], metavar="K,V")
    parser.add_argument(
        "--more-seeds",
        type=int,
        nargs="*",
        default=[1, 2],
        metavar="N",
        help="beside 0, of the last of the biases",
    )
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON lines there")
    options = parser.parse_args(argv)
    runs = []
    settings = [(setting, 0) for setting in options.biases]
    for setting, seed in [*settings, *((options.biases[-1], seed) for seed in options.more_seeds)]:
        k_bias, v_bias = (float(x) for x in setting.split(","))
        for way in WAYS:
            runs.append(train(way, k_bias, v_bias, options.steps, seed=seed))
            last, errors = runs[-1]["losses"][-50:], sorted(runs[-1]["errors"])
            record = {
                "way": way.name,
                "k_bias": k_bias,
                "v_bias": v_bias,
                "loss_of_last_50_steps": sum(last) / len(last),
                "median_error": errors[len(errors) // 2] if errors else None,
                "largest_error": errors[-1] if errors else None,
            }
            print(json.dumps(record), flush=True)
    if options.out:
        replace(options.out, [machine_record(), *map(_short, runs)])
    if options.picture:
        draw([run for run in runs if run["seed"] == 0], options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
