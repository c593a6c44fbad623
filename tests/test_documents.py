# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What documents name exists: files of ours, flags, commands and modules; and what they are written
in is shown as what it means."""

import re
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache

import pytest
from markdown_it import MarkdownIt

from megatron_asynchzp.command import COMMANDS
from megatron_asynchzp.mcore.flags.arguments import add_asynchzp_arguments
from megatron_asynchzp.mcore.flags.pasa import add_pasa_arguments
from scripts.report import rebuild

ROOT = rebuild.ROOT
FOLDERS = ("megatron_asynchzp", "scripts", "tests", "docs", "patches", "requirements")
DOCUMENTS = [*rebuild.documents(), *(ROOT / "patches").rglob("*.md")]
# Named without being files of ours: those of Megatron-LM, of a user, and what a run writes.
OF_OTHERS = {"pretrain_hybrid.py", "theoretical_memory_usage.py", "program.py", "example.py"}
WRITTEN = {"asynchzp_owner.txt", "table.md", "records.jsonl", "pipeline.png"}
WRITTEN_TO = ("runs/", ".bytecode/", "asynchzp/")  # folders, and the tags of TensorBoard

_CODE = re.compile(r"^```.*?^```|``.+?``|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"[\w./-]*[\w-]\.(?:py|md|sh|slurm|toml|txt|lock|png|jsonl|cpp|patch)")
_FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/")
_IN_OURS = re.compile(rf"(?<![\w/-])(?:\./)?((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])(?![\w*{{])")
_FLAG = re.compile(r"(?<![\w-])--(?:no-|use-)?(?:asynchzp|pasa)(?:-[a-z]+)*(?![\w-])(?!-?[*.])")
_COMMAND = re.compile(r"(?:^|[;&|] *)asynchzp +([a-z][\w-]*)(?: +([a-z]+)\b)?", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+")
_MODULE = re.compile(rf"-m +((?:{'|'.join(FOLDERS[:3])})[\w./]*)")
_MODULE_LINE = re.compile(rf"-m +((?:{'|'.join(FOLDERS[:3])})[\w.]*\w)(.*)")
_COMMAND_LINE = re.compile(rf"(?:^|[;&|] *)asynchzp +({'|'.join(COMMANDS)})\b(.*)", re.MULTILINE)


def code_of(text: str) -> list[str]:
    """Spans and blocks of code, without their marks."""
    shown = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return [re.sub(r"^```.*\n?|`", "", span) for span in _CODE.findall(shown)]


@cache
def our_paths() -> frozenset[str]:
    """Files and folders (with / at the end), and every end of their paths."""
    tops = [path for path in ROOT.iterdir() if path.is_file()]
    inside = [path for folder in FOLDERS for path in [ROOT / folder, *(ROOT / folder).rglob("*")]]
    ends: set[str] = set()
    for path in [*tops, *inside]:
        parts = path.relative_to(ROOT).parts
        mark = "/" if path.is_dir() else ""
        ends.update("/".join(parts[start:]) + mark for start in range(len(parts)))
    return frozenset(ends)


def missing_files(text: str) -> Iterator[str]:
    """In a span of code a file or folder may be named by the end of its path (`zero/unit.py`); in a
    block and in prose what begins with a folder of ours is a whole path."""
    spans = [word for span in code_of(text) if "\n" not in span for word in span.split()]
    for word in spans:
        name = word.split("::")[0].strip(",;:()").removeprefix("./")
        if not (_FILE.fullmatch(name) or _FOLDER.fullmatch(name)):
            continue
        is_of_others = name in OF_OTHERS | WRITTEN or name.startswith(WRITTEN_TO)
        if not is_of_others and name not in our_paths():
            yield name
    for name in _IN_OURS.findall(re.sub(r"\]\([^)]*\)", "", text)):  # links: test_claims.py
        if not (ROOT / name.split("::")[0]).exists():
            yield name


@cache
def our_flags() -> frozenset[str]:
    parser = add_pasa_arguments(add_asynchzp_arguments(ArgumentParser(add_help=False)))
    return frozenset(option for action in parser._actions for option in action.option_strings)


def missing_flags(text: str) -> Iterator[str]:
    yield from (flag for flag in _FLAG.findall(text) if flag not in our_flags())


def missing_commands(text: str) -> Iterator[str]:
    for span in code_of(text):
        for name, of_hf in _COMMAND.findall(span):
            if name not in COMMANDS or (name == "hf" and of_hf not in ("export", "import")):
                yield f"asynchzp {name} {of_hf}".rstrip()


def missing_modules(text: str) -> Iterator[str]:
    for name in (found.rstrip(".") for found in _MODULE.findall(text)):
        path = ROOT / name.replace(".", "/")
        is_module = "/" not in name and path.with_suffix(".py").is_file()
        if not (is_module or (path / "__main__.py").is_file() or "NAME" in name):
            yield name


def missing_options(text: str) -> Iterator[str]:
    """Options that follow a module or a command of ours, on its line, and are not in its source.
    What starts Megatron takes Megatron's."""
    shown = "\n".join(code_of(text)).replace("\\\n", " ")
    starts = [*_MODULE_LINE.findall(shown), *_COMMAND_LINE.findall(shown)]
    for name, rest in starts:
        module = f"megatron_asynchzp.{COMMANDS[name].module}" if name in COMMANDS else name
        if module != "megatron_asynchzp.launch":
            source = source_of(module)
            options = _OPTION.findall(rest.split(" -- ")[0])
            yield from (f"{name} {option}" for option in options if f'"{option}"' not in source)


