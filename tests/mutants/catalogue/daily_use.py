# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what a user meets."""

from tests.mutants.catalogue.mutant import Mutant

_TIMELINE = "tests/test_plot_timeline.py::test_"
_MISTAKE = "tests/test_mistakes.py::test_a_mistake_ends_in_one_line_and_not_with_0"
_COMMAND_LINE = "tests/mcore/flags/test_command_line.py::test_"

MUTANTS = [
    Mutant(
        "mistyped-flags-pass",
        "a mistyped flag of ours is refused with the nearest name",
        "mcore/flags/command_line.py",
        "if meant := mistyped(flag, own):",
        "if (meant := mistyped(flag, own)) and False:",
        f"{_MISTAKE}[our main flag mistyped]",
    ),
    Mutant(
        "flags-without-effect-pass",
        "sizes without --use-asynchzp are refused",
        "mcore/flags/command_line.py",
        "if not (args.use_pasa_attention if is_pasa else args.use_asynchzp):",
        "if False:",
        f"{_MISTAKE}[sizes without the main flag]",
    ),
    Mutant(
        "megatrons-flags-look-mistyped",
        "no flag of Megatron is taken for a mistyped one of ours",
        "mcore/flags/command_line.py",
        "_ALIKE = 0.9",
        "_ALIKE = 0.5",
        f"{_COMMAND_LINE}no_flag_of_megatron_is_taken_for_a_mistyped_flag_of_ours",
    ),
    Mutant(
        "checks-import-torch",
        "a refusal loads neither torch nor Megatron",
        "mcore/flags/checks.py",
        "import os\nimport re\nfrom argparse import Namespace",
        "import os\nimport re\n\nimport torch as torch\nfrom argparse import Namespace",
        f"{_COMMAND_LINE}checking_a_command_line_loads_neither_torch_nor_megatron",
    ),
    Mutant(
        "any-file-is-an-index",
        "a foreign file is not taken for a dataset",
        "mcore/flags/checks.py",
        "if header != _INDEX_HEADER:",
        "if not header:",
        f"{_MISTAKE}[a foreign index]",
    ),
    Mutant(
        "torchrun-gets-no-line",
        "torchrun repeats the line at its end",
        "mcore/process/refusal.py",
        "_leave_for_torchrun(str(error))",
        "pass",
        "tests/test_mistakes.py::test_torchrun_gets_the_line_for_the_table_that_it_ends_with",
    ),
    Mutant(
        "waits-are-drawn-as-computing",
        "a unit that waits is not drawn as computing",
        "tools/step_trace.py",
        "if other.start >= whole.end:",
        "if True:",
        f"{_TIMELINE}a_unit_that_waits_is_not_drawn_as_computing",
    ),
    Mutant(
        "a-root-computes-what-its-layers-do",
        "a module that mostly waits is not drawn as computing",
        "tools/step_trace.py",
        "outside(outer, [*self.lane(WAIT), *within])",
        "outside(outer, self.lane(WAIT))",
        f"{_TIMELINE}a_module_that_mostly_waits_is_not_drawn_as_computing",
    ),
    Mutant(
        "no-row-for-muon",
        "every lane that moves bytes has a row in the picture",
        "tools/plot_timeline.py",
        '    "matrices": "matrices to their owners and back (Muon)",\n',
        "",
        f"{_TIMELINE}every_lane_that_moves_bytes_has_a_row_a_colour_and_a_meaning",
    ),
    Mutant(
        "dry-run-with-nodes-of-eight",
        "a dry run has the nodes of the launch",
        "launch.py",
        'os.environ["LOCAL_WORLD_SIZE"] = per_node',
        "pass",
        "tests/test_packaging.py::test_a_dry_run_has_the_ranks_and_the_nodes_of_the_launch",
    ),
    Mutant(
        "older-format-is-interrupted",
        "a checkpoint of another format is not called an interrupted save",
        "checkpoint_files/choice.py",
        "and not is_of_format_torch(folder)",
        "",
        "tests/checkpoint_files/test_choice.py::"
        "test_a_checkpoint_of_megatrons_older_format_is_not_called_interrupted",
    ),
    Mutant(
        "older-format-is-found-late",
        "a --load that cannot be read is refused before Megatron is imported",
        "mcore/flags/command_line.py",
        "checks.refuse_useless_load(args)",
        "pass",
        f"{_MISTAKE}[a checkpoint of the older format]",
    ),
    Mutant(
        "workers-out-of-order",
        "several processes write the dataset that one writes",
        "tools/prepare_data.py",
        "yield from pending.popleft().result()\n        while pending:",
        "yield from pending.pop().result()\n        while pending:",
        "tests/test_prepare_data.py::test_two_processes_write_the_same_dataset_as_one",
    ),
    Mutant(
        "layers-in-the-order-of-letters",
        "the inspector shows layer 2 before layer 10",
        "attention/inspect.py",
        "sorted(layers, key=_layer_order)",
        "sorted(layers, key=str)",
        "tests/attention/test_inspect.py::test_layers_may_have_names_whose_numbers_are_in_order",
    ),
]