@cache
def source_of(module: str) -> str:
    """Of a module, or of all modules of a package that is started as a command."""
    path = ROOT / module.removesuffix(".__main__").replace(".", "/")
    files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else path.glob("*.py")
    return "".join(file.read_text() for file in files)


CHECKS = [missing_files, missing_flags, missing_commands, missing_modules, missing_options]


@pytest.mark.parametrize("missing", CHECKS, ids=lambda check: check.__name__.split("_")[1])
def test_what_a_document_names_exists(missing):
    bad = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in DOCUMENTS
        for name in missing(page.read_text())
    }
    assert not bad, "\n".join(sorted(bad))


_MARKDOWN = MarkdownIt("commonmark").enable("table")
_LEFT = re.compile(r"\]\(|\*\*|`|^\s*\|", re.MULTILINE)


def unrendered(text: str) -> list[str]:
    """What readers would see as marks: links, bold type, code and tables in text and in blocks of
    HTML. A line that begins with a comment is such a block, to its end, and so is not Markdown."""
    found = []
    for token in _MARKDOWN.parse(text):
        shown = [one.content for one in token.children or () if one.type == "text"]
        if token.type == "html_block":
            shown = [re.sub(r"<!--.*?-->", "", token.content, flags=re.DOTALL).strip()]
            found += [one for one in shown if one and not one.startswith("<")]
        found += [one for one in shown if _LEFT.search(one)]
    return found


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_shown_without_a_mark_of_markdown(page):
    assert not unrendered(page.read_text())


# ---- the checks themselves


def test_a_mark_that_is_not_rendered_is_seen():
    good = "It is <!-- = a -->1<!-- --> [b](c.md), **d** and `](`.\n\n"
    good += "<!-- table: e -->\n\n| f |\n|---|\n"
    assert not unrendered(good)
    assert unrendered("It is\n<!-- = a -->1<!-- --> and more ([b](c.md)).")
    assert unrendered("It is\n<!-- = a -->1<!-- --> and more.")
    assert unrendered("- It is\n  <!-- = a -->1<!-- -->.")
    assert unrendered("A [link] (c.md) [b]( c d.md).")
    assert unrendered("Nothing above.\n| f |\n| g |")


@pytest.mark.parametrize(
    ("missing", "good", "bad"),
    [
        (missing_files, "`zero/unit.py`, `unit.py`, `zero/`, `tests/`", "`zero/gone.py`"),
        (missing_files, "```sh\nscripts/test.sh x\n```", "```sh\nscripts/gone.sh x\n```"),
        (missing_flags, "`--asynchzp-trace`, `--asynchzp-*`", "`--asynchzp-traces FILE`"),
        (missing_commands, "`asynchzp inspect FILE`; asynchzp is", "`asynchzp draw FILE`"),
        (missing_modules, "`python -m scripts.bench.compare`", "`python -m scripts.bench.gone`"),
        (missing_options, "`-m scripts.testbed --nodes`", "`-m scripts.testbed --node`"),
        (missing_options, "`asynchzp plan --rows 3 -- --x`", "`asynchzp plan --row 3 -- --x`"),
    ],
)
def test_a_name_of_nothing_is_seen(missing, good, bad):
    assert not list(missing(good))
    assert len(list(missing(bad))) == 1
